"""The chosen experts of a mixture, for many rows: each expert's matrix times the rows that chose it.

    out[i] = act(W_gate[e] x[r]) * (W_up[e] x[r])   or   out[i] = W[e] x[i]        for pair i of row r and an expert e

A pair is a row and one of the `k` experts that it chose: pair i is of row i // k. `grouped` sorts the pairs by expert
and cuts them into blocks, each of one expert, so that a program reads one expert's weights for a block of its rows. A
pair's sum has one order, whatever its block holds else.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from skote.kernels.activation import activated as activated_reference
from skote.kernels.activation_triton import activated, check_activation
from skote.kernels.launch import (
    check_columns,
    check_dtype,
    check_float,
    check_offsets,
    check_operand,
    check_rank,
    check_shape,
    check_tensors,
)


class Groups(NamedTuple):
    """Pairs by expert: `order` int32 [pairs]; of each block of `rows` pairs its `expert` (-1: the block is empty), and
    the `first` of its places in `order` and the one after its last, `end`: int32 `[blocks]`."""

    order: torch.Tensor
    expert: torch.Tensor
    first: torch.Tensor
    end: torch.Tensor
    rows: int


def grouped(chosen: torch.Tensor, experts: int, rows: int) -> Groups:
    """The groups of `chosen` [tokens, k], in blocks of up to `rows` pairs. Nothing of it waits for the device."""
    flat = chosen.flatten()
    numbers = torch.arange(experts, device=flat.device)
    counts = (flat[:, None] == numbers).sum(0)
    blocks = (counts + rows - 1) // rows
    ends, block_ends = counts.cumsum(0), blocks.cumsum(0)
    block = torch.arange(min(len(flat), len(flat) // rows + experts), device=flat.device)
    expert = torch.searchsorted(block_ends, block, right=True)
    there, own = expert < experts, expert.clamp(max=experts - 1)
    first = ends[own] - counts[own] + (block - block_ends[own] + blocks[own]) * rows
    order, expert, first, end = (
        each.to(torch.int32) for each in (flat.argsort(stable=True), torch.where(there, own, -1), first, ends[own])
    )
    return Groups(order, expert, first, end, rows)


def expert_gemm_reference(
    x: torch.Tensor, weight: torch.Tensor, chosen: torch.Tensor, *, activation: str | None = None
) -> torch.Tensor:
    """The formula in framework ops, fp32: `[pairs, outputs]`; `x` has a row a token, or one a pair."""
    rows = x.float().repeat_interleave(chosen.numel() // len(x), 0)
    products = (weight[chosen.flatten().long()].float() * rows[:, None]).sum(-1)
    return products if activation is None else activated_reference(products, activation, gated=True)


@triton.jit
def expert_gemm_kernel(
    rows_ptr,
    weight_ptr,
    out_ptr,
    order_ptr,
    expert_ptr,
    first_ptr,
    end_ptr,
    outputs,
    SHARED: tl.constexpr,  # pairs that share a row of x
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,  # outputs a program
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    ACTIVATION: tl.constexpr,  # of a gate, which `outputs` more rows of the matrix follow; "" is none
):
    """Grid: (blocks, ceil(outputs / TILE))."""
    block = tl.program_id(0)
    expert = tl.load(expert_ptr + block).to(tl.int64)
    if expert >= 0:
        places = tl.load(first_ptr + block) + tl.arange(0, ROWS)
        there = places < tl.load(end_ptr + block)
        pair = tl.load(order_ptr + places, mask=there, other=0).to(tl.int64)
        taken = tl.program_id(1) * TILE + tl.arange(0, TILE)
        inside = tl.minimum(taken, outputs - 1)
        columns = tl.arange(0, BLOCK)
        own = weight_ptr + expert * outputs * COLUMNS * (2 if ACTIVATION != "" else 1)
        x_ptrs = rows_ptr + (pair // SHARED)[:, None] * COLUMNS + columns[None, :]
        weight_ptrs = own + inside[:, None] * COLUMNS + columns[None, :]
        product = tl.zeros([ROWS, TILE], tl.float32)
        second = tl.zeros([ROWS, TILE], tl.float32)
        for start in tl.range(0, COLUMNS, BLOCK, num_stages=STAGES):
            within = (columns < COLUMNS - start)[None, :]
            x = tl.load(x_ptrs + start, mask=there[:, None] & within, other=0.0)
            weight = tl.load(weight_ptrs + start, mask=within, other=0.0)
            product = tl.dot(x, tl.trans(weight), product, input_precision="ieee")
            if ACTIVATION != "":
                up = tl.load(weight_ptrs + outputs * COLUMNS + start, mask=within, other=0.0)
                second = tl.dot(x, tl.trans(up), second, input_precision="ieee")
        if ACTIVATION != "":
            product = activated(product, ACTIVATION) * second
        out_ptrs = out_ptr + pair[:, None] * outputs + taken[None, :]
        tl.store(out_ptrs, product.to(out_ptr.dtype.element_ty), mask=there[:, None] & (taken < outputs)[None, :])


def expert_gemm(
    x: torch.Tensor,
    weight: torch.Tensor,
    groups: Groups,
    *,
    out_dtype: torch.dtype,
    activation: str | None = None,
) -> torch.Tensor:
    """Launch the kernel.

    Args:
        x: `[tokens or pairs, columns]`, in the weight's dtype.
        weight: `[experts, outputs, columns]`, or with an `activation` `[experts, 2 * outputs, columns]`, gate first.
        groups: of as many pairs as `x` has rows, or a multiple of them.
        out_dtype: a float dtype.
        activation: one of `ACTIVATIONS`, or None.

    Returns:
        `[pairs, outputs]`, of `out_dtype`.

    Raises:
        TypeError, ValueError: what the checks of `launch` refuse, or rows that do not match the pairs.
    """
    op = "expert_gemm"
    blocks = {"expert": groups.expert, "first": groups.first, "end": groups.end}
    check_tensors(op, x=x, weight=weight, order=groups.order, **blocks)
    check_rank(op, 2, x=x)
    check_rank(op, 3, weight=weight)
    check_rank(op, 1, order=groups.order, **blocks)
    _, rows, columns = weight.shape
    check_float(op, weight=weight)
    check_operand(op, weight, x=x)
    check_columns(op, columns)
    check_shape(op, (len(x), columns), x=x)
    check_offsets(op, **{"an expert's matrix": rows * columns})
    check_dtype(op, torch.int32, order=groups.order, **blocks)
    check_shape(op, tuple(groups.expert.shape), first=groups.first, end=groups.end)
    pairs = len(groups.order)
    if len(x) == 0 or pairs % len(x):
        raise ValueError(f"{op}: {pairs} pairs are not a multiple of the {len(x)} rows of x.")
    if activation is not None:
        check_activation(op, activation)
        if rows % 2:
            raise ValueError(f"{op}: {rows} rows of an expert's matrix are not gate and up of one length.")
    outputs = rows if activation is None else rows // 2
    out = torch.empty(pairs, outputs, dtype=out_dtype, device=x.device)
    check_float(op, out=out)
    tile, block, stages = gemm_tile(weight.dtype)
    expert_gemm_kernel[(len(groups.expert), triton.cdiv(outputs, tile))](
        x,
        weight,
        out,
        *groups[:4],
        outputs,
        SHARED=pairs // len(x),
        COLUMNS=columns,
        ROWS=groups.rows,
        TILE=tile,
        BLOCK=block,
        STAGES=stages,
        ACTIVATION=activation or "",
        num_warps=4,
    )
    return out


def block_rows(pairs: int, experts: int, dtype: torch.dtype) -> int:
    """Pairs a block where `pairs` are spread evenly over `experts`: a block reads its expert's weights once. In fp32,
    whose products take no tensor cores, blocks stay small. Not measured yet."""
    if dtype == torch.float32 or pairs < 32 * experts:
        return 16
    return 64 if pairs < 128 * experts else 128


def gemm_tile(dtype: torch.dtype) -> tuple[int, int, int]:
    """(outputs a program, columns at once, stages). Not measured yet."""
    return (32, 32, 2) if dtype == torch.float32 else (64, 64, 3)
