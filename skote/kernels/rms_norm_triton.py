"""The Triton kernel of RMSNorm (formula and reference in `rms_norm`): one program a row, the whole row in registers."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

MAX_HIDDEN = 65536
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


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
    """Launch the kernel on `x` [..., hidden] and `weight` [hidden], both contiguous on one CUDA device.

    Raises:
        TypeError: a tensor that is not on CUDA, or not of fp32, fp16 or bf16.
        ValueError: tensors that are not contiguous, whose shapes do not match, or a row beyond `MAX_HIDDEN`.
    """
    for name, tensor in (("x", x), ("weight", weight)):
        if tensor.device.type != "cuda":
            raise TypeError(f"rms_norm_triton: {name} is on {tensor.device}; the kernel takes CUDA tensors alone.")
        if tensor.dtype not in _DTYPES:
            raise TypeError(f"rms_norm_triton: {name} is {tensor.dtype}; the kernel takes fp32, fp16 and bf16.")
        if not tensor.is_contiguous():
            raise ValueError(f"rms_norm_triton: {name} is not contiguous; call .contiguous() first.")
    hidden = x.shape[-1]
    if weight.shape != (hidden,):
        raise ValueError(f"rms_norm_triton: weight has shape {tuple(weight.shape)}, rows of x have {hidden} elements.")
    if not 1 <= hidden <= MAX_HIDDEN:
        raise ValueError(f"rms_norm_triton: rows of {hidden} elements; the kernel takes 1 to {MAX_HIDDEN}.")
    if x.device != weight.device:
        raise ValueError(f"rms_norm_triton: x is on {x.device}, weight on {weight.device}.")
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
