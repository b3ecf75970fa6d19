"""The head of a decoder layer, for 16 rows: RMSNorm, fused q/k/v projection, RoPE, and the write to the KV cache.

    n = x / sqrt(mean(x^2) + eps) * norm;   q | k | v = W n;   q, k rotated at the row's position;   cache[slot] = k, v

Position p of row r lives in slot table[r, p // PAGE] * PAGE + p % PAGE of every head. A row with a negative position is
idle: it leaves the cache alone. As in `qkv_gemv`, a program takes both halves of its rotated pairs.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from skote.kernels.launch import GemmTile, check_matrix, check_rows, check_tensors, check_tile
from skote.kernels.normed_rows_triton import ROWS, halves, normed_rows_dot
from skote.kernels.qkv_gemv_triton import qkv_gemv_reference


def qkv_gemm_reference(
    x: torch.Tensor,
    norm: torch.Tensor,
    weight: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
    table: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    eps: float,
    page: int,
) -> None:
    """The same in framework ops, row by row; arguments as `qkv_gemm`. The q of idle rows is left as it is."""
    for row in (positions >= 0).nonzero().flatten().tolist():
        qkv_gemv_reference(x[row], norm, weight, cos, sin, positions[row], table[row], q[row], k, v, eps=eps, page=page)


@triton.jit
def qkv_gemm_kernel(
    x_ptr,
    norm_ptr,
    weight_ptr,
    cos_ptr,
    sin_ptr,
    positions_ptr,
    table_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    eps,
    head_stride,  # elements from one head of the cache to the next
    pages,  # of a row of the table
    HIDDEN: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAIRS: tl.constexpr,  # rotated pairs a program
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    PAGE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid: ((HEADS + 2 KV_HEADS) * HEAD_DIM / 2 / PAIRS,). See the file's formula.

    Before the wait: positions, block and rope tables, which are constant within a step.
    """
    if PDL:
        gdc_launch_dependents()
    HALF: tl.constexpr = HEAD_DIM // 2
    head = tl.program_id(0) // (HALF // PAIRS)  # q heads first, then k, then v
    pairs = tl.program_id(0) % (HALF // PAIRS) * PAIRS + tl.arange(0, PAIRS)
    rows = tl.arange(0, ROWS)
    position = tl.load(positions_ptr + rows)
    live = (position >= 0)[:, None]
    place = tl.maximum(position, 0)
    angles = place[:, None] * HEAD_DIM + pairs[None, :]
    rotated = (head < HEADS + KV_HEADS) & (angles >= 0)
    cos = tl.load(cos_ptr + angles, mask=rotated, other=1.0)
    sin = tl.load(sin_ptr + angles, mask=rotated, other=0.0)
    slot = tl.load(table_ptr + rows * pages + place // PAGE) * PAGE + place % PAGE
    if PDL:
        gdc_wait()
    both = tl.arange(0, 2 * PAIRS)
    taken = head * HEAD_DIM + tl.program_id(0) % (HALF // PAIRS) * PAIRS + both // PAIRS * HALF + both % PAIRS
    low, high = halves(normed_rows_dot(x_ptr, norm_ptr, weight_ptr, taken, eps, HIDDEN, BLOCK, STAGES))
    rotated_low = low * cos - high * sin
    rotated_high = high * cos + low * sin
    if head < HEADS:
        places = q_ptr + (rows * HEADS + head)[:, None] * HEAD_DIM + pairs[None, :]
        tl.store(places, rotated_low.to(q_ptr.dtype.element_ty))
        tl.store(places + HALF, rotated_high.to(q_ptr.dtype.element_ty))
    elif head < HEADS + KV_HEADS:
        places = k_ptr + (head - HEADS).to(tl.int64) * head_stride + slot[:, None] * HEAD_DIM + pairs[None, :]
        tl.store(places, rotated_low.to(k_ptr.dtype.element_ty), mask=live)
        tl.store(places + HALF, rotated_high.to(k_ptr.dtype.element_ty), mask=live)
    else:
        places = (
            v_ptr + (head - HEADS - KV_HEADS).to(tl.int64) * head_stride + slot[:, None] * HEAD_DIM + pairs[None, :]
        )
        tl.store(places, rotated_low.to(v_ptr.dtype.element_ty), mask=live)
        tl.store(places + HALF, rotated_high.to(v_ptr.dtype.element_ty), mask=live)


def qkv_gemm(
    x: torch.Tensor,
    norm: torch.Tensor,
    weight: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
    table: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    eps: float,
    page: int,
    tile: GemmTile,
    pdl: bool,
) -> None:
    """Launch the kernel.

    Args:
        x: `[16, hidden]`, fp32, the residual stream.
        norm, weight: `[hidden]` and `[(heads + 2 kv_heads) * head_dim, hidden]`.
        cos, sin: `[positions, head_dim]`, fp32.
        positions: int32 `[16]`, each row's newest position, negative where it is idle; not written by any kernel of the
            same step before its last.
        table: int32 `[16, pages]`, physical page of each logical one; those of idle rows are pages of the pool too.
        q: `[16, heads, head_dim]`, written; what idle rows get means nothing.
        k, v: `[kv_heads, slots, head_dim]`, the pool of all rows; one slot of each head written for each live row.
        tile: `rows` counts both halves of the pairs.

    Raises:
        TypeError, ValueError: what the checks of `launch` refuse, and shapes that do not match.
    """
    check_tensors("qkv_gemm", x=x, norm=norm, weight=weight, cos=cos, sin=sin, positions=positions, table=table, q=q)
    check_tensors("qkv_gemm", k=k, v=v)
    check_rows("qkv_gemm", x=x, positions=positions, table=table, q=q)
    (_, heads, head_dim), (kv_heads, slots, _) = q.shape, k.shape
    hidden = x.shape[1]
    rows = (heads + 2 * kv_heads) * head_dim
    check_matrix("qkv_gemm", weight, rows, hidden)
    check_tile("qkv_gemm", tile, head_dim)
    if k.shape != v.shape or k.shape[2] != head_dim or cos.shape != sin.shape or cos.shape[1] != head_dim:
        raise ValueError(
            f"qkv_gemm: q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}, cos {tuple(cos.shape)} and "
            f"sin {tuple(sin.shape)} do not belong together."
        )
    qkv_gemm_kernel[(rows // tile.rows,)](
        x,
        norm,
        weight,
        cos,
        sin,
        positions,
        table,
        q,
        k,
        v,
        eps,
        slots * head_dim,
        table.shape[1],
        HIDDEN=hidden,
        HEADS=heads,
        KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        PAIRS=tile.rows // 2,
        BLOCK=tile.columns(weight.dtype),
        STAGES=tile.stages,
        PAGE=page,
        PDL=pdl,
        num_warps=tile.warps,
        launch_pdl=pdl,
    )
