"""A projection back into the residual stream, for 16 rows: x += h W^T. Used for the attention's o and the MLP's down.

The 16 rows are the left operand of one matrix instruction, the columns come block after block, sums are fp32.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from skote.kernels.launch import GemmTile, check_matrix, check_rows, check_tensors
from skote.kernels.normed_rows_triton import ROWS


def residual_gemm_reference(x: torch.Tensor, h: torch.Tensor, weight: torch.Tensor) -> None:
    """The same in framework ops, fp32 inside; arguments as `residual_gemm`."""
    x += h.float() @ weight.float().T


@triton.jit
def residual_gemm_kernel(
    x_ptr,
    h_ptr,
    weight_ptr,
    outputs,  # rows of the matrix
    COLUMNS: tl.constexpr,
    TILE: tl.constexpr,  # rows of the matrix a program
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid: (ceil(outputs / TILE),). Everything after the wait: h, and x, which is read and written in place."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    rows = tl.arange(0, ROWS)
    taken = tl.program_id(0) * TILE + tl.arange(0, TILE)
    inside_matrix = tl.minimum(taken, outputs - 1).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    h_ptrs = h_ptr + rows[:, None] * COLUMNS + columns[None, :]
    weight_ptrs = weight_ptr + inside_matrix[:, None] * COLUMNS + columns[None, :]
    product = tl.zeros([ROWS, TILE], tl.float32)
    for start in tl.range(0, COLUMNS, BLOCK, num_stages=STAGES):
        inside = (columns < COLUMNS - start)[None, :]
        weight = tl.load(weight_ptrs + start, mask=inside, other=0.0, eviction_policy="evict_first")
        h = tl.load(h_ptrs + start, mask=inside, other=0.0, eviction_policy="evict_last")
        product = tl.dot(h, tl.trans(weight), product, input_precision="ieee")
    x_ptrs = x_ptr + rows[:, None] * outputs + taken[None, :]
    there = (taken < outputs)[None, :]
    x = tl.load(x_ptrs, mask=there, other=0.0, eviction_policy="evict_last")
    tl.store(x_ptrs, x + product, mask=there)


def residual_gemm(x: torch.Tensor, h: torch.Tensor, weight: torch.Tensor, *, tile: GemmTile, pdl: bool) -> None:
    """Launch the kernel: `x` [16, outputs], fp32, in place; `h` [16, columns] and `weight` [outputs, columns] alike.

    Raises:
        TypeError, ValueError: what `check_tensors`, `check_rows` and `check_matrix` refuse, or h of another dtype.
    """
    check_tensors("residual_gemm", x=x, h=h, weight=weight)
    check_rows("residual_gemm", x=x, h=h)
    outputs, columns = x.shape[1], h.shape[1]
    check_matrix("residual_gemm", weight, outputs, columns)
    if h.dtype != weight.dtype:
        raise TypeError(f"residual_gemm: h is {h.dtype}, the weight {weight.dtype}; they must be alike.")
    residual_gemm_kernel[(triton.cdiv(outputs, tile.rows),)](
        x,
        h,
        weight,
        outputs,
        COLUMNS=columns,
        TILE=tile.rows,
        BLOCK=tile.columns(weight.dtype),
        STAGES=tile.stages,
        PDL=pdl,
        num_warps=tile.warps,
        launch_pdl=pdl,
    )
