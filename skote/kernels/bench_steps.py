"""The projections of a decode step, ready to be timed: each op as a function of its weight matrix alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from skote.kernels.gate_up_gemm_triton import gate_up_gemm
from skote.kernels.gate_up_gemv_triton import gate_up_gemv
from skote.kernels.head_gemm_triton import head_gemm
from skote.kernels.head_gemv_triton import head_gemv
from skote.kernels.launch import GemmTile
from skote.kernels.qkv_gemm_triton import qkv_gemm
from skote.kernels.qkv_gemv_triton import qkv_gemv
from skote.kernels.residual_gemv_triton import residual_gemv
from skote.kernels.split_gemm_triton import split_gemm
from skote.kernels.tiles import batch_tiles, step_tiles


class Shape(NamedTuple):
    """The widths that decide the sizes of a model's matrices and cache."""

    hidden: int
    intermediate: int
    vocab: int
    heads: int
    kv_heads: int
    head_dim: int


class Projection(NamedTuple):
    """`run(weight)` for a weight of `[rows, columns]` in bf16."""

    op: str
    rows: int
    columns: int
    run: Callable[[torch.Tensor], None]


class _Room:
    """What the ops read beside the weights, and what they write, for `rows` rows at position 0 of their first page."""

    def __init__(self, shape: Shape, rows: int, page: int, head_tile: int) -> None:
        programs = -(-shape.vocab // head_tile)
        self.x = torch.randn(rows, shape.hidden, device="cuda")
        self.norm = torch.ones(shape.hidden, dtype=torch.bfloat16, device="cuda")
        self.h = torch.randn(rows, shape.intermediate, device="cuda").bfloat16()
        self.attended = torch.randn(rows, shape.heads * shape.head_dim, device="cuda").bfloat16()
        self.q = torch.empty(rows, shape.heads, shape.head_dim, dtype=torch.bfloat16, device="cuda")
        self.k, self.v = torch.empty(
            2, shape.kv_heads, rows * page, shape.head_dim, dtype=torch.bfloat16, device="cuda"
        ).unbind()
        self.cos, self.sin = torch.ones(2, page, shape.head_dim, device="cuda").unbind()
        self.positions = torch.zeros(rows, dtype=torch.int32, device="cuda")
        self.table = torch.arange(rows, dtype=torch.int32, device="cuda")[:, None]
        self.logits = torch.empty(rows, shape.vocab, device="cuda")
        self.best = torch.empty(rows, programs, device="cuda")
        self.first = torch.empty(rows, programs, dtype=torch.int32, device="cuda")


def single_row_ops(shape: Shape, eps: float) -> list[Projection]:
    """The matrix-vector kernels, with programmatic dependent launch on."""
    tiles = step_tiles(shape.hidden, shape.intermediate, shape.head_dim, torch.bfloat16)
    page = tiles.attention.page
    room = _Room(shape, 1, page, tiles.head.rows)
    x, norm = room.x[0], room.norm

    def qkv(weight: torch.Tensor) -> None:
        place = room.cos, room.sin, room.positions, room.table
        qkv_gemv(x, norm, weight, *place, room.q[0], room.k, room.v, eps=eps, page=page, tile=tiles.qkv, pdl=True)

    def o(weight: torch.Tensor) -> None:
        residual_gemv(x, room.attended[0], weight, tile=tiles.o, pdl=True)

    def gate_up(weight: torch.Tensor) -> None:
        gate_up_gemv(x, norm, weight, room.h[0], eps=eps, tile=tiles.gate_up, pdl=True)

    def down(weight: torch.Tensor) -> None:
        residual_gemv(x, room.h[0], weight, tile=tiles.down, pdl=True)

    def head(weight: torch.Tensor) -> None:
        chosen = room.best[0], room.first[0]
        head_gemv(x, norm, weight, room.logits[0], *chosen, eps=eps, tile=tiles.head, pdl=True)

    return _projections(shape, "gemv", qkv, o, gate_up, down, head)


def multi_row_ops(shape: Shape, rows: int) -> list[Projection]:
    """The kernels for `rows` rows, with programmatic dependent launch on."""
    tiles = batch_tiles(shape.hidden, shape.intermediate, shape.head_dim, torch.bfloat16.itemsize, rows)
    page = tiles.attention.page
    room = _Room(shape, rows, page, tiles.head.rows)
    normed = room.x.bfloat16()

    def qkv(weight: torch.Tensor) -> None:
        place = room.cos, room.sin, room.positions, room.table
        qkv_gemm(normed, weight, *place, room.q, room.k, room.v, page=page, tile=tiles.qkv, pdl=True)

    def split(h: torch.Tensor, tile: GemmTile) -> Callable[[torch.Tensor], None]:
        partials = torch.empty(tile.splits, rows, shape.hidden, device="cuda")
        return lambda weight: split_gemm(h, weight, partials, tile=tile, pdl=True)

    def gate_up(weight: torch.Tensor) -> None:
        gate_up_gemm(normed, weight, room.h, tile=tiles.gate_up, pdl=True)

    def head(weight: torch.Tensor) -> None:
        head_gemm(normed, weight, room.logits, room.best, room.first, tile=tiles.head, pdl=True)

    return _projections(shape, "gemm", qkv, split(room.attended, tiles.o), gate_up, split(room.h, tiles.down), head)


def _projections(shape: Shape, kind: str, *runs: Callable[[torch.Tensor], None]) -> list[Projection]:
    """`runs` in the order of a step, with the sizes of their matrices."""
    attended = shape.heads * shape.head_dim
    sizes = (
        ("qkv", attended + 2 * shape.kv_heads * shape.head_dim, shape.hidden),
        ("o", shape.hidden, attended),
        ("gate_up", 2 * shape.intermediate, shape.hidden),
        ("down", shape.hidden, shape.intermediate),
        ("head", shape.vocab, shape.hidden),
    )
    return [
        Projection(f"{name}_{kind}", rows, columns, run) for (name, rows, columns), run in zip(sizes, runs, strict=True)
    ]
