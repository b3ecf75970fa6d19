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
from skote.kernels.launch import Tile
from skote.kernels.owed_triton import Owed
from skote.kernels.qkv_gemv_triton import qkv_gemv
from skote.kernels.residual_gemv_triton import residual_gemv
from skote.kernels.tiles import StepTiles, batch_tiles, owing, step_tiles
from skote.model.spec import DecoderSpec
from skote.model.weights import DecoderWeights
from skote.runtime.cuda_layers import CudaLayer
from skote.runtime.expert_row import ExpertRow
from skote.runtime.gemm_chain import GemmChain, head_norms
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
        dtype, device = weights.embed.dtype, weights.embed.device
        windows = set(spec.layer_windows)
        splits = max(cut.splits(covered, window)[1] for covered in coverage(capacity) for window in windows)
        self._cut, self._scale, self._softcap = cut, spec.attention_scale, spec.attention_softcap
        self._out = torch.zeros(rows, spec.heads, spec.head_dim, dtype=dtype, device=device)
        self._sums = torch.zeros(rows, splits, spec.heads, spec.head_dim, device=device)
        self._stats = torch.zeros(rows, splits, 2, spec.heads, device=device)

    def __call__(self, q: torch.Tensor, state: StepState, layer: CudaLayer, positions: int, pdl: bool) -> torch.Tensor:
        """What the rows of `state` gather from the cache with the first of `q` [rows, heads, head_dim].

        All rows of the buffer, of which the others hold what they held: `[rows, heads, head_dim]`, until the next call.
        """
        flash_decode(
            q[: state.rows],
            *layer.pool,
            state.position,
            state.table,
            self._out[: state.rows],
            self._sums,
            self._stats,
            positions=positions,
            cut=self._cut,
            pdl=pdl,
            scale=self._scale,
            window=layer.window,
            softcap=self._softcap,
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
        self._spec, self._eps, self._pdl = spec, spec.norm_eps, pdl
        tiles = tiles or step_tiles(spec.hidden, spec.intermediate, spec.head_dim, weights.embed.dtype)
        tiles = owing(tiles, weights.embed.dtype) if spec.post_norms else tiles
        self.attention = tiles.attention
        self._tiles = tiles
        dtype, device = weights.embed.dtype, weights.embed.device
        self._q = torch.zeros(1, spec.heads, spec.head_dim, dtype=dtype, device=device)
        self._h = torch.zeros(spec.intermediate, dtype=dtype, device=device)
        self._experts = None if spec.experts is None else ExpertRow(spec, weights, tiles, pdl=pdl)
        self._attend = StepAttention(spec, weights, self.rows, capacity, self.attention)
        self._post: torch.Tensor | None = None  # the norm of what the last layer still owes
        self._delta = torch.zeros(spec.hidden, device=device)  # what is owed
        self._between = torch.zeros(spec.hidden, device=device)  # the residual stream from feed-forward to attention
        programs = triton.cdiv(spec.vocab, self._tiles.head.rows)
        self.best = torch.zeros(1, programs, device=device)
        self.first = torch.zeros(1, programs, dtype=torch.int32, device=device)

    def layer(self, state: StepState, layer: CudaLayer, positions: int) -> tuple[str, ...]:
        """One layer on `state.x`, where at most the first `positions` positions are in use."""
        weights, x, post = layer.weights, state.x[0], self._post
        qkv_gemv(
            x if post is None else self._between,
            weights.attn_norm,
            weights.qkv,
            *layer.rope,
            state.position,
            state.table,
            self._q[0],
            *layer.pool,
            eps=self._eps,
            page=self.attention.page,
            tile=self._tiles.qkv,
            pdl=self._pdl,
            bias=weights.qkv_bias,
            rotate=weights.q_norm is None,
            owed=self._owed(post, x),
        )
        normed: tuple[str, ...] = ()
        if (norms := head_norms(weights)) is not None:
            place = *layer.rope, state.position, state.table
            head_norm(self._q, layer.pool[0], *norms, *place, eps=self._eps, page=self.attention.page, pdl=self._pdl)
            normed = ("head_norm",)
        attended = self._attend(self._q, state, layer, positions, self._pdl)
        self._project(x, attended[0], weights.o, self._tiles.o, weights.attn_post_norm)
        before = "qkv_gemv", *normed, "flash_decode", "residual_gemv"
        if self._experts is not None:
            return *before, *self._experts(x, weights)
        gate_up_gemv(
            x,
            weights.mlp_norm,
            weights.gate_up,
            self._h,
            eps=self._eps,
            tile=self._tiles.gate_up,
            pdl=self._pdl,
            activation=self._spec.activation,
            owed=self._owed(weights.attn_post_norm, self._between),
        )
        self._project(x, self._h, weights.down, self._tiles.down, weights.mlp_post_norm)
        self._post = weights.mlp_post_norm
        return *before, "gate_up_gemv", "residual_gemv"

    def head(self, state: StepState, weights: DecoderWeights) -> tuple[str, ...]:
        """Final norm and logits."""
        x, post, self._post = state.x[0], self._post, None
        head_gemv(
            x if post is None else self._between,
            weights.norm,
            weights.lm_head,
            state.logits[0],
            self.best[0],
            self.first[0],
            eps=self._eps,
            tile=self._tiles.head,
            pdl=self._pdl,
            softcap=self._spec.logits_softcap,
            owed=self._owed(post, x),
        )
        return ("head_gemv",)

    def _project(
        self, x: torch.Tensor, h: torch.Tensor, weight: torch.Tensor, tile: Tile, post: torch.Tensor | None
    ) -> None:
        """Add `weight` times `h` to `x`; where it has a norm `post`, owe it."""
        residual_gemv(x if post is None else self._delta, h, weight, tile=tile, pdl=self._pdl, add=post is None)

    def _owed(self, post: torch.Tensor | None, kept: torch.Tensor) -> Owed | None:
        return None if post is None else Owed(self._delta, post, kept)


class MultiRow:
    """Tensor-core kernels for a tile of `rows` rows, one of `ROW_TILES`. Those with a negative position are idle.

    `attend` may serve several tiles, one after another; it has at least as many rows.
    """

    name = "multi-row"

    def __init__(
        self, spec: DecoderSpec, weights: DecoderWeights, rows: int, *, attend: StepAttention, pdl: bool = True
    ) -> None:
        self.rows = rows
        self._pdl, self._softcap = pdl, spec.logits_softcap
        self._tiles = batch_tiles(spec.hidden, spec.intermediate, spec.head_dim, weights.embed.itemsize, rows)
        self._attend = attend
        page = self._tiles.attention.page
        self._chain = GemmChain(spec, weights, rows, tiles=self._tiles, page=page, pdl=pdl)
        programs = triton.cdiv(spec.vocab, self._tiles.head.rows)
        self.best = torch.zeros(rows, programs, device=weights.embed.device)
        self.first = torch.zeros(rows, programs, dtype=torch.int32, device=weights.embed.device)

    def layer(self, tile: StepState, live: StepState, layer: CudaLayer, positions: int) -> tuple[str, ...]:
        """One layer on the rows of `tile`, of which `live` has the first: beyond them all are idle."""
        before = self._chain.qkv(tile.x, layer.weights, layer.rope, tile.position, tile.table, layer.pool)
        attended = self._attend(self._chain.q, live, layer, positions, self._pdl)[: self.rows]
        return (*before, "flash_decode", *self._chain.mlp(tile.x, attended.flatten(1), layer.weights))

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
            softcap=self._softcap,
        )
        return (*normed, "head_gemm")
