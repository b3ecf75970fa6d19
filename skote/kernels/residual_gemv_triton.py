"""A projection back into the residual stream, for one row: x += W h. Used for the attention's o and the MLP's down."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from skote.kernels.launch import Tile, check_matrix, check_tensors, check_tile, padded


def residual_gemv_reference(x: torch.Tensor, h: torch.Tensor, weight: torch.Tensor) -> None:
    """The same in framework ops, fp32 inside; arguments as `residual_gemv`."""
    x += (weight.float() * h.float()).sum(-1)


@triton.jit
def residual_gemv_kernel(
    x_ptr,
    h_ptr,
    weight_ptr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,  # a power of two, at least COLUMNS
    ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid: (rows / ROWS,). Before the wait: weights. After it: h, and x, which is read and written in place."""
    if PDL:
        gdc_launch_dependents()
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    inside = columns < COLUMNS
    weight = tl.load(
        weight_ptr + rows[:, None] * COLUMNS + columns[None, :],
        mask=inside[None, :],
        other=0.0,
        eviction_policy="evict_first",
    )
    if PDL:
        gdc_wait()
    h = tl.load(h_ptr + columns, mask=inside, other=0.0, eviction_policy="evict_last").to(tl.float32)
    x = tl.load(x_ptr + rows, eviction_policy="evict_last")
    tl.store(x_ptr + rows, x + tl.sum(weight.to(tl.float32) * h[None, :], axis=1))


def residual_gemv(x: torch.Tensor, h: torch.Tensor, weight: torch.Tensor, *, tile: Tile, pdl: bool) -> None:
    """Launch the kernel: `x` [rows], fp32, in place; `h` [columns]; `weight` [rows, columns].

    Raises:
        TypeError, ValueError: what `check_tensors`, `check_matrix` and `check_tile` refuse.
    """
    check_tensors("residual_gemv", x=x, h=h, weight=weight)
    rows, columns = x.shape[0], h.numel()
    check_matrix("residual_gemv", weight, rows, columns)
    check_tile("residual_gemv", tile, rows)
    residual_gemv_kernel[(rows // tile.rows,)](
        x,
        h,
        weight,
        COLUMNS=columns,
        BLOCK=padded(columns),
        ROWS=tile.rows,
        PDL=pdl,
        num_warps=tile.warps,
        launch_pdl=pdl,
    )
