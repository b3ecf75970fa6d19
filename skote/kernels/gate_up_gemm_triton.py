"""The first half of a gated MLP, for 16 to 128 rows: gate and up projections, SwiGLU (Shazeer, arXiv 2002.05202).

    h = silu(W_gate n) * (W_up n)

n is normalised already (`add_rms_norm`). A program takes the same rows of both matrices. The gate's activation is silu
or another one.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from skote.kernels.activation import activated as activated_reference
from skote.kernels.activation_triton import activated, check_activation
from skote.kernels.launch import (
    GemmTile,
    check_float,
    check_matrix,
    check_operand,
    check_rank,
    check_rows,
    check_tensors,
    check_unsplit,
)
from skote.kernels.rows_dot_triton import halves, rows_dot


def gate_up_gemm_reference(
    normed: torch.Tensor, weight: torch.Tensor, h: torch.Tensor, *, activation: str = "silu"
) -> None:
    """The same in framework ops, fp32 inside; arguments as `gate_up_gemm`."""
    h.copy_(activated_reference(normed.float() @ weight.float().T, activation, gated=True))


@triton.jit
def gate_up_gemm_kernel(
    normed_ptr,
    weight_ptr,
    h_ptr,
    intermediate,
    HIDDEN: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,  # rows of each matrix a program
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
    ACTIVATION: tl.constexpr = "silu",
):
    """Grid: (ceil(intermediate / TILE),). Everything after the wait: normed, and the write of h."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    both = tl.arange(0, 2 * TILE)
    taken = tl.minimum(tl.program_id(0) * TILE + both % TILE, intermediate - 1) + both // TILE * intermediate
    gate, up = halves(rows_dot(normed_ptr, weight_ptr, taken, 0, HIDDEN, ROWS, BLOCK, STAGES, 1), ROWS)
    h = activated(gate, ACTIVATION) * up
    columns = tl.program_id(0) * TILE + tl.arange(0, TILE)
    h_ptrs = h_ptr + tl.arange(0, ROWS)[:, None] * intermediate + columns[None, :]
    tl.store(h_ptrs, h.to(h_ptr.dtype.element_ty), mask=(columns < intermediate)[None, :])


def gate_up_gemm(
    normed: torch.Tensor,
    weight: torch.Tensor,
    h: torch.Tensor,
    *,
    tile: GemmTile,
    pdl: bool,
    activation: str = "silu",
) -> None:
    """Launch the kernel.

    Args:
        normed: `[rows, hidden]`, in the weight's dtype, `rows` one of `ROW_TILES`.
        weight: `[2 * intermediate, hidden]`, gate first, in any float dtype; `hidden` is at most `MAX_COLUMNS`.
        h: `[rows, intermediate]`, in any float dtype, written.
        tile: `rows` counts the rows of gate and up together; `splits` must be 1.
        activation: one of `ACTIVATIONS`.

    Raises:
        TypeError, ValueError: what the checks of `launch` refuse.
    """
    check_tensors("gate_up_gemm", normed=normed, weight=weight, h=h)
    check_rank("gate_up_gemm", 2, normed=normed, h=h)
    (rows, hidden), intermediate = normed.shape, h.shape[1]
    check_float("gate_up_gemm", h=h)
    check_rows("gate_up_gemm", rows, normed=normed, h=h)
    check_matrix("gate_up_gemm", weight, 2 * intermediate, hidden)
    check_operand("gate_up_gemm", weight, normed=normed)
    check_unsplit("gate_up_gemm", tile)
    check_activation("gate_up_gemm", activation)
    gate_up_gemm_kernel[(triton.cdiv(intermediate, tile.rows // 2),)](
        normed,
        weight,
        h,
        intermediate,
        HIDDEN=hidden,
        ROWS=rows,
        TILE=tile.rows // 2,
        BLOCK=tile.columns(weight.dtype),
        STAGES=tile.stages,
        PDL=pdl,
        ACTIVATION=activation,
        num_warps=tile.warps,
        launch_pdl=pdl,
    )
