"""The lean decoder: one layer as one pure function, and the forward pass over many new positions.

Shapes: B batch, T new tokens, L positions in the cache, H hidden, D head_dim. The residual stream is fp32 whatever the
weights' dtype, so that a half-precision model rounds only what enters a matrix product of many rows.

What a family computes stands in its `DecoderSpec`, switch by switch, and in which weights it has: no family is known by
name here. Windows and rotations that differ from layer to layer come in with the mask and the tables.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from skote.kernels.activation import activated
from skote.kernels.attention import capped, prefill_attention
from skote.kernels.experts import chosen_experts, many_rows_experts
from skote.kernels.linear import matmul, matmul_onednn, onednn_available
from skote.kernels.rms_norm import Paths, layer_norm_reference, rms_norm, rms_norm_reference
from skote.kernels.rope import apply_rope, inverse_frequencies, rope_table
from skote.model.spec import DecoderSpec, RopeSpec
from skote.model.weights import DecoderWeights, LayerWeights

LayerCache = tuple[torch.Tensor, torch.Tensor]
"""Keys and values of one layer, `[B, kv_heads, capacity, D]` each, in the weights' dtype."""
Rotation = tuple[torch.Tensor, torch.Tensor]
"""cos and sin of some positions, `[B or 1, 1, T, D]` each, fp32."""
Norm = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Ops:
    """The implementations that a layer is computed with.

    `norm` takes (x, weight, bias), `attention` (q, k, v, key_mask), `experts` the arguments of `one_row_experts`.
    """

    norm: Norm
    linear: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    attention: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
    experts: Callable[..., torch.Tensor]

    def affine(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """W x, plus the bias where there is one."""
        product = self.linear(x, weight)
        return product if bias is None else product + bias.float()


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
        key_mask: `[B, L]`, fp32: 0, or -inf at what is not to be seen. Its length is what says how long the cache is.

    Returns:
        The residual stream after the layer, `[B, T, H]`, fp32.
    """
    normed = ops.norm(x, weights.attn_norm, weights.attn_norm_bias) if spec.pre_norms else x
    attended = _attention(normed, weights, cache, (cos, sin), key_mask, spec, ops)
    if weights.attn_post_norm is not None:
        attended = ops.norm(attended, weights.attn_post_norm, None)
    before = x
    x = x + _scaled(attended, spec.residual_scale)
    if not spec.shared_norm:
        entering = before if spec.parallel else x
        normed = ops.norm(entering, weights.mlp_norm, weights.mlp_norm_bias) if spec.pre_norms else entering
    fed = _feed_forward(normed, weights, spec, ops)
    if weights.mlp_post_norm is not None:
        fed = ops.norm(fed, weights.mlp_post_norm, None)
    return x + _scaled(fed, spec.residual_scale)


def head_forward(
    x: torch.Tensor,
    norm: torch.Tensor,
    norm_bias: torch.Tensor | None,
    lm_head: torch.Tensor,
    spec: DecoderSpec,
    ops: Ops,
) -> torch.Tensor:
    """Logits of one position a row: `x` [B, 1, H] to fp32 `[B, vocab]`."""
    logits = ops.linear(ops.norm(x, norm, norm_bias), lm_head)[:, 0]
    return capped(_scaled(logits, spec.logits_scale), spec.logits_softcap)


def norm_op(spec: DecoderSpec, rms: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Norm:
    """The norm of `spec` as an op of (x, weight, bias), by `rms` of (x, weight) where it is an RMSNorm."""

    def norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if spec.norm_plus_one:
            weight = weight.float() + 1.0
        return layer_norm_reference(x, weight, bias, spec.norm_eps) if spec.layer_norm else rms(x, weight)

    return norm


def _attention(
    x: torch.Tensor,
    weights: LayerWeights,
    cache: LayerCache,
    rotation: Rotation,
    key_mask: torch.Tensor,
    spec: DecoderSpec,
    ops: Ops,
) -> torch.Tensor:
    batch, tokens, _ = x.shape
    length = key_mask.shape[1]
    qkv = ops.affine(x, weights.qkv, weights.qkv_bias)
    heads = qkv.view(batch, tokens, spec.heads + 2 * spec.kv_heads, spec.head_dim).transpose(1, 2)
    q, k, v = torch.split(heads, [spec.heads, spec.kv_heads, spec.kv_heads], dim=1)
    q, k = (_normed_heads(each, norm, spec) for each, norm in ((q, weights.q_norm), (k, weights.k_norm)))
    for cached, new in zip(cache, (apply_rope(k, *rotation), v), strict=True):
        cached[:, :, length - tokens : length].copy_(new)
    keys, values = (cached[:, :, :length] for cached in cache)
    attended = ops.attention(apply_rope(q, *rotation), keys, values, key_mask)
    return ops.affine(attended.transpose(1, 2).reshape(batch, tokens, -1), weights.o, weights.o_bias)


def _normed_heads(heads: torch.Tensor, weight: torch.Tensor | None, spec: DecoderSpec) -> torch.Tensor:
    """`heads` [B, heads, T, D] after the norm of q or k, where the model has one."""
    if weight is None:
        return heads
    norm = norm_op(spec, lambda x, weight: rms_norm_reference(x, weight, spec.norm_eps))
    if spec.qk_norm == "width":
        batch, count, tokens, dim = heads.shape
        wide = norm(heads.transpose(1, 2).reshape(batch, tokens, count * dim), weight, None)
        return wide.view(batch, tokens, count, dim).transpose(1, 2)
    return norm(heads, weight.view(-1, 1, spec.head_dim), None)


def _feed_forward(x: torch.Tensor, weights: LayerWeights, spec: DecoderSpec, ops: Ops) -> torch.Tensor:
    if spec.experts is not None:
        assert weights.router is not None
        chosen, share = chosen_experts(
            ops.linear(x, weights.router), spec.experts.chosen, normalised=spec.experts.normalised
        )
        return ops.experts(x, weights.gate_up, weights.down, chosen, share, spec.activation)
    up = activated(ops.affine(x, weights.gate_up, weights.gate_up_bias), spec.activation, gated=spec.gated)
    return ops.affine(up, weights.down, weights.down_bias)


def _scaled(x: torch.Tensor, scale: float) -> torch.Tensor:
    return x if scale == 1.0 else x * scale


class Decoder:
    """A model ready to run: spec, weights, rope tables, and which implementation of each op runs where."""

    def __init__(self, spec: DecoderSpec, weights: DecoderWeights, max_positions: int) -> None:
        self.spec = spec
        self.weights = weights
        self.device = weights.norm.device
        self.positions = max_positions
        self.paths: Paths = Counter()
        self.norm = norm_op(spec, self._rms_norm)
        self._tables = {rope: self._table(rope, max_positions) for rope in spec.layer_ropes}
        # Rounded as the weights are: so Gemma was trained, and so Transformers computes it.
        self.embedding_scale = float(torch.tensor(spec.embedding_scale).to(weights.embed.dtype))
        self.gemm = "onednn" if onednn_available(weights.norm) else "aten"
        self._linear = matmul_onednn if self.gemm == "onednn" else matmul

    def rope(self, positions: torch.Tensor) -> Rotation:
        """cos and sin of `positions` [B, T] in the first layer: `[B, 1, T, D]` each."""
        return self.rotations(positions)[0]

    def rotations(self, positions: torch.Tensor) -> list[Rotation]:
        """cos and sin of `positions` [B, T] in each layer: `[B, 1, T, D]` each; 1 and 0 where nothing is rotated."""
        found = {
            rope: (cos[positions].unsqueeze(1), sin[positions].unsqueeze(1))
            for rope, (cos, sin) in self._tables.items()
        }
        return [found[rope] for rope in self.spec.layer_ropes]

    def embed(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """The residual stream before the first layer, of tokens `ids` [B, T] at `positions` [B, T]."""
        x = _scaled(self.weights.embed[ids].float(), self.embedding_scale)
        if self.weights.positions is None:
            return x
        assert self.spec.positions_offset is not None
        return x + self.weights.positions[positions + self.spec.positions_offset].float()

    def forward(
        self, ids: torch.Tensor, cache: Sequence[LayerCache], key_mask: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        """Logits `[B, vocab]` of the newest position, over `ids` [B, T] at the end of the cache.

        `key_mask` [B, L] as in `layer_forward`; `positions` [B, T] are each token's place in its own text.
        """
        for x in self.streams(ids, cache, key_mask, positions):  # noqa: B007 (the last one is wanted)
            pass
        weights = self.weights
        newest = x[:, -1:].contiguous()
        return head_forward(newest, weights.norm, weights.norm_bias, weights.lm_head, self.spec, self._ops(None))

    def streams(
        self, ids: torch.Tensor, cache: Sequence[LayerCache], key_mask: torch.Tensor, positions: torch.Tensor
    ) -> Iterator[torch.Tensor]:
        """The residual stream `[B, T, H]` before the first layer and after each; arguments as those of `forward`."""
        padded = key_mask if bool(key_mask.any()) else None
        x = self.embed(ids, positions)
        yield x
        layers = zip(self.weights.layers, cache, self.rotations(positions), self.spec.layer_windows, strict=True)
        for weights, layer_cache, (cos, sin), window in layers:
            x = layer_forward(x, weights, layer_cache, cos, sin, key_mask, self.spec, self._ops(padded, window))
            yield x

    def _ops(self, padded: torch.Tensor | None, window: int | None = None) -> Ops:
        attend = partial(
            prefill_attention,
            scale=self.spec.attention_scale,
            softcap=self.spec.attention_softcap,
            window=window,
        )
        return Ops(
            norm=self.norm,
            linear=self._linear,
            attention=lambda q, k, v, _: attend(q, k, v, padded),
            experts=many_rows_experts,
        )

    def _rms_norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """RMSNorm on the path of this device, counted."""
        return rms_norm(x, weight, self.spec.norm_eps, self.paths)

    def _table(self, rope: RopeSpec | None, positions: int) -> Rotation:
        dim = self.spec.head_dim
        if rope is None:
            return rope_table(positions, torch.empty(0, device=self.device), head_dim=dim)
        frequencies = inverse_frequencies(
            self.spec.rotary_dim or dim,
            rope.theta,
            kind=rope.kind,
            factor=rope.factor,
            low_freq_factor=rope.low_freq_factor,
            high_freq_factor=rope.high_freq_factor,
            original_max_positions=rope.original_max_positions,
            beta_fast=rope.beta_fast,
            beta_slow=rope.beta_slow,
            truncate=rope.truncate,
            divisors=rope.divisors,
        )
        return rope_table(positions, frequencies.to(self.device), head_dim=dim, amplitude=rope.amplitude)
