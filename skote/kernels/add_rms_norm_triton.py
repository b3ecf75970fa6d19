"""Between two projections of a prefill: the residual add and the next RMSNorm, in one pass over each row.

x += delta;   out = x / sqrt(mean(x^2) + eps) * norm, rounded once to the weights' dtype
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from skote.kernels.launch import MAX_COLUMNS, check_tensors, padded
from skote.kernels.rms_norm import rms_norm_reference
from skote.kernels.rms_norm_triton import launch_shape


def add_rms_norm_reference(
    x: torch.Tensor, delta: torch.Tensor | None, norm: torch.Tensor, out: torch.Tensor, *, eps: float
) -> None:
    """The same in framework ops; arguments as `add_rms_norm`."""
    if delta is not None:
        x += delta.float()
    out.copy_(rms_norm_reference(x, norm, eps))


@triton.jit
def add_rms_norm_kernel(
    x_ptr,
    delta_ptr,  # not read without ADD
    norm_ptr,
    out_ptr,
    hidden,
    eps,
    BLOCK: tl.constexpr,  # a power of two, at least `hidden`
    ADD: tl.constexpr,
):
    """Grid: (rows,). One program a row, the whole row in registers."""
    row = tl.program_id(0).to(tl.int64) * hidden
    columns = tl.arange(0, BLOCK)
    inside = columns < hidden
    x = tl.load(x_ptr + row + columns, mask=inside, other=0.0)
    if ADD:
        x += tl.load(delta_ptr + row + columns, mask=inside, other=0.0).to(tl.float32)
        tl.store(x_ptr + row + columns, x, mask=inside)
    norm = tl.load(norm_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, axis=0) / hidden + eps)
    tl.store(out_ptr + row + columns, (x * scale * norm).to(out_ptr.dtype.element_ty), mask=inside)


def add_rms_norm(
    x: torch.Tensor, delta: torch.Tensor | None, norm: torch.Tensor, out: torch.Tensor, *, eps: float
) -> None:
    """Launch the kernel: `x` [rows, hidden] fp32, in place; `delta`, `out` alike in any float dtype; `norm` [hidden].

    Raises:
        TypeError, ValueError: what `check_tensors` refuses, shapes that do not match, or rows beyond `MAX_COLUMNS`.
    """
    rows, hidden = x.shape
    check_tensors("add_rms_norm", x=x, norm=norm, out=out, delta=x if delta is None else delta)
    if out.shape != x.shape or norm.shape != (hidden,) or (delta is not None and delta.shape != x.shape):
        raise ValueError(f"add_rms_norm: x {tuple(x.shape)}, norm {tuple(norm.shape)}, out {tuple(out.shape)} differ.")
    if hidden > MAX_COLUMNS:
        raise ValueError(f"add_rms_norm: rows of {hidden} elements; the kernel takes 1 to {MAX_COLUMNS}.")
    add_rms_norm_kernel[(rows,)](
        x,
        x if delta is None else delta,
        norm,
        out,
        hidden,
        eps,
        BLOCK=padded(hidden),
        ADD=delta is not None,
        num_warps=launch_shape(hidden)[1],
    )
