"""The first half of a gated MLP, for 16 rows: RMSNorm, gate and up projections, SwiGLU (Shazeer, arXiv 2002.05202).

    n = x / sqrt(mean(x^2) + eps) * norm;   h = silu(W_gate n) * (W_up n)

A program takes the same rows of both matrices.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from skote.kernels.launch import GemmTile, check_matrix, check_rows, check_tensors
from skote.kernels.normed_rows_triton import ROWS, halves, normed_rows_dot
from skote.kernels.rms_norm import rms_norm_reference
from skote.kernels.silu_mul import silu_mul


def gate_up_gemm_reference(
    x: torch.Tensor, norm: torch.Tensor, weight: torch.Tensor, h: torch.Tensor, *, eps: float
) -> None:
    """The same in framework ops, fp32 inside; arguments as `gate_up_gemm`."""
    h.copy_(silu_mul(rms_norm_reference(x, norm, eps) @ weight.float().T))


@triton.jit
def gate_up_gemm_kernel(
    x_ptr,
    norm_ptr,
    weight_ptr,
    h_ptr,
    eps,
    intermediate,
    HIDDEN: tl.constexpr,
    TILE: tl.constexpr,  # rows of each matrix a program
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid: (ceil(intermediate / TILE),). Everything after the wait: x, and the write of h."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    both = tl.arange(0, 2 * TILE)
    taken = tl.minimum(tl.program_id(0) * TILE + both % TILE, intermediate - 1) + both // TILE * intermediate
    gate, up = halves(normed_rows_dot(x_ptr, norm_ptr, weight_ptr, taken, eps, HIDDEN, BLOCK, STAGES))
    h = gate / (1.0 + tl.exp(-gate)) * up
    columns = tl.program_id(0) * TILE + tl.arange(0, TILE)
    h_ptrs = h_ptr + tl.arange(0, ROWS)[:, None] * intermediate + columns[None, :]
    tl.store(h_ptrs, h.to(h_ptr.dtype.element_ty), mask=(columns < intermediate)[None, :])


def gate_up_gemm(
    x: torch.Tensor,
    norm: torch.Tensor,
    weight: torch.Tensor,
    h: torch.Tensor,
    *,
    eps: float,
    tile: GemmTile,
    pdl: bool,
) -> None:
    """Launch the kernel.

    Args:
        x: `[16, hidden]`, fp32.
        norm, weight: `[hidden]` and `[2 * intermediate, hidden]`, gate first.
        h: `[16, intermediate]`, written.
        tile: `rows` counts the rows of gate and up together.

    Raises:
        TypeError, ValueError: what `check_tensors`, `check_rows` and `check_matrix` refuse.
    """
    check_tensors("gate_up_gemm", x=x, norm=norm, weight=weight, h=h)
    check_rows("gate_up_gemm", x=x, h=h)
    hidden, intermediate = x.shape[1], h.shape[1]
    check_matrix("gate_up_gemm", weight, 2 * intermediate, hidden)
    gate_up_gemm_kernel[(triton.cdiv(intermediate, tile.rows // 2),)](
        x,
        norm,
        weight,
        h,
        eps,
        intermediate,
        HIDDEN=hidden,
        TILE=tile.rows // 2,
        BLOCK=tile.columns(weight.dtype),
        STAGES=tile.stages,
        PDL=pdl,
        num_warps=tile.warps,
        launch_pdl=pdl,
    )
