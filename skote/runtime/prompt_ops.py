"""What prefills on CUDA share: causal attention, SDPA's where that computes it, and the feed-forward in parts."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

from skote.kernels.expert_gemm_triton import block_rows, expert_gemm, grouped
from skote.kernels.experts import chosen_experts
from skote.kernels.flash_prefill_triton import flash_prefill
from skote.kernels.silu_mul_triton import silu_mul_triton
from skote.model.decoder import Decoder
from skote.model.spec import DecoderSpec
from skote.model.weights import LayerWeights

_UNPLANNED = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
_PLANNED = [SDPBackend.CUDNN_ATTENTION, *_UNPLANNED]
_MLP_SHARE = 0.02  # of the weights' bytes, for the results of the widest products, which would outgrow all others
EXPERT_ROWS = 16
"""Of an expert at once in a step of many rows, however many these are: a row's bits must not depend on them."""
_EXPERT_TOKENS = 2048
_MLP_ROWS = 512  # at least: fewer would not keep the device busy


def causal_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    planned: bool,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """Causal attention of queries `[pieces, tokens, heads, head_dim]` that are the last of their piece's keys and
    values `[pieces, kv_heads, keys, head_dim]`: `[pieces * tokens, heads * head_dim]`.

    `planned`: these lengths are among those that cuDNN, which makes a plan for each, has met. `scale` is that of the
    scores, by default 1 / sqrt(head_dim). `window` and `softcap` are those of `flash_prefill`.
    """
    tokens, keys, shared = q.shape[1], k.shape[2], q.shape[2] // k.shape[1]
    if softcap is not None or (window is not None and window < keys):
        return flash_prefill(q, k, v, scale=scale, window=window, softcap=softcap).view(len(q) * tokens, -1)
    if q.dtype == torch.float32 and shared > 1:
        # Neither cuDNN nor flash takes fp32, and what does without a matrix of scores wants a key head a query head.
        k, v, shared = k.repeat_interleave(shared, 1), v.repeat_interleave(shared, 1), 1
    with sdpa_kernel(_PLANNED if planned else _UNPLANNED, set_priority=True):
        out = F.scaled_dot_product_attention(
            q.transpose(1, 2),
            k,
            v,
            attn_mask=causal_lower_right(tokens, keys) if keys > tokens else None,
            is_causal=keys == tokens,
            enable_gqa=shared > 1,
            scale=scale,
        )
    return out.transpose(1, 2).reshape(len(q) * tokens, -1)


def feed_forward(normed: torch.Tensor, layer: LayerWeights, most: int, spec: DecoderSpec) -> torch.Tensor:
    """The gated feed-forward of `normed` [tokens, hidden], `most` tokens at once, which is overwritten with it."""
    for rows in torch.split(normed, most):
        if layer.router is not None:
            logits = rows.float() @ layer.router.float().t()
            assert spec.experts is not None
            block = block_rows(len(rows) * spec.experts.chosen, spec.experts.count, rows.dtype)
            rows.copy_(expert_feed_forward(rows, logits, layer, spec, block))
            continue
        torch.mm(silu_mul_triton(F.linear(rows, layer.gate_up), spec.activation), layer.down.t(), out=rows)
    return normed


def expert_feed_forward(
    rows: torch.Tensor, logits: torch.Tensor, layer: LayerWeights, spec: DecoderSpec, block: int
) -> torch.Tensor:
    """The chosen experts' feed-forward of `rows` [tokens, hidden] by the router's `logits` [tokens, experts], fp32.

    An expert's weights meet up to `block` of its rows at once. Nothing of it waits for the device.
    """
    assert spec.experts is not None
    chosen, share = chosen_experts(logits, spec.experts.chosen, normalised=spec.experts.normalised)
    groups = grouped(chosen, spec.experts.count, block)
    h = expert_gemm(rows, layer.gate_up, groups, out_dtype=rows.dtype, activation=spec.activation)
    fed = expert_gemm(h, layer.down, groups, out_dtype=torch.float32)
    return (fed.view(*chosen.shape, -1) * share[..., None]).sum(1)


def feed_forward_rows(decoder: Decoder) -> int:
    """Tokens that the feed-forward takes at once, a power of two."""
    spec = decoder.spec
    if spec.experts is not None:
        return _EXPERT_TOKENS  # each has a result an expert that it chose
    fitting = _MLP_SHARE * spec.parameters / (3 * spec.intermediate)  # gate, up and their product; in elements
    return max(_MLP_ROWS, 1 << int(math.log2(max(fitting, 1))))
