"""The head of a decoder layer, for one row: RMSNorm, fused q/k/v projection, RoPE, and the write to the KV cache.

    n = x / sqrt(mean(x^2) + eps) * norm;   q | k | v = W n + bias;   q, k rotated at the row's position (see `rope`);
    cache[slot] = k, v

Position p lives in slot table[p // PAGE] * PAGE + p % PAGE of every head. A program takes rows i and i + D/2 of one
head, the two halves of a rotated pair, so that the rotation needs no other program. The norm's scale is one number and
is applied to the products: the projection does not wait for it. What is owed to x is added first (see `Owed`).
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from skote.kernels.launch import (
    Tile,
    check_bias,
    check_dtype,
    check_float,
    check_matrix,
    check_norm,
    check_offsets,
    check_rank,
    check_shape,
    check_tensors,
    check_tile,
    padded,
)
from skote.kernels.owed_triton import Owed, owed_arguments, paid, paid_row
from skote.kernels.pages import check_pool, check_rope, check_table
from skote.kernels.rms_norm import rms_norm_reference
from skote.kernels.rope import apply_rope


def qkv_gemv_reference(
    x: torch.Tensor,
    norm: torch.Tensor,
    weight: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    position: torch.Tensor,
    table: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    eps: float,
    page: int,
    bias: torch.Tensor | None = None,
    rotate: bool = True,
    owed: Owed | None = None,
) -> None:
    """The same in framework ops; arguments as `qkv_gemv`."""
    heads, kv_heads, head_dim = q.shape[0], k.shape[0], q.shape[1]
    rows = (weight.float() * rms_norm_reference(paid(x, owed, eps), norm, eps)).sum(-1)
    rows = (rows if bias is None else rows + bias.float()).view(-1, head_dim)
    new_q, new_k, new_v = rows.split((heads, kv_heads, kv_heads))
    at = int(position)
    slot = int(table.view(-1)[at // page]) * page + at % page
    new_q, new_k = (apply_rope(new, cos[at], sin[at]) if rotate else new for new in (new_q, new_k))
    q.copy_(new_q)
    k[:, slot] = new_k.to(k.dtype)
    v[:, slot] = new_v.to(v.dtype)


@triton.jit
def qkv_gemv_kernel(
    x_ptr,
    norm_ptr,
    weight_ptr,
    bias_ptr,
    cos_ptr,
    sin_ptr,
    position_ptr,
    table_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    eps,
    head_stride,  # elements from one head of the cache to the next
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,  # a power of two, at least HIDDEN
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAIRS: tl.constexpr,  # rotated pairs a program
    PAGE: tl.constexpr,
    BIAS: tl.constexpr,  # there is one
    ROTATE: tl.constexpr,
    PDL: tl.constexpr,
    owed_ptr=None,
    post_ptr=None,
    kept_ptr=None,
):
    """Grid: ((HEADS + 2 KV_HEADS) * HEAD_DIM / 2 / PAIRS,). See the file's formula.

    Before the wait: weights, and position, page and rope tables, which are constant within a step.
    """
    if PDL:
        gdc_launch_dependents()
    HALF: tl.constexpr = HEAD_DIM // 2
    head = tl.program_id(0) // (HALF // PAIRS)  # q heads first, then k, then v
    pairs = tl.program_id(0) % (HALF // PAIRS) * PAIRS + tl.arange(0, PAIRS)
    columns = tl.arange(0, BLOCK)
    inside = columns < HIDDEN
    offsets = (head * HEAD_DIM + pairs)[:, None] * HIDDEN + columns[None, :]
    first = tl.load(weight_ptr + offsets, mask=inside[None, :], other=0.0, eviction_policy="evict_first")
    second = tl.load(
        weight_ptr + HALF * HIDDEN + offsets, mask=inside[None, :], other=0.0, eviction_policy="evict_first"
    )
    norm = tl.load(norm_ptr + columns, mask=inside, other=0.0)
    if BIAS:
        first_bias = tl.load(bias_ptr + head * HEAD_DIM + pairs).to(tl.float32)
        second_bias = tl.load(bias_ptr + head * HEAD_DIM + HALF + pairs).to(tl.float32)
    position = tl.load(position_ptr)
    rotated = head < HEADS + KV_HEADS
    if ROTATE:
        cos = tl.load(cos_ptr + position * HEAD_DIM + pairs, mask=(pairs < HALF) & rotated, other=1.0)
        sin = tl.load(sin_ptr + position * HEAD_DIM + pairs, mask=(pairs < HALF) & rotated, other=0.0)
    slot = tl.load(table_ptr + position // PAGE) * PAGE + position % PAGE
    if PDL:
        gdc_wait()
    x = tl.load(x_ptr + columns, mask=inside, other=0.0, eviction_policy="evict_last")
    if owed_ptr is not None:
        x = paid_row(x, owed_ptr, post_ptr, kept_ptr, eps, columns, inside, HIDDEN)
    scale = tl.rsqrt(tl.sum(x * x, axis=0) / HIDDEN + eps)
    normed = x * norm.to(tl.float32)
    low = tl.sum(first.to(tl.float32) * normed[None, :], axis=1) * scale
    high = tl.sum(second.to(tl.float32) * normed[None, :], axis=1) * scale
    if BIAS:
        low += first_bias
        high += second_bias
    rotated_low, rotated_high = low, high
    if ROTATE:
        rotated_low = low * cos - high * sin
        rotated_high = high * cos + low * sin
    if head < HEADS:
        tl.store(q_ptr + head * HEAD_DIM + pairs, rotated_low.to(q_ptr.dtype.element_ty))
        tl.store(q_ptr + head * HEAD_DIM + HALF + pairs, rotated_high.to(q_ptr.dtype.element_ty))
    elif head < HEADS + KV_HEADS:
        place = k_ptr + (head - HEADS).to(tl.int64) * head_stride + slot * HEAD_DIM + pairs
        tl.store(place, rotated_low.to(k_ptr.dtype.element_ty))
        tl.store(place + HALF, rotated_high.to(k_ptr.dtype.element_ty))
    else:
        place = v_ptr + (head - HEADS - KV_HEADS).to(tl.int64) * head_stride + slot * HEAD_DIM + pairs
        tl.store(place, rotated_low.to(v_ptr.dtype.element_ty))
        tl.store(place + HALF, rotated_high.to(v_ptr.dtype.element_ty))


def qkv_gemv(
    x: torch.Tensor,
    norm: torch.Tensor,
    weight: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    position: torch.Tensor,
    table: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    eps: float,
    page: int,
    tile: Tile,
    pdl: bool,
    bias: torch.Tensor | None = None,
    rotate: bool = True,
    owed: Owed | None = None,
) -> None:
    """Launch the kernel.

    Args:
        x: `[hidden]`, fp32, the residual stream; `hidden` is at most `MAX_COLUMNS`.
        norm, weight: `[hidden]` and `[(heads + 2 kv_heads) * head_dim, hidden]`, in any float dtype.
        cos, sin: `[positions, head_dim]`, fp32, no more positions than the table has room for.
        position: int32 `[1]`, the row's newest position; not written by any kernel of the same step before its last.
        table: int32 `[pages]` or `[1, pages]`, physical page of each logical one.
        q: `[heads, head_dim]`, in any float dtype, written.
        k, v: `[kv_heads, slots, head_dim]`, both in one float dtype, whole pages; one slot of each head written.
        tile: `rows` counts both halves of the pairs, and divides `head_dim`.
        bias: `[(heads + 2 kv_heads) * head_dim]`, in the weight's dtype, or None where there is none.
        rotate: q and k; else they are left for `head_norm`.
        owed: what `x` lacks, or None.

    Raises:
        TypeError, ValueError: what the checks of `launch` and `pages` refuse.
    """
    place = {"cos": cos, "sin": sin, "position": position, "table": table}
    check_tensors("qkv_gemv", x=x, norm=norm, weight=weight, **place, q=q, k=k, v=v)
    check_rank("qkv_gemv", 1, x=x)
    check_rank("qkv_gemv", 2, q=q)
    check_rank("qkv_gemv", 3, k=k)
    (heads, head_dim), (kv_heads, slots, _) = q.shape, k.shape
    hidden = x.shape[0]
    rows = (heads + 2 * kv_heads) * head_dim
    check_dtype("qkv_gemv", torch.float32, x=x)
    check_norm("qkv_gemv", hidden, norm=norm)
    check_matrix("qkv_gemv", weight, rows, hidden)
    check_offsets("qkv_gemv", weight=weight.numel())
    check_bias("qkv_gemv", bias, weight)
    check_tile("qkv_gemv", tile, head_dim)
    check_float("qkv_gemv", q=q)
    check_pool("qkv_gemv", head_dim, k=k, v=v)
    check_rope("qkv_gemv", head_dim, cos=cos, sin=sin)
    check_dtype("qkv_gemv", torch.int32, position=position)
    check_shape("qkv_gemv", (1,), position=position)
    check_table("qkv_gemv", table, (), (1,), page=page, slots=slots, positions=cos.shape[0])
    qkv_gemv_kernel[(rows // tile.rows,)](
        x,
        norm,
        weight,
        weight if bias is None else bias,
        cos,
        sin,
        position,
        table,
        q,
        k,
        v,
        eps,
        slots * head_dim,
        HIDDEN=hidden,
        BLOCK=padded(hidden),
        HEADS=heads,
        KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        PAIRS=tile.rows // 2,
        PAGE=page,
        BIAS=bias is not None,
        ROTATE=rotate,
        PDL=pdl,
        **owed_arguments("qkv_gemv", owed, x),
        num_warps=tile.warps,
        launch_pdl=pdl,
    )
