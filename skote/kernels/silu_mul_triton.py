"""The Triton kernel of a gated feed-forward's elementwise half, for the rows of a prefill: act(gate) * up.

Formula and reference are `activated` of `skote.kernels.activation`; for silu `silu_mul` is the same.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from skote.kernels.activation_triton import activated, check_activation
from skote.kernels.launch import check_float, check_rank, check_tensors

_BLOCK = 1024


@triton.jit
def silu_mul_kernel(
    gate_up_ptr,
    out_ptr,
    INTERMEDIATE: tl.constexpr,
    BLOCK: tl.constexpr,
    ACTIVATION: tl.constexpr = "silu",
):
    """Grid: (rows, ceil(INTERMEDIATE / BLOCK)). `out` [rows, INTERMEDIATE] = act(gate) * up, fp32 inside."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < INTERMEDIATE
    gate_ptr = gate_up_ptr + row * 2 * INTERMEDIATE + columns
    gate = tl.load(gate_ptr, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_ptr + INTERMEDIATE, mask=inside, other=0.0).to(tl.float32)
    out = activated(gate, ACTIVATION) * up
    tl.store(out_ptr + row * INTERMEDIATE + columns, out.to(out_ptr.dtype.element_ty), mask=inside)


def silu_mul_triton(gate_up: torch.Tensor, activation: str = "silu") -> torch.Tensor:
    """Launch the kernel on `gate_up` [rows, 2 * intermediate], gate first, in a float dtype: `[rows, intermediate]`
    in that dtype.

    `activation` is one of `ACTIVATIONS`.

    Raises:
        TypeError, ValueError: what the checks of `launch` refuse, or an odd number of columns.
    """
    check_tensors("silu_mul_triton", gate_up=gate_up)
    check_float("silu_mul_triton", gate_up=gate_up)
    check_rank("silu_mul_triton", 2, gate_up=gate_up)
    check_activation("silu_mul_triton", activation)
    rows, columns = gate_up.shape
    if columns % 2:
        raise ValueError(f"silu_mul_triton: {columns} columns are not gate and up of one length.")
    out = torch.empty(rows, columns // 2, dtype=gate_up.dtype, device=gate_up.device)
    silu_mul_kernel[(rows, triton.cdiv(columns // 2, _BLOCK))](
        gate_up, out, INTERMEDIATE=columns // 2, BLOCK=_BLOCK, ACTIVATION=activation, num_warps=4
    )
    return out
