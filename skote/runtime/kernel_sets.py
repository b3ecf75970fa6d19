"""The two sets of kernels that a decode step on CUDA is made of.

The single-row set multiplies matrices by one vector and is as fast as memory can be read. The multi-row set multiplies
them by a tile of 16, 32, 64 or 128 rows through tensor cores, of which those in use are the first: a row's result
depends on nothing but that row. Between the sets roundings differ, so an engine keeps to one of them and says which.

Each kernel is launched by programmatic dependent launch and waits for its predecessor before its first dependent read
and its first write; those of the single-row set load what is constant within a step while it still runs. Constant are
weights, rope tables, the block table, positions, and the cache's older slots: the step's last kernel advances the
positions after its own wait, and the next replay starts when the graph has ended.
"""

from __future__ import annotations

import torch
import triton

from skote.kernels.flash_decode_triton import Attention, flash_decode
from skote.kernels.gate_up_gemv_triton import gate_up_gemv
from skote.kernels.head_gemm_triton import head_gemm
from skote.kernels.head_gemv_triton import head_gemv
from skote.kernels.head_norm_triton import head_norm
from skote.kernels.qkv_gemv_triton import qkv_gemv
from skote.kernels.residual_gemv_triton import residual_gemv
from skote.kernels.tiles import StepTiles, batch_tiles, step_tiles
from skote.model.spec import DecoderSpec
from skote.model.weights import DecoderWeights, LayerWeights
from skote.runtime.gemm_chain import GemmChain, head_norms
from skote.runtime.paged_cache import Pool
from skote.runtime.step_state import StepState

_SHORTEST = 256  # positions that the first graph covers, each further one twice as many: idle programs cost time


def coverage(capacity: int, growth: int = 2) -> list[int]:
    """How many positions each captured step covers, `growth` times as many as the one before, the last all of them."""
    covered = [_SHORTEST]
    while covered[-1] < capacity:
        covered.append(covered[-1] * growth)
    return [min(each, capacity) for each in covered]


class StepAttention:
    """The attention of a step over up to `rows` rows, and its buffers."""

    def __init__(self, spec: DecoderSpec, weights: DecoderWeights, rows: int, capacity: int, cut: Attention) -> None:
        dtype, device = weights.norm.dtype, weights.norm.device
        splits = max(triton.cdiv(covered, cut.split(covered)) for covered in coverage(capacity))
        self._cut, self._scale = cut, spec.attention_scale
        self._out = torch.zeros(rows, spec.heads, spec.head_dim, dtype=dtype, device=device)
        self._sums = torch.zeros(rows, splits, spec.heads, spec.head_dim, device=device)
        self._stats = torch.zeros(rows, splits, 2, spec.heads, device=device)

    def __call__(self, q: torch.Tensor, state: StepState, pool: Pool, positions: int, pdl: bool) -> torch.Tensor:
        """What the rows of `state` gather from the cache with the first of `q` [rows, heads, head_dim].

        All rows of the buffer, of which the others hold what they held: `[rows, heads, head_dim]`, until the next call.
        """
        flash_decode(
            q[: state.rows],
            *pool,
            state.position,
            state.table,
            self._out[: state.rows],
            self._sums,
            self._stats,
            positions=positions,
            cut=self._cut,
            pdl=pdl,
            scale=self._scale,
        )
        return self._out


