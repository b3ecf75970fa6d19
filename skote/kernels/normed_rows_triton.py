"""The product that a multi-row step's projections begin with: 16 rows, normalised, times rows of a matrix.

    P[m, r] = sum over c of W[r, c] * norm[c] * x[m, c] / sqrt(mean(x[m]^2) + eps)

What enters the product is rounded to the weights' dtype, sums are fp32. The 16 rows are the left operand of one matrix
instruction, the columns come block after block: a row's sum has one order, whatever the other rows hold.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from skote.kernels.launch import MAX_ROWS

ROWS = tl.constexpr(MAX_ROWS)


@triton.jit
def normed_rows_dot(
    x_ptr,  # [16, HIDDEN], fp32
    norm_ptr,
    weight_ptr,
    taken,  # [n]: the matrix's rows, all of them inside it
    eps,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """P, fp32 [16, n]. All of it belongs after the wait.

    The norm's scale is one number a row and is applied to the sums, so that x is read once. In fp16, which ends at
    65,504, x * norm may be too large without it: there it is found first.
    """
    SCALED_FIRST: tl.constexpr = weight_ptr.dtype.element_ty == tl.float16
    columns = tl.arange(0, BLOCK)
    x_ptrs = x_ptr + tl.arange(0, ROWS)[:, None] * HIDDEN + columns[None, :]
    weight_ptrs = weight_ptr + taken.to(tl.int64)[:, None] * HIDDEN + columns[None, :]
    squares = tl.zeros([ROWS, BLOCK], tl.float32)
    if SCALED_FIRST:
        for start in range(0, HIDDEN, BLOCK):
            inside = (columns < HIDDEN - start)[None, :]
            x = tl.load(x_ptrs + start, mask=inside, other=0.0, eviction_policy="evict_last")
            squares += x * x
    scale = tl.rsqrt(tl.sum(squares, axis=1) / HIDDEN + eps)
    product = tl.zeros([ROWS, taken.shape[0]], tl.float32)
    for start in tl.range(0, HIDDEN, BLOCK, num_stages=STAGES):
        inside = columns < HIDDEN - start
        weight = tl.load(weight_ptrs + start, mask=inside[None, :], other=0.0, eviction_policy="evict_first")
        x = tl.load(x_ptrs + start, mask=inside[None, :], other=0.0, eviction_policy="evict_last")
        norm = tl.load(norm_ptr + start + columns, mask=inside, other=0.0)
        if SCALED_FIRST:
            x *= scale[:, None]
        else:
            squares += x * x
        normed = (x * norm.to(tl.float32)[None, :]).to(weight.dtype)
        product = tl.dot(normed, tl.trans(weight), product, input_precision="ieee")
    if not SCALED_FIRST:
        product *= tl.rsqrt(tl.sum(squares, axis=1) / HIDDEN + eps)[:, None]
    return product


@triton.jit
def halves(product):
    """The first and the second half of `product` [16, 2 n]: [16, n] each."""
    return tl.split(tl.trans(tl.reshape(product, [ROWS, 2, product.shape[1] // 2]), 0, 2, 1))
