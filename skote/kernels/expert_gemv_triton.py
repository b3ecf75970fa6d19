"""The chosen experts of a mixture, for one row: of all others no weight is read.

    p = softmax(logits);   e_0 .. e_(k-1) = the k experts with the highest p, of equal ones the lowest first
    h_j = act(W_gate[e_j] n) * (W_up[e_j] n),   n = x / sqrt(mean(x^2) + eps) * norm
    x += sum over j of s_j W_down[e_j] h_j,   s_j = p(e_j), or p(e_j) over the sum of all k of them

The logits are those of a matrix-vector kernel (`head_gemv`). Each program of the first kernel finds its own expert by
them; the second kernel takes the numbers and shares that the first one leaves.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, attr-defined"

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from skote.kernels.activation import activated as activated_reference
from skote.kernels.activation_triton import activated, check_activation
from skote.kernels.experts import chosen_experts
from skote.kernels.launch import (
    Tile,
    check_columns,
    check_dtype,
    check_float,
    check_norm,
    check_offsets,
    check_operand,
    check_rank,
    check_shape,
    check_tensors,
    check_turns,
    padded,
)
from skote.kernels.rms_norm import rms_norm_reference
from skote.kernels.row_dot_triton import norm_chunks, normed_chunks, row_chunks, row_dot, weight_chunks

MAX_EXPERTS = 1024
MAX_CHOSEN = 16


def expert_up_gemv_reference(
    x: torch.Tensor,
    norm: torch.Tensor,
    weight: torch.Tensor,
    logits: torch.Tensor,
    h: torch.Tensor,
    chosen: torch.Tensor,
    share: torch.Tensor,
    *,
    eps: float,
    normalised: bool,
    activation: str = "silu",
) -> None:
    """The same in framework ops, fp32 inside; arguments as `expert_up_gemv`."""
    picked, shares = chosen_experts(logits, len(h), normalised=normalised)
    chosen.copy_(picked)
    share.copy_(shares)
    both = (weight[picked].float() * rms_norm_reference(x, norm, eps)).sum(-1)
    h.copy_(activated_reference(both, activation, gated=True))


def expert_down_gemv_reference(
    x: torch.Tensor, h: torch.Tensor, weight: torch.Tensor, chosen: torch.Tensor, share: torch.Tensor
) -> None:
    """The same in framework ops, fp32 inside; arguments as `expert_down_gemv`."""
    products = (weight[chosen.long()].float() * h.float()[:, None]).sum(-1)
    x += (products * share[:, None]).sum(0)


@triton.jit
def expert_up_gemv_kernel(
    x_ptr,
    norm_ptr,
    weight_ptr,
    logits_ptr,
    h_ptr,
    chosen_ptr,
    share_ptr,
    eps,
    HIDDEN: tl.constexpr,
    INTERMEDIATE: tl.constexpr,
    EXPERTS: tl.constexpr,
    ALL: tl.constexpr,  # a power of two, at least EXPERTS
    CHOSEN: tl.constexpr,
    NORMALISED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    CHUNK: tl.constexpr,  # columns at once: a piece of 16 bytes for every thread
    ROWS: tl.constexpr,  # of each matrix
    MMA: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid: (INTERMEDIATE / ROWS, CHOSEN). Before the wait: the norm. After it: the choice, and what it chooses."""
    if PDL:
        gdc_launch_dependents()
    slot = tl.program_id(1)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    experts = tl.arange(0, ALL)
    norm = norm_chunks(norm_ptr, HIDDEN, CHUNK)
    if PDL:
        gdc_wait()
    logits = tl.load(logits_ptr + experts, mask=experts < EXPERTS, other=float("-inf"), eviction_policy="evict_last")
    x = row_chunks(x_ptr, HIDDEN, CHUNK)
    top = tl.max(logits, axis=0)
    left = logits
    total = 0.0
    expert = 0
    share = 0.0
    for each in tl.static_range(CHOSEN):
        best = tl.max(left, axis=0)
        which = tl.min(tl.where(left == best, experts, EXPERTS - 1), axis=0)
        likely = tl.exp(best - top)
        total += likely
        expert = tl.where(slot == each, which, expert)
        share = tl.where(slot == each, likely, share)
        left = tl.where(experts == which, float("-inf"), left)
    if not NORMALISED:
        total = tl.sum(tl.exp(logits - top), axis=0)
    own = weight_ptr + expert.to(tl.int64) * (2 * INTERMEDIATE * HIDDEN)
    gate = weight_chunks(own, rows, HIDDEN, CHUNK)
    up = weight_chunks(own + INTERMEDIATE * HIDDEN, rows, HIDDEN, CHUNK)
    normed, rest, scale = normed_chunks(x, norm, eps, HIDDEN, MMA)
    h = activated(row_dot(gate, normed, rest, MMA) * scale, ACTIVATION) * (row_dot(up, normed, rest, MMA) * scale)
    tl.store(h_ptr + slot * INTERMEDIATE + rows, h.to(h_ptr.dtype.element_ty))
    first = tl.program_id(0) == 0
    tl.store(chosen_ptr + slot, expert, mask=first)
    tl.store(share_ptr + slot, share / total, mask=first)


