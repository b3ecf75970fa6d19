"""Norms of the new q and k heads, and their rotation, in place: what follows a projection that did not rotate.

    y = rope(x / sqrt(mean(x^2) + eps) * norm),   the mean over a head's elements, one norm for q and one for k

q is a buffer, k the cache: that of position p of row r lies in slot table[r, p // PAGE] * PAGE + p % PAGE of every
head. A row with a negative position is idle: it leaves the cache alone.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from skote.kernels.launch import check_dtype, check_float, check_norm, check_rank, check_shape, check_tensors
from skote.kernels.pages import check_head_dim, check_pool, check_rope, check_table
from skote.kernels.rms_norm import rms_norm_reference
from skote.kernels.rope import apply_rope


def head_norm_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    q_norm: torch.Tensor,
    k_norm: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
    table: torch.Tensor,
    *,
    eps: float,
    page: int,
) -> None:
    """The same in framework ops, fp32 inside; arguments as `head_norm`. The q of idle rows is left as it is."""
    live = (positions >= 0).nonzero().flatten()
    at = positions[live].long()
    slots = table.expand(len(positions), -1)[live, at // page].long() * page + at % page
    angles = cos[at, None], sin[at, None]
    q[live] = apply_rope(rms_norm_reference(q[live].float(), q_norm, eps), *angles).to(q.dtype)
    keys = k[:, slots].transpose(0, 1).float()
    k[:, slots] = apply_rope(rms_norm_reference(keys, k_norm, eps), *angles).transpose(0, 1).to(k.dtype)


@triton.jit
def head_norm_kernel(
    q_ptr,
    k_ptr,
    q_norm_ptr,
    k_norm_ptr,
    cos_ptr,
    sin_ptr,
    positions_ptr,
    table_ptr,
    eps,
    head_stride,  # elements from one head of the cache to the next
    table_stride,  # entries from one row of the table to the next
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid: (HEADS + KV_HEADS, rows). Before the wait: norms, positions, block and rope tables. After it: the heads."""
    if PDL:
        gdc_launch_dependents()
    HALF: tl.constexpr = HEAD_DIM // 2
    head = tl.program_id(0)  # q heads first, then k
    row = tl.program_id(1)
    dims = tl.arange(0, HALF)
    position = tl.load(positions_ptr + row)
    place = tl.maximum(position, 0)
    of_query = (head < HEADS) & (dims >= 0)
    of_key = (head >= HEADS) & (dims >= 0)
    low_norm = tl.load(q_norm_ptr + dims, mask=of_query, other=0.0) + tl.load(k_norm_ptr + dims, mask=of_key, other=0.0)
    high_norm = tl.load(q_norm_ptr + HALF + dims, mask=of_query, other=0.0) + tl.load(
        k_norm_ptr + HALF + dims, mask=of_key, other=0.0
    )
    cos = tl.load(cos_ptr + place * HEAD_DIM + dims)
    sin = tl.load(sin_ptr + place * HEAD_DIM + dims)
    slot = tl.load(table_ptr + row * table_stride + place // PAGE) * PAGE + place % PAGE
    if PDL:
        gdc_wait()
    if head < HEADS:
        query = q_ptr + (row * HEADS + head) * HEAD_DIM + dims
        low = tl.load(query, eviction_policy="evict_last").to(tl.float32)
        high = tl.load(query + HALF, eviction_policy="evict_last").to(tl.float32)
        scale = tl.rsqrt(tl.sum(low * low + high * high, axis=0) / HEAD_DIM + eps)
        low *= scale * low_norm.to(tl.float32)
        high *= scale * high_norm.to(tl.float32)
        tl.store(query, (low * cos - high * sin).to(q_ptr.dtype.element_ty))
        tl.store(query + HALF, (high * cos + low * sin).to(q_ptr.dtype.element_ty))
    else:
        live = (position >= 0) & (dims >= 0)
        key = k_ptr + (head - HEADS).to(tl.int64) * head_stride + slot * HEAD_DIM + dims
        low = tl.load(key, mask=live, other=0.0, eviction_policy="evict_last").to(tl.float32)
        high = tl.load(key + HALF, mask=live, other=0.0, eviction_policy="evict_last").to(tl.float32)
        scale = tl.rsqrt(tl.sum(low * low + high * high, axis=0) / HEAD_DIM + eps)
        low *= scale * low_norm.to(tl.float32)
        high *= scale * high_norm.to(tl.float32)
        tl.store(key, (low * cos - high * sin).to(k_ptr.dtype.element_ty), mask=live)
        tl.store(key + HALF, (high * cos + low * sin).to(k_ptr.dtype.element_ty), mask=live)


def head_norm(
    q: torch.Tensor,
    k: torch.Tensor,
    q_norm: torch.Tensor,
    k_norm: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
    table: torch.Tensor,
    *,
    eps: float,
    page: int,
    pdl: bool,
) -> None:
    """Launch the kernel.

    Args:
        q: `[rows, heads, head_dim]`, in any float dtype, not rotated yet, overwritten; there may be no heads.
        k: `[kv_heads, slots, head_dim]`, in any float dtype, the pool of all rows, whole pages; one slot of each head
            overwritten for each live row. `head_dim` is a power of two.
        q_norm, k_norm: `[head_dim]`, in any float dtype.
        cos, sin: `[positions, head_dim]`, fp32, no more positions than the table has room for.
        positions: int32 `[rows]`, negative where a row is idle.
        table: int32 `[rows, pages]`, or `[1, pages]`: all rows are positions of one request.

    Raises:
        TypeError, ValueError: what the checks of `launch` and `pages` refuse.
    """
    check_tensors(
        "head_norm", k=k, q=q, q_norm=q_norm, k_norm=k_norm, cos=cos, sin=sin, positions=positions, table=table
    )
    check_rank("head_norm", 3, q=q, k=k)
    (rows, heads, head_dim), (kv_heads, slots, _) = q.shape, k.shape
    check_float("head_norm", q=q)
    check_head_dim("head_norm", head_dim)
    check_pool("head_norm", head_dim, k=k)
    check_norm("head_norm", head_dim, q_norm=q_norm, k_norm=k_norm)
    check_rope("head_norm", head_dim, cos=cos, sin=sin)
    check_dtype("head_norm", torch.int32, positions=positions)
    check_shape("head_norm", (rows,), positions=positions)
    check_table("head_norm", table, (1,), (rows,), page=page, slots=slots, positions=cos.shape[0])
    head_norm_kernel[(heads + kv_heads, rows)](
        q,
        k,
        q_norm,
        k_norm,
        cos,
        sin,
        positions,
        table,
        eps,
        slots * head_dim,
        table.shape[1] if table.shape[0] == rows else 0,
        HEADS=heads,
        HEAD_DIM=head_dim,
        PAGE=page,
        PDL=pdl,
        num_warps=1,
        launch_pdl=pdl,
    )
