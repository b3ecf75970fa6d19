"""The Triton kernel of RMSNorm (formula and reference in `rms_norm`): one program a row, the whole row in registers."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from skote.kernels.launch import check_columns, check_float, check_norm, check_tensors

MAX_HIDDEN = 65536
"""Longest row: a program holds it in registers."""


@triton.jit
def rms_norm_kernel(
    x_ptr,
    weight_ptr,
    out_ptr,
    hidden,
    eps,
    BLOCK: tl.constexpr,  # a power of two, at least `hidden`
):
    """Row i of `out` [rows, hidden] = row i of `x` / sqrt(mean(x^2) + eps) * weight; fp32 inside."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < hidden
    x = tl.load(x_ptr + row * hidden + columns, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, axis=0) / hidden + eps)
    tl.store(out_ptr + row * hidden + columns, (x * scale * weight).to(out_ptr.dtype.element_ty), mask=inside)


def rms_norm_triton(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Launch the kernel on `x` [..., hidden] and `weight` [hidden], each in a float dtype; the result is like `x`.

    Raises:
        TypeError, ValueError: what the checks of `launch` refuse, rows beyond `MAX_HIDDEN` among it.
    """
    check_tensors("rms_norm_triton", x=x, weight=weight)
    check_float("rms_norm_triton", x=x)
    if x.ndim == 0:
        raise ValueError("rms_norm_triton: x has no dimensions, expected rows of elements.")
    hidden = x.shape[-1]
    check_norm("rms_norm_triton", hidden, weight=weight)
    check_columns("rms_norm_triton", hidden, MAX_HIDDEN)
    out = torch.empty_like(x)
    rows = x.numel() // hidden
    if rows:
        block, warps = launch_shape(hidden)
        with torch.cuda.device(x.device):
            rms_norm_kernel[(rows,)](x, weight, out, hidden, eps, BLOCK=block, num_warps=warps)
    return out


def launch_shape(hidden: int) -> tuple[int, int]:
    """(BLOCK, warps) for rows of `hidden` elements: the next power of two, and 16 elements a thread up to 8192."""
    block = triton.next_power_of_2(hidden)
    return block, min(max(block // 512, 1), 16)
