"""The two sets of kernels that a decode step on CUDA is made of.

The single-row set multiplies matrices by one vector and is as fast as memory can be read. The multi-row set multiplies
them by a tile of 16 rows through tensor cores, whatever the number of rows in use: a row's result depends on nothing
but that row. Between the sets roundings differ, so an engine keeps to one of them and says which.

Each kernel is launched by programmatic dependent launch, loads what is constant within a step while its predecessor
still runs, and waits for it before its first dependent read and its first write. Constant are weights, rope tables, the
block table, positions, and the cache's older slots: the step's last kernel advances the positions after its own wait,
and the next replay starts when the graph has ended.
"""

from __future__ import annotations

from typing import Protocol

import torch
import triton

from skote.kernels.flash_decode_triton import Attention, flash_decode
from skote.kernels.gate_up_gemm_triton import gate_up_gemm
from skote.kernels.gate_up_gemv_triton import gate_up_gemv
from skote.kernels.head_gemm_triton import head_gemm
from skote.kernels.head_gemv_triton import head_gemv
from skote.kernels.launch import MAX_ROWS
from skote.kernels.qkv_gemm_triton import qkv_gemm
from skote.kernels.qkv_gemv_triton import qkv_gemv
from skote.kernels.residual_gemm_triton import residual_gemm
from skote.kernels.residual_gemv_triton import residual_gemv
from skote.kernels.tiles import StepTiles, batch_tiles, step_tiles
from skote.model.spec import DecoderSpec
from skote.model.weights import DecoderWeights, LayerWeights
from skote.runtime.paged_cache import Pool
from skote.runtime.step_state import StepState

_SHORTEST = 256  # positions that the first graph covers, each further one twice as many: idle programs cost time


class KernelSet(Protocol):
    """A layer and the head of a step over `rows` rows. Each method returns the names of the ops that it launched.

    `best` fp32 and `first` int32, `[rows, programs]`, hold the first stage of the greedy choice after `head`.
    """

    name: str
    rows: int
    attention: Attention
    best: torch.Tensor
    first: torch.Tensor

    def layer(self, state: StepState, weights: LayerWeights, pool: Pool, positions: int) -> tuple[str, ...]:
        """One layer on `state.x`, where at most the first `positions` positions are in use."""

    def head(self, state: StepState, weights: DecoderWeights) -> tuple[str, ...]:
        """Final norm and logits."""


def coverage(capacity: int) -> list[int]:
    """How many positions each captured step covers, the last one all of them."""
    covered = [_SHORTEST]
    while covered[-1] < capacity:
        covered.append(covered[-1] * 2)
    return [min(each, capacity) for each in covered]


class _Buffers:
    """What passes between the kernels of a step."""

    def __init__(self, spec: DecoderSpec, weights: DecoderWeights, rows: int, capacity: int, cut: Attention) -> None:
        dtype, device = weights.norm.dtype, weights.norm.device
        splits = max(triton.cdiv(covered, cut.split(covered)) for covered in coverage(capacity))
        self.q = torch.zeros(rows, spec.heads, spec.head_dim, dtype=dtype, device=device)
        self.attended = torch.zeros_like(self.q)
        self.h = torch.zeros(rows, spec.intermediate, dtype=dtype, device=device)
        self.sums = torch.zeros(rows, splits, spec.heads, spec.head_dim, device=device)
        self.stats = torch.zeros(rows, splits, 2, spec.heads, device=device)

    def attend(self, state: StepState, pool: Pool, positions: int, cut: Attention, pdl: bool) -> None:
        """`attended` from `q` and the cache."""
        flash_decode(
            self.q,
            *pool,
            state.position,
            state.table,
            self.attended,
            self.sums,
            self.stats,
            positions=positions,
            cut=cut,
            pdl=pdl,
        )


