"""Microbenchmarks of the kernels on one CUDA device: bytes, time, TB/s, share of what the device can do, beside torch.

`python -m skote.kernels.bench --shape 8b` prints a table, `--csv FILE` writes it to a file. Each figure is the median
over replays of a CUDA graph that runs the op over copies of its weights or its cache, together larger than the L2
cache, so that every byte comes from memory; but for `head_norm`, whose few operands the kernel before it has just
written. Bytes are those that the op has to move: weights, keys and values, the rows of a norm, heads.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from skote.kernels.add_rms_norm_triton import add_rms_norm
from skote.kernels.attention import decode_attention
from skote.kernels.bench_steps import Shape, multi_row_ops, single_row_ops
from skote.kernels.bench_table import Ceiling, Table
from skote.kernels.flash_decode_triton import flash_decode
from skote.kernels.head_norm_triton import head_norm
from skote.kernels.launch import ROW_TILES
from skote.kernels.linear import matvec
from skote.kernels.read_bandwidth import read_bandwidth, replayed
from skote.kernels.rms_norm import rms_norm_reference
from skote.kernels.rms_norm_triton import rms_norm_triton
from skote.kernels.rope import apply_rope, inverse_frequencies, rope_table
from skote.kernels.tiles import batch_tiles, step_tiles
from skote.types import UsageError

ROTATED_BYTES = 512 << 20
COPIED_BYTES = 2 << 30
HEAD_COPIES = 32  # of the queries, one after another in a graph
EPS = 1e-5
SHAPES = {
    "8b": Shape(4096, 14336, 128256, heads=32, kv_heads=8, head_dim=128),
    "1b": Shape(2048, 8192, 128256, heads=32, kv_heads=8, head_dim=64),
    "135m": Shape(576, 1536, 49152, heads=9, kv_heads=3, head_dim=64),
}
POSITIONS = (1024, 8192, 32768)
NORM_SIZES = (576, 2048, 4096, 5120, 8192)
NORM_ROWS = (2048, 8192)
STEP_ROWS = (1, ROW_TILES[0], ROW_TILES[-1])
Op = Callable[[torch.Tensor], Any]


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; 4 where there is no CUDA device, or the file cannot be written."""
    parser = argparse.ArgumentParser(prog="python -m skote.kernels.bench", description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="8b")
    parser.add_argument("--compile", action="store_true", help="also time torch.compile (minutes more)")
    parser.add_argument("--csv", type=Path, metavar="FILE", help="also write the table to FILE")
    options = parser.parse_args(arguments)
    try:
        _measure(SHAPES[options.shape], options.csv, compiled=options.compile)
    except UsageError as error:
        sys.stderr.write(f"skote.kernels.bench: {error}\n")
        return 4
    return 0


@torch.no_grad()
def _measure(shape: Shape, path: Path | None, *, compiled: bool) -> None:
    if not torch.cuda.is_available():
        raise UsageError("there is no CUDA device to measure.")
    table = Table(torch.cuda.get_device_name(), sys.stdout, path)
    rate = read_bandwidth(torch.device("cuda"))
    if rate is None:
        raise UsageError("too little free memory on the device; end what else runs there.")
    reads, copies = Ceiling("read", rate), Ceiling("copy", copy_bandwidth())
    sys.stdout.write(
        f"{torch.cuda.get_device_name()}: reads {reads.rate / 1e12:.2f} TB/s, copies {copies.rate / 1e12:.2f} TB/s\n"
    )
    for batch in STEP_ROWS:
        ops = single_row_ops(shape, EPS) if batch == 1 else multi_row_ops(shape, batch)
        table.head(reads)
        for op, rows, columns, run in ops:
            _projection(table, op, run, (rows, columns), batch, reads, compiled=compiled)
    table.head(reads)
    for positions in POSITIONS:
        _attention(table, shape, positions, reads, compiled=compiled)
    table.head(copies)
    for rows in NORM_ROWS:
        for hidden in NORM_SIZES:
            _norm(table, rows, hidden, copies, compiled=compiled)
    table.head(copies)
    for rows in STEP_ROWS:
        _head_norm(table, shape, rows, copies, compiled=compiled)


