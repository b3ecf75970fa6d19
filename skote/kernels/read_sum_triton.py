"""What a device can read: every program sums one block of memory, and nothing else moves.

out[p] = sum over i of x[p * BLOCK + i], in fp32
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from skote.kernels.launch import check_dtype, check_float, check_rank, check_tensors

BLOCK = 16384
"""Elements of a block: with 8 warps 64 a thread, all of which are on their way at once."""


def read_sum_reference(x: torch.Tensor, out: torch.Tensor, *, block: int = BLOCK) -> None:
    """The kernel in framework ops, `block` elements a program; arguments as `read_sum`."""
    out.copy_(x.view(-1, block).float().sum(1))


@triton.jit
def read_sum_kernel(x_ptr, out_ptr, BLOCK: tl.constexpr):
    """Grid: (elements / BLOCK,). `out` [programs] = the sum of each block, fp32."""
    program = tl.program_id(0)
    x = tl.load(x_ptr + program.to(tl.int64) * BLOCK + tl.arange(0, BLOCK), eviction_policy="evict_first")
    tl.store(out_ptr + program, tl.sum(x.to(tl.float32), axis=0))


def read_sum(x: torch.Tensor, out: torch.Tensor) -> None:
    """Launch the kernel: `x` of any shape and float dtype, whole blocks of `BLOCK` elements; `out` fp32 `[blocks]`.

    Raises:
        TypeError, ValueError: what the checks of `launch` refuse, or sizes that do not match.
    """
    check_tensors("read_sum", x=x, out=out)
    check_float("read_sum", x=x)
    check_dtype("read_sum", torch.float32, out=out)
    check_rank("read_sum", 1, out=out)
    if x.numel() != out.numel() * BLOCK:
        raise ValueError(f"read_sum: {x.numel()} elements are not {out.numel()} blocks of {BLOCK}.")
    read_sum_kernel[(out.numel(),)](x, out, BLOCK=BLOCK, num_warps=8)
