"""The multi-row kernels of a decoder's layers, in their order: those of a batched step, and of a short prompt."""

from __future__ import annotations

import torch
import triton

from skote.kernels.add_rms_norm_triton import add_rms_norm
from skote.kernels.gate_up_gemm_triton import gate_up_gemm
from skote.kernels.head_gemm_triton import head_gemm
from skote.kernels.head_norm_triton import head_norm
from skote.kernels.qkv_gemm_triton import qkv_gemm
from skote.kernels.split_gemm_triton import split_gemm
from skote.kernels.tiles import BatchTiles
from skote.model.spec import DecoderSpec
from skote.model.weights import DecoderWeights, LayerWeights
from skote.runtime.paged_cache import Pool
from skote.runtime.prompt_ops import EXPERT_ROWS, expert_feed_forward


class GemmChain:
    """A layer is `qkv`, attention, and `mlp`; each method returns the names of the ops that it launched.

    What `mlp` adds to the residual stream is added by the norm that comes next: the next layer's, in `qkv`, or `norm`
    itself. So a pass through the layers ends in one of them.

    Attributes:
        normed: `[rows, hidden]`, what the last norm left.
        q: `[rows, heads, head_dim]`, what the last `qkv` left.
    """

    def __init__(
        self, spec: DecoderSpec, weights: DecoderWeights, rows: int, *, tiles: BatchTiles, page: int, pdl: bool
    ) -> None:
        self._spec, self._activation = spec, spec.activation
        self._eps, self._tiles, self._page, self._pdl = spec.norm_eps, tiles, page, pdl
        dtype, device = weights.embed.dtype, weights.embed.device
        self.normed = torch.zeros(rows, spec.hidden, dtype=dtype, device=device)
        self.q = torch.zeros(rows, spec.heads, spec.head_dim, dtype=dtype, device=device)
        self._h = torch.zeros(rows, spec.intermediate, dtype=dtype, device=device)
        self._o = torch.zeros(tiles.o.splits, rows, spec.hidden, device=device)
        self._down = torch.zeros(tiles.down.splits, rows, spec.hidden, device=device)
        if spec.experts is not None:  # the router's logits, as a head computes them
            programs = triton.cdiv(spec.experts.count, tiles.head.rows)
            self._logits = torch.zeros(rows, spec.experts.count, device=device)
            self._best = torch.zeros(rows, programs, device=device)
            self._first = torch.zeros(rows, programs, dtype=torch.int32, device=device)
        self._owed: torch.Tensor | None = None  # to the residual stream
        self._post: torch.Tensor | None = None  # the norm of what is owed, where it has one

    def norm(self, x: torch.Tensor, weight: torch.Tensor) -> tuple[str, ...]:
        """`normed` from the residual stream `x` [rows, hidden], fp32, after what is owed to it has been added."""
        add_rms_norm(x, self._owed, weight, self.normed, eps=self._eps, pdl=self._pdl, post=self._post)
        self._owed = self._post = None
        return ("add_rms_norm",)

    def qkv(
        self,
        x: torch.Tensor,
        weights: LayerWeights,
        rope: tuple[torch.Tensor, torch.Tensor],
        positions: torch.Tensor,
        table: torch.Tensor,
        pool: Pool,
        *,
        queries: bool = True,
    ) -> tuple[str, ...]:
        """`q`, rotated, and keys and values in the cache; without `queries` these alone, and `q` is left as it is."""
        heads = self.q.shape[1] if queries else 0
        weight, bias = projection(weights, 0 if queries else self.q[0].numel())
        normed = self.norm(x, weights.attn_norm)
        qkv_gemm(
            self.normed,
            weight,
            *rope,
            positions,
            table,
            self.q[:, :heads],
            *pool,
            page=self._page,
            tile=self._tiles.qkv,
            pdl=self._pdl,
            bias=bias,
            rotate=weights.q_norm is None,
        )
        norms = head_norms(weights)
        if norms is None:
            return (*normed, "qkv_gemm")
        place = *rope, positions, table
        head_norm(self.q[:, :heads], pool[0], *norms, *place, eps=self._eps, page=self._page, pdl=self._pdl)
        return (*normed, "qkv_gemm", "head_norm")

    def mlp(self, x: torch.Tensor, attended: torch.Tensor, weights: LayerWeights) -> tuple[str, ...]:
        """Add the projection of `attended` [rows, heads * head_dim] to `x`; owe it the feed-forward's."""
        tiles = self._tiles
        split_gemm(attended, weights.o, self._o, tile=tiles.o, pdl=self._pdl)
        self._owed, self._post = self._o, weights.attn_post_norm
        normed = self.norm(x, weights.mlp_norm)
        if weights.router is not None:
            head_gemm(
                self.normed, weights.router, self._logits, self._best, self._first, tile=tiles.head, pdl=self._pdl
            )
            self._owed = expert_feed_forward(self.normed, self._logits, weights, self._spec, EXPERT_ROWS)
            return ("split_gemm", *normed, "head_gemm", "expert_gemm", "expert_gemm")
        gate_up_gemm(
            self.normed, weights.gate_up, self._h, tile=tiles.gate_up, pdl=self._pdl, activation=self._activation
        )
        split_gemm(self._h, weights.down, self._down, tile=tiles.down, pdl=self._pdl)
        self._owed, self._post = self._down, weights.mlp_post_norm
        return ("split_gemm", *normed, "gate_up_gemm", "split_gemm")


def head_norms(weights: LayerWeights) -> tuple[torch.Tensor, torch.Tensor] | None:
    """The norms of a layer's q and k heads, where it has them."""
    if weights.q_norm is None or weights.k_norm is None:
        return None
    return weights.q_norm, weights.k_norm


def projection(weights: LayerWeights, first: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Matrix and bias of a layer's q, k and v from row `first` on."""
    bias = weights.qkv_bias
    return weights.qkv[first:], None if bias is None else bias[first:]
