"""The first half of a gated MLP, for one row: RMSNorm, gate and up projections, SwiGLU (Shazeer, arXiv 2002.05202).

    n = x / sqrt(mean(x^2) + eps) * norm;   h = silu(W_gate n) * (W_up n)

A program takes the same rows of both matrices. The norm's scale is applied to the products, as in `qkv_gemv`.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from skote.kernels.launch import Tile, check_matrix, check_tensors, check_tile, padded
from skote.kernels.rms_norm import rms_norm_reference
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
    BLOCK: tl.constexpr,  # a power of two, at least HIDDEN
    ROWS: tl.constexpr,  # of each matrix
    PDL: tl.constexpr,
):
    """Grid: (INTERMEDIATE / ROWS,). Before the wait: weights. After it: x, and the write of h."""
    if PDL:
        gdc_launch_dependents()
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    inside = columns < HIDDEN
    offsets = rows[:, None] * HIDDEN + columns[None, :]
    gate = tl.load(weight_ptr + offsets, mask=inside[None, :], other=0.0, eviction_policy="evict_first")
    up = tl.load(
        weight_ptr + INTERMEDIATE * HIDDEN + offsets, mask=inside[None, :], other=0.0, eviction_policy="evict_first"
    )
    norm = tl.load(norm_ptr + columns, mask=inside, other=0.0)
    if PDL:
        gdc_wait()
    x = tl.load(x_ptr + columns, mask=inside, other=0.0, eviction_policy="evict_last")
    scale = tl.rsqrt(tl.sum(x * x, axis=0) / HIDDEN + eps)
    normed = x * norm.to(tl.float32)
    gated = tl.sum(gate.to(tl.float32) * normed[None, :], axis=1) * scale
    h = gated / (1.0 + tl.exp(-gated)) * (tl.sum(up.to(tl.float32) * normed[None, :], axis=1) * scale)
    tl.store(h_ptr + rows, h.to(h_ptr.dtype.element_ty))


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
        x: `[hidden]`, fp32.
        norm, weight: `[hidden]` and `[2 * intermediate, hidden]`, gate first.
        h: `[intermediate]`, written.
        tile: `rows` counts the rows of gate and up together.

    Raises:
        TypeError, ValueError: what `check_tensors`, `check_matrix` and `check_tile` refuse.
    """
    check_tensors("gate_up_gemv", x=x, norm=norm, weight=weight, h=h)
    hidden, intermediate = x.shape[0], h.shape[0]
    check_matrix("gate_up_gemv", weight, 2 * intermediate, hidden)
    check_tile("gate_up_gemv", tile, 2 * intermediate)
    gate_up_gemv_kernel[(2 * intermediate // tile.rows,)](
        x,
        norm,
        weight,
        h,
        eps,
        HIDDEN=hidden,
        INTERMEDIATE=intermediate,
        BLOCK=padded(hidden),
        ROWS=tile.rows // 2,
        PDL=pdl,
        num_warps=tile.warps,
        launch_pdl=pdl,
    )
