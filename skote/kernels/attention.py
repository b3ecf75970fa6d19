"""Causal grouped-query attention over a KV cache: softmax(q k^T * scale + mask) v, each kv head shared by a group.

The scale is 1 / sqrt(D) unless one is given; with a `softcap` c the scores become c tanh(q k^T * scale / c) before they
are masked (Gemma 2, arXiv 2408.00118).
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F


def decode_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    key_mask: torch.Tensor,
    *,
    scale: float | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """One new position: fp32 inside, written as reductions for a compiler.

    Args:
        q: `[batch, heads, 1, head_dim]`.
        k, v: `[batch, kv_heads, length, head_dim]`, the newest position last.
        key_mask: `[batch, length]`, added to the scores: 0, or -inf where nothing is to be seen.

    Returns:
        `[batch, heads, 1, head_dim]`, fp32.
    """
    batch, heads, _, dim = q.shape
    kv_heads = k.shape[1]
    grouped = q.view(batch, kv_heads, heads // kv_heads, 1, dim).float()
    products = (k.unsqueeze(2).float() * grouped).sum(-1)
    scores = products / math.sqrt(dim) if scale is None else products * scale
    weights = (capped(scores, softcap) + key_mask[:, None, None, :]).softmax(-1)
    return (weights.unsqueeze(-1) * v.unsqueeze(2).float()).sum(3).view(batch, heads, 1, dim)


def prefill_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    key_mask: torch.Tensor | None,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    window: int | None = None,
) -> torch.Tensor:
    """`q` [batch, heads, tokens, head_dim] holds the last `tokens` of the `length` positions in `k` and `v`.

    `key_mask` as above, or None where no position is padding. A token attends to itself and what came before it, with a
    `window` to itself and the window - 1 before it. Returns `[batch, heads, tokens, head_dim]` in k's dtype.
    """
    tokens, length = q.shape[2], k.shape[2]
    q = q.to(k.dtype)
    window = None if window is None or window >= length else window
    if key_mask is None and window is None and softcap is None and tokens == length:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True, scale=scale)
    newest = torch.arange(length - tokens, length, device=q.device)[:, None]
    places = torch.arange(length, device=q.device)[None, :]
    visible = places <= newest
    if window is not None:
        visible &= places > newest - window
    mask = torch.zeros(tokens, length, device=q.device).masked_fill(~visible, -torch.inf)[None, None]
    if key_mask is not None:
        # A padding row sees itself, so that its softmax has something to sum over; nobody reads its result.
        mask = torch.where(places == newest, 0.0, mask + key_mask[:, None, None, :])
    if softcap is None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask.to(q.dtype), enable_gqa=True, scale=scale)
    batch, heads, _, dim = q.shape
    grouped = q.view(batch, k.shape[1], -1, tokens, dim)
    scores = (grouped @ k.unsqueeze(2).transpose(-1, -2)).float() * (dim**-0.5 if scale is None else scale)
    weights = (capped(scores, softcap) + mask.unsqueeze(1)).softmax(-1).to(v.dtype)
    return (weights @ v.unsqueeze(2)).view(batch, heads, tokens, dim)


def capped(x: torch.Tensor, cap: float | None) -> torch.Tensor:
    """cap * tanh(x / cap), or `x` without a cap."""
    return x if cap is None else torch.tanh(x / cap) * cap
