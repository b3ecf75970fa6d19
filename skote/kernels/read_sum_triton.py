"""What a device can read: every program sums one block of memory, and nothing else moves."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from skote.kernels.launch import check_tensors

BLOCK = 16384


@triton.jit
def read_sum_kernel(x_ptr, out_ptr, BLOCK: tl.constexpr):
    """Grid: (elements / BLOCK,). `out` [programs] = the sum of each block, fp32."""
    program = tl.program_id(0)
    x = tl.load(x_ptr + program.to(tl.int64) * BLOCK + tl.arange(0, BLOCK), eviction_policy="evict_first")
    tl.store(out_ptr + program, tl.sum(x.to(tl.float32), axis=0))


def read_sum(x: torch.Tensor, out: torch.Tensor) -> None:
    """Launch the kernel: `x`, whole blocks of `BLOCK` elements; `out` fp32, one entry a block.

    Raises:
        TypeError, ValueError: what `check_tensors` refuses, or sizes that do not match.
    """
    check_tensors("read_sum", x=x, out=out)
    if x.numel() != out.numel() * BLOCK:
        raise ValueError(f"read_sum: {x.numel()} elements are not {out.numel()} blocks of {BLOCK}.")
    read_sum_kernel[(out.numel(),)](x, out, BLOCK=BLOCK, num_warps=8)
