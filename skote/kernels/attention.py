"""Causal grouped-query attention over a KV cache: softmax(q k^T / sqrt(D) + mask) v, each kv head shared by a group."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F


def decode_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, key_mask: torch.Tensor) -> torch.Tensor:
    """One new position: fp32 inside, written as reductions for a compiler.

    Args:
        q: `[batch, heads, 1, head_dim]`.
        k, v: `[batch, kv_heads, length, head_dim]`, the newest position last.
        key_mask: `[batch, length]`, added to the scores: 0, or -inf at padding.

    Returns:
        `[batch, heads, 1, head_dim]`, fp32.
    """
    batch, heads, _, dim = q.shape
    kv_heads = k.shape[1]
    grouped = q.view(batch, kv_heads, heads // kv_heads, 1, dim).float()
    scores = (k.unsqueeze(2).float() * grouped).sum(-1) / math.sqrt(dim) + key_mask[:, None, None, :]
    weights = scores.softmax(-1)
    return (weights.unsqueeze(-1) * v.unsqueeze(2).float()).sum(3).view(batch, heads, 1, dim)


def prefill_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, key_mask: torch.Tensor | None) -> torch.Tensor:
    """`q` [batch, heads, tokens, head_dim] holds the last `tokens` of the `length` positions in `k` and `v`.

    `key_mask` as above, or None where no position is padding. Returns `[batch, heads, tokens, head_dim]` in k's dtype.
    """
    tokens, length = q.shape[2], k.shape[2]
    q = q.to(k.dtype)
    if key_mask is None and tokens == length:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    newest = torch.arange(length - tokens, length, device=q.device)
    visible = torch.arange(length, device=q.device)[None, :] <= newest[:, None]
    mask = torch.zeros(tokens, length, device=q.device).masked_fill(~visible, -torch.inf)[None, None]
    if key_mask is not None:
        # A padding row sees itself, so that its softmax has something to sum over; nobody reads its result.
        itself = torch.arange(length, device=q.device)[None, :] == newest[:, None]
        mask = torch.where(itself, 0.0, mask + key_mask[:, None, None, :])
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask.to(q.dtype), enable_gqa=True)