def copy_bandwidth() -> float:
    """Bytes a second, read and written, of a plain copy of `COPIED_BYTES`."""
    x = torch.ones(COPIED_BYTES // 2, dtype=torch.bfloat16, device="cuda")
    return 2 * COPIED_BYTES / replayed(torch.empty_like(x).copy_, [x])


def _projection(
    table: Table, op: str, ours: Op, shape: tuple[int, int], batch: int, ceiling: Ceiling, *, compiled: bool
) -> None:
    rows, columns = shape
    size = 2 * rows * columns
    copies = _copies(size, lambda: torch.randn(rows, columns, device="cuda").bfloat16())
    x = torch.randn(1, batch, columns, device="cuda").bfloat16()
    ways: dict[str, Op] = {"triton": ours, "torch": partial(F.linear, x)}
    if compiled:
        ways["torch.compile"] = partial(torch.compile(matvec if batch == 1 else F.linear, dynamic=False), x)
    name = f"{op} {rows}x{columns}" + (f" x{batch}" if batch > 1 else "")
    table.add(name, size, _seconds(ways, copies), ceiling)


def _attention(lines: Table, shape: Shape, positions: int, ceiling: Ceiling, *, compiled: bool) -> None:
    """One new position over a cache of `positions`, beside SDPA over the same keys and values."""
    heads, kv_heads, head_dim = shape.heads, shape.kv_heads, shape.head_dim
    cut = step_tiles(shape.hidden, shape.intermediate, shape.head_dim, torch.bfloat16).attention
    size = 2 * 2 * kv_heads * positions * head_dim
    copies = _copies(size, lambda: torch.randn(2, kv_heads, positions, head_dim, device="cuda").bfloat16())
    q = torch.randn(1, heads, head_dim, device="cuda").bfloat16()
    out = torch.empty_like(q)
    newest = torch.tensor([positions - 1], dtype=torch.int32, device="cuda")
    table = torch.arange(positions // cut.page, dtype=torch.int32, device="cuda")[None]
    splits = -(-positions // cut.split(positions))
    sums = torch.empty(1, splits, heads, head_dim, device="cuda")
    stats = torch.empty(1, splits, 2, heads, device="cuda")
    rows, mask = q[:, :, None], torch.zeros(1, positions, device="cuda")

    def ours(cache: torch.Tensor) -> None:
        flash_decode(q, cache[0], cache[1], newest, table, out, sums, stats, positions=positions, cut=cut, pdl=True)

    ways: dict[str, Op] = {
        "triton": ours,
        "torch": lambda cache: F.scaled_dot_product_attention(rows, cache[:1], cache[1:], enable_gqa=True),
    }
    if compiled:
        reference = torch.compile(decode_attention, dynamic=False)
        ways["torch.compile"] = lambda cache: reference(rows, cache[:1], cache[1:], mask)
    lines.add(f"flash_decode {positions}", size, _seconds(ways, copies), ceiling)


def _norm(table: Table, rows: int, hidden: int, ceiling: Ceiling, *, compiled: bool) -> None:
    """RMSNorm over many rows in bf16: each element read and written once; with the residual add three times as much.

    `torch` is the formula in eager ops, as models write it; `copy` is what a plain copy of the same rows takes.
    """
    size = 2 * 2 * rows * hidden
    copies = _copies(size, lambda: torch.randn(rows, hidden, device="cuda").bfloat16())
    weight = torch.ones(hidden, dtype=torch.bfloat16, device="cuda")
    wide, out = torch.randn(rows, hidden, device="cuda"), torch.empty_like(copies[0])
    eager = partial(rms_norm_reference, weight=weight, eps=EPS)
    ways: dict[str, Op] = {
        "triton": partial(rms_norm_triton, weight=weight, eps=EPS),
        "torch": eager,
        "F.rms_norm": lambda x: F.rms_norm(x, (hidden,), weight, EPS),
        "copy": torch.clone,
    }
    if compiled:
        ways["torch.compile"] = partial(torch.compile(rms_norm_reference, dynamic=False), weight=weight, eps=EPS)
    table.add(f"rms_norm {rows}x{hidden}", size, _seconds(ways, copies), ceiling)
    add: dict[str, Op] = {
        "triton": lambda delta: add_rms_norm(wide, delta, weight, out, eps=EPS, pdl=False),
        "torch": lambda delta: out.copy_(eager(wide.add_(delta))),
    }
    table.add(f"add_rms_norm {rows}x{hidden}", 3 * size, _seconds(add, copies), ceiling)


def _head_norm(lines: Table, shape: Shape, rows: int, ceiling: Ceiling, *, compiled: bool) -> None:
    """The norms and rotations of one step's q and k heads in bf16, beside the same formula in eager ops."""
    heads, kv_heads, head_dim = shape.heads, shape.kv_heads, shape.head_dim
    page = batch_tiles(shape.hidden, shape.intermediate, head_dim, torch.bfloat16.itemsize).attention.page
    size = 2 * 2 * rows * (heads + kv_heads) * head_dim
    q = [torch.randn(rows, heads, head_dim, device="cuda").bfloat16() for _ in range(HEAD_COPIES)]
    k = torch.randn(kv_heads, rows * page, head_dim, device="cuda").bfloat16()
    q_norm, k_norm = torch.ones(2, head_dim, dtype=torch.bfloat16, device="cuda").unbind()
    cos, sin = rope_table(page, inverse_frequencies(head_dim, 10000.0).to("cuda"))
    positions = torch.full((rows,), page - 1, dtype=torch.int32, device="cuda")
    table = torch.arange(rows, dtype=torch.int32, device="cuda")[:, None]
    slots = table[:, 0].long() * page + page - 1
    angles = cos[page - 1], sin[page - 1]

    def ours(queries: torch.Tensor) -> None:
        head_norm(queries, k, q_norm, k_norm, cos, sin, positions, table, eps=EPS, page=page, pdl=True)

    def formula(queries: torch.Tensor) -> None:
        queries.copy_(apply_rope(rms_norm_reference(queries, q_norm, EPS), *angles))
        k[:, slots] = apply_rope(rms_norm_reference(k[:, slots], k_norm, EPS), *angles)

    ways: dict[str, Op] = {"triton": ours, "torch": formula}
    if compiled:
        ways["torch.compile"] = torch.compile(formula, dynamic=False)
    lines.add(f"head_norm {rows}x{heads + kv_heads}x{head_dim}", size, _seconds(ways, q), ceiling)


def _copies(size: int, make: Callable[[], torch.Tensor]) -> list[torch.Tensor]:
    return [make() for _ in range(max(-(-ROTATED_BYTES // size), 2))]


def _seconds(ways: Mapping[str, Op], copies: Sequence[torch.Tensor]) -> dict[str, float]:
    return {way: replayed(run, copies) for way, run in ways.items()}


if __name__ == "__main__":
    sys.exit(main())
