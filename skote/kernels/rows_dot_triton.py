"""The product that a multi-row kernel begins with: rows of a matrix times all rows of x.

    P[m, n] = sum over c of x[m, c] * W[taken[n], c]

x is [ROWS, COLUMNS], ROWS one of `ROW_TILES`, and W [any, COLUMNS], both in fp32 (whole, not tf32), fp16 or bf16.
Offsets into the matrix have 64 bits.

Both stream through shared memory into the matrix instruction, the matrix as its first operand, whose rows it takes by
16 or 64. Sums are fp32. The columns come block after block: a row's sum has one order, whatever the other rows hold.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def rows_dot(
    x_ptr,  # [ROWS, COLUMNS], of the matrix's dtype
    weight_ptr,
    taken,  # [n]: the matrix's rows, all of them inside it
    split,  # which of SPLITS parts of the columns
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """P over one part of the columns, fp32 [ROWS, n]. All of it belongs after the wait."""
    PART: tl.constexpr = (COLUMNS + SPLITS * BLOCK - 1) // (SPLITS * BLOCK) * BLOCK
    EVEN: tl.constexpr = COLUMNS % BLOCK == 0
    columns = tl.arange(0, BLOCK)
    x_ptrs = x_ptr + tl.arange(0, ROWS)[:, None] * COLUMNS + columns[None, :]
    weight_ptrs = weight_ptr + taken.to(tl.int64)[:, None] * COLUMNS + columns[None, :]
    product = tl.zeros([taken.shape[0], ROWS], tl.float32)
    end = tl.minimum(split * PART + PART, COLUMNS)
    for start in tl.range(split * PART, end, BLOCK, num_stages=STAGES):
        if EVEN:
            weight = tl.load(weight_ptrs + start, eviction_policy="evict_first")
            x = tl.load(x_ptrs + start, eviction_policy="evict_last")
        else:
            inside = (columns < COLUMNS - start)[None, :]
            weight = tl.load(weight_ptrs + start, mask=inside, other=0.0, eviction_policy="evict_first")
            x = tl.load(x_ptrs + start, mask=inside, other=0.0, eviction_policy="evict_last")
        product = tl.dot(weight, tl.trans(x), product, input_precision="ieee")
    return tl.trans(product)


@triton.jit
def halves(product, ROWS: tl.constexpr):
    """The first and the second half of `product` [ROWS, 2 n]: [ROWS, n] each."""
    return tl.split(tl.trans(tl.reshape(product, [ROWS, 2, product.shape[1] // 2]), 0, 2, 1))
