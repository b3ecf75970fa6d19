"""The first half of a gated MLP, for one row: RMSNorm, gate and up projections, SwiGLU (Shazeer, arXiv 2002.05202).

    n = x / sqrt(mean(x^2) + eps) * norm;   h = silu(W_gate n) * (W_up n)

A program takes the same rows of both matrices, some rows after another, for which it reads and norms x once. The norm's
scale is applied to the products, as in `qkv_gemv`.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from skote.kernels.launch import (
    Tile,
    check_dtype,
    check_float,
    check_matrix,
    check_norm,
    check_offsets,
    check_rank,
    check_tensors,
    check_turns,
)
from skote.kernels.rms_norm import rms_norm_reference
from skote.kernels.row_dot_triton import norm_chunks, normed_chunks, row_chunks, row_dot, weight_chunks
from skote.kernels.silu_mul import silu_mul


def gate_up_gemv_reference(
    x: torch.Tensor, norm: torch.Tensor, weight: torch.Tensor, h: torch.Tensor, *, eps: float
) -> None:
    """The same in framework ops, fp32 inside; arguments as `gate_up_gemv`."""
    h.copy_(silu_mul((weight.float() * rms_norm_reference(x, norm, eps)).sum(-1)))


@triton.jit
def gate_up_gemv_kernel(
    x_ptr,
    norm_ptr,
    weight_ptr,
    h_ptr,
    eps,
    HIDDEN: tl.constexpr,
    INTERMEDIATE: tl.constexpr,
    CHUNK: tl.constexpr,  # columns at once: a piece of 16 bytes for every thread
    ROWS: tl.constexpr,  # of each matrix at once
    TURNS: tl.constexpr,
    MMA: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid: (INTERMEDIATE / (ROWS * TURNS),). Before the wait: weights. After it: x, and the write of h."""
    if PDL:
        gdc_launch_dependents()
    rows = tl.program_id(0) * (ROWS * TURNS) + tl.arange(0, ROWS)
    gate = weight_chunks(weight_ptr, rows, HIDDEN, CHUNK)
    up = weight_chunks(weight_ptr + INTERMEDIATE * HIDDEN, rows, HIDDEN, CHUNK)
    norm = norm_chunks(norm_ptr, HIDDEN, CHUNK)
    if PDL:
        gdc_wait()
    normed, rest, scale = normed_chunks(row_chunks(x_ptr, HIDDEN, CHUNK), norm, eps, HIDDEN, MMA)
    for turn in tl.static_range(TURNS):
        gate_now, up_now = gate, up
        if turn + 1 < TURNS:  # the next rows are on their way while these are multiplied
            gate = weight_chunks(weight_ptr, rows + (turn + 1) * ROWS, HIDDEN, CHUNK)
            up = weight_chunks(weight_ptr + INTERMEDIATE * HIDDEN, rows + (turn + 1) * ROWS, HIDDEN, CHUNK)
        gated = row_dot(gate_now, normed, rest, MMA) * scale
        h = gated / (1.0 + tl.exp(-gated)) * (row_dot(up_now, normed, rest, MMA) * scale)
        tl.store(h_ptr + rows + turn * ROWS, h.to(h_ptr.dtype.element_ty))


def gate_up_gemv(
    x: torch.Tensor,
    norm: torch.Tensor,
    weight: torch.Tensor,
    h: torch.Tensor,
    *,
    eps: float,
    tile: Tile,
    pdl: bool,
) -> None:
    """Launch the kernel.

    Args:
        x: `[hidden]`, fp32; `hidden` is at most `MAX_COLUMNS`.
        norm, weight: `[hidden]` and `[2 * intermediate, hidden]`, gate first, in any float dtype.
        h: `[intermediate]`, in any float dtype, written.
        tile: `rows` counts the rows of gate and up together.

    Raises:
        TypeError, ValueError: what the checks of `launch` refuse.
    """
    check_tensors("gate_up_gemv", x=x, norm=norm, weight=weight, h=h)
    check_rank("gate_up_gemv", 1, x=x, h=h)
    hidden, intermediate = x.shape[0], h.shape[0]
    check_dtype("gate_up_gemv", torch.float32, x=x)
    check_float("gate_up_gemv", h=h)
    check_norm("gate_up_gemv", hidden, norm=norm)
    check_matrix("gate_up_gemv", weight, 2 * intermediate, hidden)
    check_offsets("gate_up_gemv", weight=weight.numel())
    check_turns("gate_up_gemv", tile, 2 * intermediate, weight, hidden)
    gate_up_gemv_kernel[(2 * intermediate // (tile.rows * tile.turns),)](
        x,
        norm,
        weight,
        h,
        eps,
        HIDDEN=hidden,
        INTERMEDIATE=intermediate,
        CHUNK=tile.chunk(weight.dtype),
        ROWS=tile.rows // 2,
        TURNS=tile.turns,
        MMA=tile.mma,
        PDL=pdl,
        num_warps=tile.warps,
        launch_pdl=pdl,
    )
