"""Causal attention of a prefill with what SDPA's kernels do not compute: windows and a soft cap of the scores.

    out[t, h] = softmax(cap(q[t, h] K[g]^T * scale)) V[g]        over the last `window` keys up to t's own

The queries are the last of the keys. FlashAttention-2's loop (arXiv 2307.08691): a program takes some queries of one
head, and the keys block after block, of which those before the first query's window are not read.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from skote.kernels.activation_triton import cap_argument
from skote.kernels.attention import prefill_attention
from skote.kernels.flash_split_triton import in_base_2
from skote.kernels.launch import (
    check_cuda,
    check_dtype,
    check_float,
    check_offsets,
    check_rank,
    check_shape,
    check_window,
)
from skote.kernels.pages import check_head_dim

MIN_HEAD_DIM = 16


class PrefillTile(NamedTuple):
    """`rows` queries a program, `block` keys at once of which `stages` blocks are in flight, and its warps."""

    rows: int
    block: int
    stages: int
    warps: int


def prefill_tile(head_dim: int, dtype: torch.dtype) -> PrefillTile:
    """The tile for heads of this size: no larger than registers and shared memory hold (not measured yet)."""
    if dtype == torch.float32:
        return PrefillTile(16, 16, 1, 4 if head_dim <= 128 else 8)
    return PrefillTile(128, 64, 2, 8) if head_dim <= 128 else PrefillTile(128, 32, 2, 8)


def flash_prefill_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """The same in framework ops, fp32 inside; arguments as `flash_prefill`."""
    wide = (q.transpose(1, 2).float(), k.float(), v.float())
    attended = prefill_attention(*wide, None, scale=scale, window=window, softcap=softcap)
    return attended.transpose(1, 2).to(q.dtype)


@triton.jit
def flash_prefill_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    scale,
    tokens,
    keys,
    q_piece,  # elements from one piece, token and head to the next
    q_token,
    q_head,
    k_piece,
    k_token,
    k_head,
    v_piece,
    v_token,
    v_head,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,  # query heads a kv head
    HEAD_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    WINDOW: tl.constexpr,  # 0 is none
    CAP: tl.constexpr,
):
    """Grid: (ceil(tokens / ROWS), HEADS, pieces)."""
    first = tl.program_id(0) * ROWS
    head = tl.program_id(1)
    piece = tl.program_id(2).to(tl.int64)
    rows = first + tl.arange(0, ROWS)
    dims = tl.arange(0, HEAD_DIM)
    there = (rows < tokens)[:, None]
    q = tl.load(
        q_ptr + piece * q_piece + head * q_head + rows[:, None] * q_token + dims[None, :], mask=there, other=0.0
    )
    k_base = k_ptr + piece * k_piece + (head // GROUP).to(tl.int64) * k_head
    v_base = v_ptr + piece * v_piece + (head // GROUP).to(tl.int64) * v_head
    own = keys - tokens + rows  # each query's own key
    end = tl.minimum(keys - tokens + first + ROWS, keys)
    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(keys - tokens + first + 1 - WINDOW, 0) // BLOCK * BLOCK
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    mixed = tl.zeros([ROWS, HEAD_DIM], tl.float32)
    for start in tl.range(begin, end, BLOCK, num_stages=STAGES):
        places = start + tl.arange(0, BLOCK)
        inside = (places < keys)[:, None]
        k = tl.load(k_base + places[:, None] * k_token + dims[None, :], mask=inside, other=0.0)
        scores = in_base_2(tl.dot(q, tl.trans(k), input_precision="ieee") * scale, CAP)
        seen = places[None, :] <= own[:, None]
        if WINDOW > 0:
            seen = seen & (places[None, :] > own[:, None] - WINDOW)
        scores = tl.where(seen, scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, axis=1))
        base = tl.where(higher > float("-inf"), higher, 0.0)  # a row's window may begin in a later block
        kept = tl.exp2(top - base)
        weights = tl.exp2(scores - base[:, None])
        total = total * kept + tl.sum(weights, axis=1)
        v = tl.load(v_base + places[:, None] * v_token + dims[None, :], mask=inside, other=0.0)
        mixed = mixed * kept[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        top = higher
    out = mixed / tl.maximum(total, 1e-30)[:, None]  # a row beyond the tokens may have seen nothing
    places = (piece * tokens + rows[:, None]) * HEADS * HEAD_DIM + head * HEAD_DIM + dims[None, :]
    tl.store(out_ptr + places, out.to(out_ptr.dtype.element_ty), mask=there)


def flash_prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """Launch the kernel.

    Args:
        q: `[pieces, tokens, heads, head_dim]`, of any strides but that a head's elements lie side by side.
        k, v: `[pieces, kv_heads, keys, head_dim]`, likewise, in the dtype of `q`; there are at least as many keys.
        scale: of the scores, in place of 1 / sqrt(head_dim).
        window: how many keys a query attends to, its own the last; None is all.
        softcap: of the scores; None is none.

    Returns:
        `[pieces, tokens, heads, head_dim]`, contiguous.

    Raises:
        TypeError, ValueError: what the checks of `launch` and `pages` refuse, a soft cap that is not above 0, a head
            whose elements do not lie side by side, or shapes that do not match.
    """
    op = "flash_prefill"
    check_cuda(op, q=q, k=k, v=v)
    check_rank(op, 4, q=q, k=k, v=v)
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.stride(3) != 1:
            raise ValueError(f"{op}: {name} is not contiguous in its last dimension; call .contiguous() first.")
    (pieces, tokens, heads, head_dim), (kv_heads, keys) = q.shape, k.shape[1:3]
    check_float(op, q=q)
    check_dtype(op, q.dtype, k=k, v=v)
    check_head_dim(op, head_dim, MIN_HEAD_DIM)
    check_shape(op, (pieces, kv_heads, keys, head_dim), k=k, v=v)
    if kv_heads == 0 or heads % kv_heads:
        raise ValueError(f"{op}: {heads} query heads cannot share {kv_heads} kv heads evenly.")
    if keys < tokens:
        raise ValueError(f"{op}: {tokens} tokens have {keys} keys; there must be at least as many.")
    spans = {f"a head of {name}": keys * each.stride(2) for name, each in (("k", k), ("v", v))}
    check_offsets(op, **{"a piece of q": max(tokens * q.stride(1), heads * q.stride(2)), **spans})
    check_window(op, window)
    cap = cap_argument(op, softcap)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    tile = prefill_tile(head_dim, q.dtype)
    base = 1.0 if softcap else math.log2(math.e)
    flash_prefill_kernel[(triton.cdiv(tokens, tile.rows), heads, pieces)](
        q,
        k,
        v,
        out,
        base / math.sqrt(head_dim) if scale is None else base * scale,
        tokens,
        keys,
        *(q.stride(axis) for axis in (0, 1, 2)),
        *(k.stride(axis) for axis in (0, 2, 1)),
        *(v.stride(axis) for axis in (0, 2, 1)),
        HEADS=heads,
        GROUP=heads // kv_heads,
        HEAD_DIM=head_dim,
        ROWS=tile.rows,
        BLOCK=tile.block,
        STAGES=tile.stages,
        WINDOW=0 if window is None or window >= keys else window,
        CAP=cap,
        num_warps=tile.warps,
    )
    return out
