"""The head of a decoder layer, for 16 to 128 rows: fused q/k/v projection, RoPE, and the write to the KV cache.

    q | k | v = W n + bias;   q, k rotated at the row's position (see `rope`);   cache[slot] = k, v

n is normalised already (`add_rms_norm`). Position p of row r lives in slot table[r, p // PAGE] * PAGE + p % PAGE of
every head. A row with a negative position is idle: it leaves the cache alone. As in `qkv_gemv`, a program takes both
halves of its rotated pairs.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from skote.kernels.launch import (
    GemmTile,
    check_bias,
    check_dtype,
    check_float,
    check_matrix,
    check_operand,
    check_rank,
    check_rows,
    check_shape,
    check_tensors,
    check_tile,
    check_unsplit,
)
from skote.kernels.pages import check_pool, check_rope, check_table
from skote.kernels.rope import apply_rope
from skote.kernels.rows_dot_triton import halves, rows_dot


def qkv_gemm_reference(
    normed: torch.Tensor,
    weight: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
    table: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    page: int,
    bias: torch.Tensor | None = None,
    rotate: bool = True,
) -> None:
    """The same in framework ops, fp32 inside; arguments as `qkv_gemm`. The q of idle rows is left as it is."""
    live = (positions >= 0).nonzero().flatten()
    at = positions[live].long()
    slots = table.expand(len(positions), -1)[live, at // page].long() * page + at % page
    rows = normed[live].float() @ weight.float().T
    heads = (rows if bias is None else rows + bias.float()).view(len(live), -1, q.shape[2])
    new_q, new_k, new_v = heads.split((q.shape[1], k.shape[0], k.shape[0]), dim=1)
    new_q, new_k = (apply_rope(new, cos[at, None], sin[at, None]) if rotate else new for new in (new_q, new_k))
    q[live] = new_q.to(q.dtype)
    k[:, slots] = new_k.transpose(0, 1).to(k.dtype)
    v[:, slots] = new_v.transpose(0, 1).to(v.dtype)


@triton.jit
def qkv_gemm_kernel(
    normed_ptr,
    weight_ptr,
    bias_ptr,
    cos_ptr,
    sin_ptr,
    positions_ptr,
    table_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    head_stride,  # elements from one head of the cache to the next
    table_stride,  # entries from one row of the table to the next
    HIDDEN: tl.constexpr,
    ROWS: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAIRS: tl.constexpr,  # rotated pairs a program
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    PAGE: tl.constexpr,
    BIAS: tl.constexpr,  # there is one
    ROTATE: tl.constexpr,
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
    if ROTATE:
        cos = tl.load(cos_ptr + angles, mask=rotated, other=1.0)
        sin = tl.load(sin_ptr + angles, mask=rotated, other=0.0)
    slot = tl.load(table_ptr + rows * table_stride + place // PAGE) * PAGE + place % PAGE
    if BIAS:
        first_bias = tl.load(bias_ptr + head * HEAD_DIM + pairs).to(tl.float32)
        second_bias = tl.load(bias_ptr + head * HEAD_DIM + HALF + pairs).to(tl.float32)
    if PDL:
        gdc_wait()
    both = tl.arange(0, 2 * PAIRS)
    taken = head * HEAD_DIM + tl.program_id(0) % (HALF // PAIRS) * PAIRS + both // PAIRS * HALF + both % PAIRS
    low, high = halves(rows_dot(normed_ptr, weight_ptr, taken, 0, HIDDEN, ROWS, BLOCK, STAGES, 1), ROWS)
    if BIAS:
        low += first_bias[None, :]
        high += second_bias[None, :]
    rotated_low, rotated_high = low, high
    if ROTATE:
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
    normed: torch.Tensor,
    weight: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
    table: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    page: int,
    tile: GemmTile,
    pdl: bool,
    bias: torch.Tensor | None = None,
    rotate: bool = True,
) -> None:
    """Launch the kernel.

    Args:
        normed: `[rows, hidden]`, in the weight's dtype, `rows` one of `ROW_TILES`.
        weight: `[(heads + 2 kv_heads) * head_dim, hidden]`, in any float dtype; `hidden` is at most `MAX_COLUMNS`.
        cos, sin: `[positions, head_dim]`, fp32, no more positions than the table has room for.
        positions: int32 `[rows]`, each row's newest position, negative where it is idle; not written by any kernel of
            the same step before its last.
        table: int32 `[rows, pages]`, physical page of each logical one; those of idle rows are pages of the pool too.
            Or `[1, pages]`: all rows are positions of one request.
        q: `[rows, heads, head_dim]`, in any float dtype, written; what idle rows get means nothing. There may be no
            query heads.
        k, v: `[kv_heads, slots, head_dim]`, both in one float dtype, the pool of all rows, whole pages; one slot of
            each head written for each live row.
        tile: `rows` counts both halves of the pairs, and divides `head_dim`; `splits` must be 1.
        bias: `[(heads + 2 kv_heads) * head_dim]`, in the weight's dtype, or None where there is none.
        rotate: q and k; else they are left for `head_norm`.

    Raises:
        TypeError, ValueError: what the checks of `launch` and `pages` refuse.
    """
    place = {"cos": cos, "sin": sin, "positions": positions, "table": table}
    check_tensors("qkv_gemm", normed=normed, weight=weight, **place, q=q, k=k, v=v)
    check_rank("qkv_gemm", 2, normed=normed)
    check_rank("qkv_gemm", 3, q=q, k=k)
    (rows, heads, head_dim), (kv_heads, slots, _) = q.shape, k.shape
    hidden, outputs = normed.shape[1], (heads + 2 * kv_heads) * head_dim
    check_rows("qkv_gemm", rows, normed=normed)
    check_matrix("qkv_gemm", weight, outputs, hidden)
    check_bias("qkv_gemm", bias, weight)
    check_operand("qkv_gemm", weight, normed=normed)
    check_tile("qkv_gemm", tile, head_dim)
    check_unsplit("qkv_gemm", tile)
    check_float("qkv_gemm", q=q)
    check_pool("qkv_gemm", head_dim, k=k, v=v)
    check_rope("qkv_gemm", head_dim, cos=cos, sin=sin)
    check_dtype("qkv_gemm", torch.int32, positions=positions)
    check_shape("qkv_gemm", (rows,), positions=positions)
    check_table("qkv_gemm", table, (1,), (rows,), page=page, slots=slots, positions=cos.shape[0])
    qkv_gemm_kernel[(outputs // tile.rows,)](
        normed,
        weight,
        weight if bias is None else bias,
        cos,
        sin,
        positions,
        table,
        q,
        k,
        v,
        slots * head_dim,
        table.shape[1] if table.shape[0] == rows else 0,
        HIDDEN=hidden,
        ROWS=rows,
        HEADS=heads,
        KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        PAIRS=tile.rows // 2,
        BLOCK=tile.columns(weight.dtype),
        STAGES=tile.stages,
        PAGE=page,
        BIAS=bias is not None,
        ROTATE=rotate,
        PDL=pdl,
        num_warps=tile.warps,
        launch_pdl=pdl,
    )