@triton.jit
def expert_down_gemv_kernel(
    x_ptr,
    h_ptr,
    weight_ptr,
    chosen_ptr,
    share_ptr,
    outputs,  # rows of a matrix
    COLUMNS: tl.constexpr,
    CHOSEN: tl.constexpr,
    SLOTS: tl.constexpr,  # a power of two, at least CHOSEN
    CHUNK: tl.constexpr,  # columns at once
    ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid: (outputs / ROWS,). Everything after the wait: which experts, their weights, h, and x, which is changed."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    slots = tl.arange(0, SLOTS)
    columns = tl.arange(0, CHUNK)
    there = slots < CHOSEN
    expert = tl.load(chosen_ptr + slots, mask=there, other=0, eviction_policy="evict_last").to(tl.int64)
    share = tl.load(share_ptr + slots, mask=there, other=0.0, eviction_policy="evict_last")
    own = weight_ptr + (expert[:, None] * outputs + rows[None, :])[:, :, None] * COLUMNS
    sums = tl.zeros([SLOTS, ROWS, CHUNK], tl.float32)
    for start in tl.static_range(0, COLUMNS, CHUNK):
        inside = there[:, None, None] & (columns < COLUMNS - start)[None, None, :]
        weight = tl.load(own + (columns + start)[None, None, :], mask=inside, other=0.0, eviction_policy="evict_first")
        h = tl.load(
            h_ptr + slots[:, None, None] * COLUMNS + (columns + start)[None, None, :],
            mask=inside,
            other=0.0,
            eviction_policy="evict_last",
        )
        sums += weight.to(tl.float32) * h.to(tl.float32)
    product = tl.sum(tl.sum(sums, axis=2) * share[:, None], axis=0)
    x = tl.load(x_ptr + rows, eviction_policy="evict_last")
    tl.store(x_ptr + rows, x + product)


def expert_up_gemv(
    x: torch.Tensor,
    norm: torch.Tensor,
    weight: torch.Tensor,
    logits: torch.Tensor,
    h: torch.Tensor,
    chosen: torch.Tensor,
    share: torch.Tensor,
    *,
    eps: float,
    normalised: bool,
    tile: Tile,
    pdl: bool,
    activation: str = "silu",
) -> None:
    """Launch the kernel.

    Args:
        x: `[hidden]`, fp32; `hidden` is at most `MAX_COLUMNS`.
        norm, weight: `[hidden]` and `[experts, 2 * intermediate, hidden]`, gate first, in any float dtype.
        logits: `[experts]`, fp32.
        h: `[chosen, intermediate]`, in any float dtype, written.
        chosen, share: `[chosen]`, int32 and fp32, written: the experts, likeliest first, and what each counts.
        normalised: shares are divided by their sum.
        tile: `rows` counts the rows of gate and up together; there is one turn.
        activation: one of `ACTIVATIONS`.

    Raises:
        TypeError, ValueError: what the checks of `launch` refuse, or too many experts.
    """
    op = "expert_up_gemv"
    check_tensors(op, x=x, norm=norm, weight=weight, logits=logits, h=h, chosen=chosen, share=share)
    check_rank(op, 1, x=x, logits=logits)
    check_rank(op, 2, h=h)
    (count, intermediate), hidden, experts = h.shape, x.shape[0], logits.shape[0]
    rows = 2 * intermediate
    check_dtype(op, torch.float32, x=x, logits=logits)
    check_norm(op, hidden, norm=norm)
    check_float(op, weight=weight, h=h)
    check_columns(op, hidden)
    check_shape(op, (experts, rows, hidden), weight=weight)
    check_offsets(op, **{"an expert's matrix": rows * hidden})
    check_activation(op, activation)
    _check_choice(op, experts, count, chosen=chosen, share=share)
    check_turns(op, tile._replace(turns=1), rows, weight, hidden)
    expert_up_gemv_kernel[(rows // tile.rows, count)](
        x,
        norm,
        weight,
        logits,
        h,
        chosen,
        share,
        eps,
        HIDDEN=hidden,
        INTERMEDIATE=intermediate,
        EXPERTS=experts,
        ALL=padded(experts),
        CHOSEN=count,
        NORMALISED=normalised,
        ACTIVATION=activation,
        CHUNK=tile.chunk(weight.dtype),
        ROWS=tile.rows // 2,
        MMA=tile.mma,
        PDL=pdl,
        num_warps=tile.warps,
        launch_pdl=pdl,
    )


def expert_down_gemv(
    x: torch.Tensor, h: torch.Tensor, weight: torch.Tensor, chosen: torch.Tensor, share: torch.Tensor, *, pdl: bool
) -> None:
    """Launch the kernel.

    Args:
        x: `[hidden]`, fp32, in place.
        h: `[chosen, intermediate]`, in the weight's dtype.
        weight: `[experts, hidden, intermediate]`, in any float dtype; `intermediate` is at most `MAX_COLUMNS`.
        chosen, share: as `expert_up_gemv` leaves them.

    Raises:
        TypeError, ValueError: what the checks of `launch` refuse, or too many experts.
    """
    op = "expert_down_gemv"
    check_tensors(op, x=x, h=h, weight=weight, chosen=chosen, share=share)
    check_rank(op, 1, x=x)
    check_rank(op, 2, h=h)
    check_rank(op, 3, weight=weight)
    (count, columns), outputs, experts = h.shape, x.shape[0], weight.shape[0]
    check_dtype(op, torch.float32, x=x)
    check_float(op, weight=weight)
    check_operand(op, weight, h=h)
    check_columns(op, columns)
    check_shape(op, (experts, outputs, columns), weight=weight)
    _check_choice(op, experts, count, chosen=chosen, share=share)
    chunk, rows, warps = down_tile(columns, padded(count), outputs)
    expert_down_gemv_kernel[(outputs // rows,)](
        x,
        h,
        weight,
        chosen,
        share,
        outputs,
        COLUMNS=columns,
        CHOSEN=count,
        SLOTS=padded(count),
        CHUNK=chunk,
        ROWS=rows,
        PDL=pdl,
        num_warps=warps,
        launch_pdl=pdl,
    )


def up_tile(tile: Tile, dtype: torch.dtype) -> Tile:
    """The tile of `expert_up_gemv` by that of `gate_up_gemv`: one turn, and in fp32 half as many rows."""
    return tile._replace(rows=tile.rows // 2 if dtype == torch.float32 and tile.rows > 2 else tile.rows, turns=1)


def down_tile(columns: int, slots: int, outputs: int) -> tuple[int, int, int]:
    """(columns at once, rows a program, warps) of `expert_down_gemv_kernel`: chunks that fill a row evenly, two rows
    where the experts' parts of one are short. Not measured yet."""
    chunk = max(math.gcd(columns, 1024), 64)
    return chunk, 2 if outputs % 2 == 0 and slots * columns <= 8192 else 1, 4


def _check_choice(op: str, experts: int, count: int, *, chosen: torch.Tensor, share: torch.Tensor) -> None:
    if not 1 <= count <= min(experts, MAX_CHOSEN) or experts > MAX_EXPERTS:
        raise ValueError(
            f"{op}: {count} of {experts} experts; the kernel takes up to {MAX_CHOSEN} of at most {MAX_EXPERTS}."
        )
    check_dtype(op, torch.int32, chosen=chosen)
    check_dtype(op, torch.float32, share=share)
    check_shape(op, (count,), chosen=chosen, share=share)
