"""A projection back into the residual stream, for one row: x += W h. Used for the attention's o and the MLP's down.

Where a norm stands between the two, it is x = W h, owed to the stream (see `Owed`).
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
    check_matrix,
    check_offsets,
    check_operand,
    check_rank,
    check_tensors,
    check_turns,
)
from skote.kernels.row_dot_triton import row_chunks, row_dot, weight_chunks


def residual_gemv_reference(x: torch.Tensor, h: torch.Tensor, weight: torch.Tensor, *, add: bool = True) -> None:
    """The same in framework ops, fp32 inside; arguments as `residual_gemv`."""
    product = (weight.float() * h.flatten().float()).sum(-1)
    x.copy_(x + product if add else product)


@triton.jit
def residual_gemv_kernel(
    x_ptr,
    h_ptr,
    weight_ptr,
    COLUMNS: tl.constexpr,
    CHUNK: tl.constexpr,  # columns at once: a piece of 16 bytes for every thread
    ROWS: tl.constexpr,  # at once
    TURNS: tl.constexpr,
    MMA: tl.constexpr,
    PDL: tl.constexpr,
    ADD: tl.constexpr = True,  # else x is not read
):
    """Grid: (rows / (ROWS * TURNS),).

    Before the wait: weights. After it: h, and x, which is read and written in place.
    """
    if PDL:
        gdc_launch_dependents()
    rows = tl.program_id(0) * (ROWS * TURNS) + tl.arange(0, ROWS)
    weight = weight_chunks(weight_ptr, rows, COLUMNS, CHUNK)
    if PDL:
        gdc_wait()
    h = row_chunks(h_ptr, COLUMNS, CHUNK)
    for turn in tl.static_range(TURNS):
        now = weight
        if turn + 1 < TURNS:  # the next rows are on their way while these are multiplied
            weight = weight_chunks(weight_ptr, rows + (turn + 1) * ROWS, COLUMNS, CHUNK)
        if ADD:
            x = tl.load(x_ptr + rows + turn * ROWS, eviction_policy="evict_last")
            tl.store(x_ptr + rows + turn * ROWS, x + row_dot(now, h, (), MMA))
        else:
            tl.store(x_ptr + rows + turn * ROWS, row_dot(now, h, (), MMA))


def residual_gemv(
    x: torch.Tensor, h: torch.Tensor, weight: torch.Tensor, *, tile: Tile, pdl: bool, add: bool = True
) -> None:
    """Launch the kernel.

    Args:
        x: `[rows]`, fp32, in place.
        h: of any shape, `columns` elements, at most `MAX_COLUMNS`, in the weight's dtype.
        weight: `[rows, columns]`, in any float dtype.
        add: to what `x` holds; else that is overwritten.

    Raises:
        TypeError, ValueError: what the checks of `launch` refuse.
    """
    check_tensors("residual_gemv", x=x, h=h, weight=weight)
    check_rank("residual_gemv", 1, x=x)
    rows, columns = x.shape[0], h.numel()
    check_dtype("residual_gemv", torch.float32, x=x)
    check_matrix("residual_gemv", weight, rows, columns)
    check_offsets("residual_gemv", weight=weight.numel())
    check_turns("residual_gemv", tile, rows, weight, columns)
    check_operand("residual_gemv", weight, h=h)
    residual_gemv_kernel[(rows // (tile.rows * tile.turns),)](
        x,
        h,
        weight,
        COLUMNS=columns,
        CHUNK=tile.chunk(weight.dtype),
        ROWS=tile.rows,
        TURNS=tile.turns,
        MMA=tile.mma,
        PDL=pdl,
        ADD=add,
        num_warps=tile.warps,
        launch_pdl=pdl,
    )