class SingleRow:
    """Matrix-vector kernels for one row. Each method returns the names of the ops that it launched.

    `best` fp32 and `first` int32, `[1, programs]`, hold the first stage of the greedy choice after `head`.
    """

    name = "single-row"
    rows = 1

    def __init__(
        self,
        spec: DecoderSpec,
        weights: DecoderWeights,
        capacity: int,
        *,
        tiles: StepTiles | None = None,
        pdl: bool = True,
    ) -> None:
        self._eps, self._pdl = spec.norm_eps, pdl
        tiles = tiles or step_tiles(spec.hidden, spec.intermediate, spec.head_dim, weights.norm.dtype)
        self.attention = tiles.attention
        self._tiles = tiles
        dtype, device = weights.norm.dtype, weights.norm.device
        self._q = torch.zeros(1, spec.heads, spec.head_dim, dtype=dtype, device=device)
        self._h = torch.zeros(spec.intermediate, dtype=dtype, device=device)
        self._attend = StepAttention(spec, weights, self.rows, capacity, self.attention)
        programs = triton.cdiv(spec.vocab, self._tiles.head.rows)
        self.best = torch.zeros(1, programs, device=device)
        self.first = torch.zeros(1, programs, dtype=torch.int32, device=device)

    def layer(self, state: StepState, weights: LayerWeights, pool: Pool, positions: int) -> tuple[str, ...]:
        """One layer on `state.x`, where at most the first `positions` positions are in use."""
        tiles, x = self._tiles, state.x[0]
        qkv_gemv(
            x,
            weights.attn_norm,
            weights.qkv,
            state.cos,
            state.sin,
            state.position,
            state.table,
            self._q[0],
            *pool,
            eps=self._eps,
            page=self.attention.page,
            tile=tiles.qkv,
            pdl=self._pdl,
            bias=weights.qkv_bias,
            rotate=weights.q_norm is None,
        )
        normed: tuple[str, ...] = ()
        if (norms := head_norms(weights)) is not None:
            place = state.cos, state.sin, state.position, state.table
            head_norm(self._q, pool[0], *norms, *place, eps=self._eps, page=self.attention.page, pdl=self._pdl)
            normed = ("head_norm",)
        attended = self._attend(self._q, state, pool, positions, self._pdl)
        residual_gemv(x, attended[0], weights.o, tile=tiles.o, pdl=self._pdl)
        gate_up_gemv(x, weights.mlp_norm, weights.gate_up, self._h, eps=self._eps, tile=tiles.gate_up, pdl=self._pdl)
        residual_gemv(x, self._h, weights.down, tile=tiles.down, pdl=self._pdl)
        return "qkv_gemv", *normed, "flash_decode", "residual_gemv", "gate_up_gemv", "residual_gemv"

    def head(self, state: StepState, weights: DecoderWeights) -> tuple[str, ...]:
        """Final norm and logits."""
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
    """Tensor-core kernels for a tile of `rows` rows, one of `ROW_TILES`. Those with a negative position are idle.

    `attend` may serve several tiles, one after another; it has at least as many rows.
    """

    name = "multi-row"

    def __init__(
        self, spec: DecoderSpec, weights: DecoderWeights, rows: int, *, attend: StepAttention, pdl: bool = True
    ) -> None:
        self.rows = rows
        self._pdl = pdl
        self._tiles = batch_tiles(spec.hidden, spec.intermediate, spec.head_dim, weights.norm.itemsize, rows)
        self._attend = attend
        page = self._tiles.attention.page
        self._chain = GemmChain(spec, weights, rows, tiles=self._tiles, page=page, pdl=pdl)
        programs = triton.cdiv(spec.vocab, self._tiles.head.rows)
        self.best = torch.zeros(rows, programs, device=weights.norm.device)
        self.first = torch.zeros(rows, programs, dtype=torch.int32, device=weights.norm.device)

    def layer(
        self, tile: StepState, live: StepState, weights: LayerWeights, pool: Pool, positions: int
    ) -> tuple[str, ...]:
        """One layer on the rows of `tile`, of which `live` has the first: beyond them all are idle."""
        rope = tile.cos, tile.sin
        before = self._chain.qkv(tile.x, weights, rope, tile.position, tile.table, pool)
        attended = self._attend(self._chain.q, live, pool, positions, self._pdl)[: self.rows]
        return (*before, "flash_decode", *self._chain.mlp(tile.x, attended.flatten(1), weights))

    def head(self, tile: StepState, weights: DecoderWeights) -> tuple[str, ...]:
        """Final norm and logits, and in `best` and `first` the first stage of the greedy choice."""
        normed = self._chain.norm(tile.x, weights.norm)
        head_gemm(
            self._chain.normed,
            weights.lm_head,
            tile.logits,
            self.best,
            self.first,
            tile=self._tiles.head,
            pdl=self._pdl,
        )
        return (*normed, "head_gemm")