class SingleRow:
    """Matrix-vector kernels for one row. `attention` is how it is cut, by default as it suits the model."""

    name = "single-row"
    rows = 1

    def __init__(
        self,
        spec: DecoderSpec,
        weights: DecoderWeights,
        capacity: int,
        *,
        attention: Attention | None = None,
        tiles: StepTiles | None = None,
        pdl: bool = True,
    ) -> None:
        self._eps, self._pdl = spec.norm_eps, pdl
        tiles = tiles or step_tiles(spec.hidden, spec.intermediate)
        self.attention = attention or tiles.attention
        self._tiles = tiles._replace(attention=self.attention)
        self._between = _Buffers(spec, weights, self.rows, capacity, self.attention)
        programs = triton.cdiv(spec.vocab, self._tiles.head.rows)
        self.best = torch.zeros(1, programs, device=weights.norm.device)
        self.first = torch.zeros(1, programs, dtype=torch.int32, device=weights.norm.device)

    def layer(self, state: StepState, weights: LayerWeights, pool: Pool, positions: int) -> tuple[str, ...]:
        """As `KernelSet.layer`."""
        tiles, between, x = self._tiles, self._between, state.x[0]
        qkv_gemv(
            x,
            weights.attn_norm,
            weights.qkv,
            state.cos,
            state.sin,
            state.position,
            state.table,
            between.q[0],
            *pool,
            eps=self._eps,
            page=self.attention.page,
            tile=tiles.qkv,
            pdl=self._pdl,
        )
        between.attend(state, pool, positions, self.attention, self._pdl)
        residual_gemv(x, between.attended[0], weights.o, tile=tiles.o, pdl=self._pdl)
        gate_up_gemv(
            x, weights.mlp_norm, weights.gate_up, between.h[0], eps=self._eps, tile=tiles.gate_up, pdl=self._pdl
        )
        residual_gemv(x, between.h[0], weights.down, tile=tiles.down, pdl=self._pdl)
        return "qkv_gemv", "flash_decode", "residual_gemv", "gate_up_gemv", "residual_gemv"

    def head(self, state: StepState, weights: DecoderWeights) -> tuple[str, ...]:
        """As `KernelSet.head`."""
        head_gemv(
            state.x[0],
            weights.norm,
            weights.lm_head,
            state.logits[0],
            self.best[0],
            self.first[0],
            eps=self._eps,
            tile=self._tiles.head,
            pdl=self._pdl,
        )
        return ("head_gemv",)


class MultiRow:
    """Tensor-core kernels for a tile of 16 rows, of which those with a negative position are idle."""

    name = "multi-row"
    rows = MAX_ROWS

    def __init__(self, spec: DecoderSpec, weights: DecoderWeights, capacity: int, *, pdl: bool = True) -> None:
        self._eps, self._pdl = spec.norm_eps, pdl
        self._tiles = batch_tiles(spec.hidden, spec.intermediate)
        self.attention = self._tiles.attention
        self._between = _Buffers(spec, weights, self.rows, capacity, self.attention)
        programs = triton.cdiv(spec.vocab, self._tiles.head.rows)
        self.best = torch.zeros(self.rows, programs, device=weights.norm.device)
        self.first = torch.zeros(self.rows, programs, dtype=torch.int32, device=weights.norm.device)

    def layer(self, state: StepState, weights: LayerWeights, pool: Pool, positions: int) -> tuple[str, ...]:
        """As `KernelSet.layer`."""
        tiles, between = self._tiles, self._between
        qkv_gemm(
            state.x,
            weights.attn_norm,
            weights.qkv,
            state.cos,
            state.sin,
            state.position,
            state.table,
            between.q,
            *pool,
            eps=self._eps,
            page=self.attention.page,
            tile=tiles.qkv,
            pdl=self._pdl,
        )
        between.attend(state, pool, positions, self.attention, self._pdl)
        residual_gemm(state.x, between.attended.flatten(1), weights.o, tile=tiles.o, pdl=self._pdl)
        gate_up_gemm(
            state.x, weights.mlp_norm, weights.gate_up, between.h, eps=self._eps, tile=tiles.gate_up, pdl=self._pdl
        )
        residual_gemm(state.x, between.h, weights.down, tile=tiles.down, pdl=self._pdl)
        return "qkv_gemm", "flash_decode", "residual_gemm", "gate_up_gemm", "residual_gemm"

    def head(self, state: StepState, weights: DecoderWeights) -> tuple[str, ...]:
        """As `KernelSet.head`."""
        head_gemm(
            state.x,
            weights.norm,
            weights.lm_head,
            state.logits,
            self.best,
            self.first,
            eps=self._eps,
            tile=self._tiles.head,
            pdl=self._pdl,
        )
        return ("head_gemm",)
