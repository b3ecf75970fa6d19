"""A projection back to the hidden width, for 16 to 128 rows: the attention's o and the MLP's down.

    partials[s] = h W^T, the sum over the s-th part of the columns

These matrices have few rows: so that all multiprocessors read, the columns are split too. `add_rms_norm`, which comes
next, adds the parts to the residual stream, one after another.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from skote.kernels.launch import (
    GemmTile,
    check_dtype,
    check_matrix,
    check_operand,
    check_rank,
    check_rows,
    check_shape,
    check_tensors,
)
from skote.kernels.rows_dot_triton import rows_dot


def split_gemm_reference(h: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The sum of all parts in framework ops, fp32 `[rows, outputs]`; arguments as `split_gemm`."""
    return h.float() @ weight.float().T


@triton.jit
def split_gemm_kernel(
    h_ptr,
    weight_ptr,
    partials_ptr,
    outputs,  # rows of the matrix
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,  # rows of the matrix a program
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    SPLITS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid: (ceil(outputs / TILE), SPLITS). Everything after the wait: h, and the write."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    taken = tl.program_id(0) * TILE + tl.arange(0, TILE)
    inside = tl.minimum(taken, outputs - 1)
    product = rows_dot(h_ptr, weight_ptr, inside, tl.program_id(1), COLUMNS, ROWS, BLOCK, STAGES, SPLITS)
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    places = partials_ptr + rows[:, None] * outputs + taken[None, :]
    tl.store(places, product, mask=(taken < outputs)[None, :])


def split_gemm(h: torch.Tensor, weight: torch.Tensor, partials: torch.Tensor, *, tile: GemmTile, pdl: bool) -> None:
    """Launch the kernel.

    Args:
        h: `[rows, columns]`, in the weight's dtype, `rows` one of `ROW_TILES`.
        weight: `[outputs, columns]`, in any float dtype; `columns` are at most `MAX_COLUMNS`.
        partials: `[tile.splits, rows, outputs]`, fp32, written.

    Raises:
        TypeError, ValueError: what the checks of `launch` refuse.
    """
    check_tensors("split_gemm", h=h, weight=weight, partials=partials)
    check_rank("split_gemm", 2, h=h, weight=weight)
    (rows, columns), outputs = h.shape, weight.shape[0]
    check_rows("split_gemm", rows, h=h)
    check_matrix("split_gemm", weight, outputs, columns)
    check_operand("split_gemm", weight, h=h)
    check_dtype("split_gemm", torch.float32, partials=partials)
    check_shape("split_gemm", (tile.splits, rows, outputs), partials=partials)
    split_gemm_kernel[(triton.cdiv(outputs, tile.rows), tile.splits)](
        h,
        weight,
        partials,
        outputs,
        COLUMNS=columns,
        ROWS=rows,
        TILE=tile.rows,
        BLOCK=tile.columns(weight.dtype),
        STAGES=tile.stages,
        SPLITS=tile.splits,
        PDL=pdl,
        num_warps=tile.warps,
        launch_pdl=pdl,
    )
