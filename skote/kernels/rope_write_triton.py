"""After a prefill's q/k/v projection: rotate q and k in place (`rope` has the formula), and write k and v to the paged
cache.

Token t is position p = start + t. It lives in slot table[p // PAGE] * PAGE + p % PAGE of every head; positions from
`capacity` on, the padding of a bucket, are rotated and not written. Without query heads k and v alone are there. With
norms the heads of q and k are normalised before, as `head_norm_triton` does it.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from skote.kernels.launch import check_float, check_norm, check_rank, check_tensors, padded
from skote.kernels.pages import check_head_dim, check_pool, check_rope, check_table
from skote.kernels.rms_norm import rms_norm_reference
from skote.kernels.rope import apply_rope


def rope_write_reference(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    table: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    page: int,
    start: int = 0,
    norms: tuple[torch.Tensor, torch.Tensor] | None = None,
    eps: float = 0.0,
) -> None:
    """The same in framework ops; arguments as `rope_write`."""
    kept, kv_heads = min(qkv.shape[0], cos.shape[0] - start), k.shape[0]
    places = start + torch.arange(kept, device=qkv.device)
    turned = qkv[:kept, :-kv_heads]
    wide = turned.float()
    if norms is not None:
        parts = zip((wide[:, :-kv_heads], wide[:, -kv_heads:]), norms, strict=True)
        wide = torch.cat([rms_norm_reference(heads, norm, eps) for heads, norm in parts], dim=1)
    turned.copy_(apply_rope(wide, cos[places, None], sin[places, None]))
    slots = table[places // page].long() * page + places % page
    k[:, slots] = qkv[:kept, -2 * kv_heads : -kv_heads].transpose(0, 1)
    v[:, slots] = qkv[:kept, -kv_heads:].transpose(0, 1)


@triton.jit
def rope_write_kernel(
    qkv_ptr,
    cos_ptr,
    sin_ptr,
    q_norm_ptr,
    k_norm_ptr,
    table_ptr,
    k_ptr,
    v_ptr,
    eps,
    start,
    capacity,
    head_stride,  # elements from one head of the cache to the next
    HEADS: tl.constexpr,  # query heads
    KV_HEADS: tl.constexpr,
    BLOCK: tl.constexpr,  # a power of two, at least HEADS + 2 KV_HEADS
    HEAD_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    NORM: tl.constexpr,  # q and k are normalised
):
    """Grid: (tokens,). One program a token, all its heads; v is rotated by the angle 0."""
    HALF: tl.constexpr = HEAD_DIM // 2
    token = tl.program_id(0)
    heads = tl.arange(0, BLOCK)
    dims = tl.arange(0, HALF)
    there = (heads < HEADS + 2 * KV_HEADS)[:, None]
    low_ptr = (
        qkv_ptr + token.to(tl.int64) * (HEADS + 2 * KV_HEADS) * HEAD_DIM + heads[:, None] * HEAD_DIM + dims[None, :]
    )
    low = tl.load(low_ptr, mask=there, other=0.0)
    high = tl.load(low_ptr + HALF, mask=there, other=0.0)
    place = tl.minimum(start + token, capacity - 1)
    cos = tl.load(cos_ptr + place * HEAD_DIM + dims)[None, :]
    sin = tl.load(sin_ptr + place * HEAD_DIM + dims)[None, :]
    turned = (heads < HEADS + KV_HEADS)[:, None]
    first = low.to(tl.float32)
    second = high.to(tl.float32)
    if NORM:
        queries = (heads < HEADS)[:, None]
        scale = tl.rsqrt(tl.sum(first * first + second * second, axis=1) / HEAD_DIM + eps)[:, None]
        low_norm = tl.where(queries, tl.load(q_norm_ptr + dims)[None, :], tl.load(k_norm_ptr + dims)[None, :])
        high_norm = tl.where(
            queries, tl.load(q_norm_ptr + HALF + dims)[None, :], tl.load(k_norm_ptr + HALF + dims)[None, :]
        )
        first *= scale * low_norm.to(tl.float32)
        second *= scale * high_norm.to(tl.float32)
    new_low = tl.where(turned, first * cos - second * sin, low.to(tl.float32)).to(low.dtype)
    new_high = tl.where(turned, second * cos + first * sin, high.to(tl.float32)).to(low.dtype)
    tl.store(low_ptr, new_low, mask=there & turned)
    tl.store(low_ptr + HALF, new_high, mask=there & turned)
    slot = tl.load(table_ptr + place // PAGE) * PAGE + place % PAGE
    kept = start + token < capacity
    is_key = (heads >= HEADS) & (heads < HEADS + KV_HEADS)
    keys = k_ptr + (heads - HEADS).to(tl.int64)[:, None] * head_stride + slot * HEAD_DIM + dims[None, :]
    tl.store(keys, new_low, mask=is_key[:, None] & kept)
    tl.store(keys + HALF, new_high, mask=is_key[:, None] & kept)
    is_value = (heads >= HEADS + KV_HEADS) & (heads < HEADS + 2 * KV_HEADS)
    values = v_ptr + (heads - HEADS - KV_HEADS).to(tl.int64)[:, None] * head_stride + slot * HEAD_DIM + dims[None, :]
    tl.store(values, new_low, mask=is_value[:, None] & kept)
    tl.store(values + HALF, new_high, mask=is_value[:, None] & kept)


def rope_write(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    table: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    page: int,
    start: int = 0,
    norms: tuple[torch.Tensor, torch.Tensor] | None = None,
    eps: float = 0.0,
) -> None:
    """Launch the kernel.

    Args:
        qkv: `[tokens, heads + 2 kv_heads, head_dim]`, in any float dtype, q and k rotated in place.
        cos, sin: `[capacity, head_dim]`, fp32: the positions that the cache may hold.
        table: int32 `[pages]` or `[1, pages]`, physical page of each logical one, with room for `capacity` positions.
        k, v: `[kv_heads, slots, head_dim]`, both in one float dtype, whole pages, written. `head_dim` is a power of 2.
        start: position of the first token, below `capacity`.
        norms: of the heads of q and of k, `[head_dim]` each, in any float dtype, with `eps`; None where they have none.

    Raises:
        TypeError, ValueError: what the checks of `launch` and `pages` refuse, or too few heads.
    """
    q_norm, k_norm = norms or (qkv, qkv)
    place = {"cos": cos, "sin": sin, "table": table}
    check_tensors("rope_write", qkv=qkv, **place, k=k, v=v, q_norm=q_norm, k_norm=k_norm)
    check_rank("rope_write", 3, qkv=qkv, k=k)
    (tokens, all_heads, head_dim), (kv_heads, slots, _) = qkv.shape, k.shape
    check_float("rope_write", qkv=qkv)
    if all_heads < 2 * kv_heads:
        raise ValueError(f"rope_write: qkv has {all_heads} heads, expected those of k and v, {2 * kv_heads}, or more.")
    check_head_dim("rope_write", head_dim)
    check_pool("rope_write", head_dim, k=k, v=v)
    check_rope("rope_write", head_dim, cos=cos, sin=sin)
    capacity = cos.shape[0]
    if not 0 <= start < capacity:
        raise ValueError(f"rope_write: start {start} lies beyond the {capacity} positions.")
    check_table("rope_write", table, (), (1,), page=page, slots=slots, positions=capacity)
    if norms is not None:
        check_norm("rope_write", head_dim, q_norm=q_norm, k_norm=k_norm)
    rope_write_kernel[(tokens,)](
        qkv,
        cos,
        sin,
        q_norm,
        k_norm,
        table,
        k,
        v,
        eps,
        start,
        capacity,
        slots * head_dim,
        HEADS=all_heads - 2 * kv_heads,
        KV_HEADS=kv_heads,
        BLOCK=padded(all_heads),
        HEAD_DIM=head_dim,
        PAGE=page,
        NORM=norms is not None,
        num_warps=4,
    )
