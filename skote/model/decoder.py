"""The lean decoder: one layer as one pure function, and the forward pass over many new positions.

Shapes: B batch, T new tokens, L positions in the cache, H hidden, D head_dim. The residual stream is fp32 whatever the
weights' dtype, so that a half-precision model rounds only what enters a matrix product of many rows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from skote.kernels.attention import prefill_attention
from skote.kernels.linear import matmul, matmul_onednn, onednn_available
from skote.kernels.rms_norm import Paths, rms_norm
from skote.kernels.rope import apply_rope, inverse_frequencies, rope_table
from skote.kernels.silu_mul import silu_mul
from skote.model.spec import DecoderSpec
from skote.model.weights import DecoderWeights, LayerWeights

LayerCache = tuple[torch.Tensor, torch.Tensor]
"""Keys and values of one layer, `[B, kv_heads, capacity, D]` each, in the weights' dtype."""


@dataclass(frozen=True, slots=True)
class Ops:
    """The implementations that a layer is computed with; `attention` takes (q, k, v, key_mask)."""

    norm: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    linear: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    attention: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def layer_forward(
    x: torch.Tensor,
    weights: LayerWeights,
    cache: LayerCache,
    cos: torch.Tensor,
    sin: torch.Tensor,
    key_mask: torch.Tensor,
    spec: DecoderSpec,
    ops: Ops,
) -> torch.Tensor:
    """One layer over the T newest of L positions; their keys and values are written to the cache.

    Args:
        x: `[B, T, H]`, fp32.
        cos, sin: `[B or 1, 1, T, D]`, fp32.
        key_mask: `[B, L]`, fp32: 0, or -inf at padding. Its length is what says how long the cache is.

    Returns:
        The residual stream after the layer, `[B, T, H]`, fp32.
    """
    batch, tokens, _ = x.shape
    length = key_mask.shape[1]
    qkv = ops.linear(ops.norm(x, weights.attn_norm), weights.qkv)
    heads = qkv.view(batch, tokens, spec.heads + 2 * spec.kv_heads, spec.head_dim).transpose(1, 2)
    q, k, v = torch.split(heads, [spec.heads, spec.kv_heads, spec.kv_heads], dim=1)
    for cached, new in zip(cache, (apply_rope(k, cos, sin), v), strict=True):
        cached[:, :, length - tokens : length].copy_(new)
    keys, values = (cached[:, :, :length] for cached in cache)
    attended = ops.attention(apply_rope(q, cos, sin), keys, values, key_mask)
    x = x + ops.linear(attended.transpose(1, 2).reshape(batch, tokens, -1), weights.o)
    return x + ops.linear(silu_mul(ops.linear(ops.norm(x, weights.mlp_norm), weights.gate_up)), weights.down)


def head_forward(x: torch.Tensor, norm: torch.Tensor, lm_head: torch.Tensor, ops: Ops) -> torch.Tensor:
    """Logits of one position a row: `x` [B, 1, H] to fp32 `[B, vocab]`."""
    return ops.linear(ops.norm(x, norm), lm_head)[:, 0]


class Decoder:
    """A model ready to run: spec, weights, rope tables, and which implementation of each op runs where."""

    def __init__(self, spec: DecoderSpec, weights: DecoderWeights, max_positions: int) -> None:
        self.spec = spec
        self.weights = weights
        self.device = weights.norm.device
        self.paths: Paths = Counter()
        rope = spec.rope
        frequencies = inverse_frequencies(
            spec.head_dim,
            rope.theta,
            kind=rope.kind,
            factor=rope.factor,
            low_freq_factor=rope.low_freq_factor,
            high_freq_factor=rope.high_freq_factor,
            original_max_positions=rope.original_max_positions,
        )
        self._cos, self._sin = rope_table(max_positions, frequencies.to(self.device))
        self.gemm = "onednn" if onednn_available(weights.norm) else "aten"
        self._linear = matmul_onednn if self.gemm == "onednn" else matmul

    def norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """RMSNorm on the path of this device, counted."""
        return rms_norm(x, weight, self.spec.norm_eps, self.paths)

    def rope(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin of `positions` [B, T]: `[B, 1, T, D]` each."""
        return self._cos[positions].unsqueeze(1), self._sin[positions].unsqueeze(1)

    def forward(
        self, ids: torch.Tensor, cache: Sequence[LayerCache], key_mask: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        """Logits `[B, vocab]` of the newest position, over `ids` [B, T] at the end of the cache.

        `key_mask` [B, L] as in `layer_forward`; `positions` [B, T] are each token's place in its own text.
        """
        padded = bool(key_mask.any())
        attention = prefill_attention if padded else _without_mask
        ops = Ops(norm=self.norm, linear=self._linear, attention=attention)
        cos, sin = self.rope(positions)
        x = self.weights.embed[ids].float()
        for weights, layer_cache in zip(self.weights.layers, cache, strict=True):
            x = layer_forward(x, weights, layer_cache, cos, sin, key_mask, self.spec, ops)
        return head_forward(x[:, -1:].contiguous(), self.weights.norm, self.weights.lm_head, ops)


def _without_mask(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    return prefill_attention(q, k, v, None)
