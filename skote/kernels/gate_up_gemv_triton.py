"""The first half of a gated MLP, for one row: RMSNorm, gate and up projections, SwiGLU (Shazeer, arXiv 2002.05202).

    n = x / sqrt(mean(x^2) + eps) * norm;   h = silu(W_gate n) * (W_up n)

The gate's activation is silu or another one. What is owed to x is added first (see `Owed`).

A program takes the same rows of both matrices, some rows after another, for which it reads and norms x once. The norm's
scale is applied to the products, as in `qkv_gemv`.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from skote.kernels.activation import activated as activated_reference
from skote.kernels.activation_triton import activated, check_activation
from skote.kernels.launch import (
    Tile,
    check_dtype,
    check_float,
    check_matrix,
    check_norm,
    check_offsets,
    check_rank,
    check_tensors,
    check_turns,
)
from skote.kernels.owed_triton import Owed, owed_arguments, paid, paid_chunks
from skote.kernels.rms_norm import rms_norm_reference
from skote.kernels.row_dot_triton import norm_chunks, normed_chunks, row_chunks, row_dot, weight_chunks


def gate_up_gemv_reference(
    x: torch.Tensor,
    norm: torch.Tensor,
    weight: torch.Tensor,
    h: torch.Tensor,
    *,
    eps: float,
    activation: str = "silu",
    owed: Owed | None = None,
) -> None:
    """The same in framework ops, fp32 inside; arguments as `gate_up_gemv`."""
    both = (weight.float() * rms_norm_reference(paid(x, owed, eps), norm, eps)).sum(-1)
    h.copy_(activated_reference(both, activation, gated=True))


@triton.jit
def gate_up_gemv_kernel(
    x_ptr,
    norm_ptr,
    weight_ptr,
    h_ptr,
    eps,
    HIDDEN: tl.constexpr,
    INTERMEDIATE: tl.constexpr,
    CHUNK: tl.constexpr,  # columns at once: a piece of 16 bytes for every thread
    ROWS: tl.constexpr,  # of each matrix at once
    TURNS: tl.constexpr,
    MMA: tl.constexpr,
    PDL: tl.constexpr,
    ACTIVATION: tl.constexpr = "silu",
    owed_ptr=None,
    post_ptr=None,
    kept_ptr=None,
):
    """Grid: (INTERMEDIATE / (ROWS * TURNS),). Before the wait: weights. After it: x, and the write of h."""
    if PDL:
        gdc_launch_dependents()
    rows = tl.program_id(0) * (ROWS * TURNS) + tl.arange(0, ROWS)
    gate = weight_chunks(weight_ptr, rows, HIDDEN, CHUNK)
    up = weight_chunks(weight_ptr + INTERMEDIATE * HIDDEN, rows, HIDDEN, CHUNK)
    norm = norm_chunks(norm_ptr, HIDDEN, CHUNK)
    if PDL:
        gdc_wait()
    x = row_chunks(x_ptr, HIDDEN, CHUNK)
    if owed_ptr is not None:
        x = paid_chunks(x, owed_ptr, post_ptr, kept_ptr, eps, HIDDEN, CHUNK)
    normed, rest, scale = normed_chunks(x, norm, eps, HIDDEN, MMA)
    for turn in tl.static_range(TURNS):
        gate_now, up_now = gate, up
        if turn + 1 < TURNS:  # the next rows are on their way while these are multiplied
            gate = weight_chunks(weight_ptr, rows + (turn + 1) * ROWS, HIDDEN, CHUNK)
            up = weight_chunks(weight_ptr + INTERMEDIATE * HIDDEN, rows + (turn + 1) * ROWS, HIDDEN, CHUNK)
        gated = row_dot(gate_now, normed, rest, MMA) * scale
        h = activated(gated, ACTIVATION) * (row_dot(up_now, normed, rest, MMA) * scale)
        tl.store(h_ptr + rows + turn * ROWS, h.to(h_ptr.dtype.element_ty))


def gate_up_gemv(
    x: torch.Tensor,
    norm: torch.Tensor,
    weight: torch.Tensor,
    h: torch.Tensor,
    *,
    eps: float,
    tile: Tile,
    pdl: bool,
    activation: str = "silu",
    owed: Owed | None = None,
) -> None:
    """Launch the kernel.

    Args:
        x: `[hidden]`, fp32; `hidden` is at most `MAX_COLUMNS`.
        norm, weight: `[hidden]` and `[2 * intermediate, hidden]`, gate first, in any float dtype.
        h: `[intermediate]`, in any float dtype, written.
        tile: `rows` counts the rows of gate and up together.
        activation: one of `ACTIVATIONS`.
        owed: what `x` lacks, or None.

    Raises:
        TypeError, ValueError: what the checks of `launch` refuse.
    """
    check_tensors("gate_up_gemv", x=x, norm=norm, weight=weight, h=h)
    check_rank("gate_up_gemv", 1, x=x, h=h)
    hidden, intermediate = x.shape[0], h.shape[0]
    check_dtype("gate_up_gemv", torch.float32, x=x)
    check_float("gate_up_gemv", h=h)
    check_norm("gate_up_gemv", hidden, norm=norm)
    check_matrix("gate_up_gemv", weight, 2 * intermediate, hidden)
    check_offsets("gate_up_gemv", weight=weight.numel())
    check_turns("gate_up_gemv", tile, 2 * intermediate, weight, hidden)
    check_activation("gate_up_gemv", activation)
    gate_up_gemv_kernel[(2 * intermediate // (tile.rows * tile.turns),)](
        x,
        norm,
        weight,
        h,
        eps,
        HIDDEN=hidden,
        INTERMEDIATE=intermediate,
        CHUNK=tile.chunk(weight.dtype),
        ROWS=tile.rows // 2,
        TURNS=tile.turns,
        MMA=tile.mma,
        PDL=pdl,
        ACTIVATION=activation,
        **owed_arguments("gate_up_gemv", owed, x),
        num_warps=tile.warps,
        launch_pdl=pdl,
    )
