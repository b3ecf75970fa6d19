"""The vocabulary's logits for one row, and the first stage of their maximum.

logits = W (x / sqrt(mean(x^2) + eps) * norm);   best[p] = max over the rows of program p, first[p] = its lowest id

With a soft cap c the logits are c tanh(logits / c). What is owed to x is added first (see `Owed`).
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from skote.kernels.activation_triton import cap_argument, capped
from skote.kernels.attention import capped as capped_reference
from skote.kernels.launch import (
    Tile,
    check_best,
    check_dtype,
    check_matrix,
    check_norm,
    check_rank,
    check_tensors,
    padded,
)
from skote.kernels.owed_triton import Owed, owed_arguments, paid, paid_row
from skote.kernels.rms_norm import rms_norm_reference


def head_gemv_reference(
    x: torch.Tensor,
    norm: torch.Tensor,
    weight: torch.Tensor,
    logits: torch.Tensor,
    *,
    eps: float,
    softcap: float | None = None,
    owed: Owed | None = None,
) -> None:
    """The logits in framework ops, fp32 inside; arguments as `head_gemv`."""
    product = (weight.float() * rms_norm_reference(paid(x, owed, eps), norm, eps)).sum(-1)
    logits.copy_(capped_reference(product, softcap))


@triton.jit
def head_gemv_kernel(
    x_ptr,
    norm_ptr,
    weight_ptr,
    logits_ptr,
    best_ptr,
    first_ptr,
    eps,
    vocab,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,  # a power of two, at least HIDDEN
    ROWS: tl.constexpr,
    PDL: tl.constexpr,
    CAP: tl.constexpr = 0.0,  # of the logits; 0 is none
    owed_ptr=None,
    post_ptr=None,
    kept_ptr=None,
):
    """Grid: (ceil(vocab / ROWS),). Before the wait: weights. After it: x, and all writes."""
    if PDL:
        gdc_launch_dependents()
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    there = rows < vocab
    columns = tl.arange(0, BLOCK)
    inside = columns < HIDDEN
    weight = tl.load(
        weight_ptr + rows.to(tl.int64)[:, None] * HIDDEN + columns[None, :],
        mask=there[:, None] & inside[None, :],
        other=0.0,
        eviction_policy="evict_first",
    )
    norm = tl.load(norm_ptr + columns, mask=inside, other=0.0)
    if PDL:
        gdc_wait()
    x = tl.load(x_ptr + columns, mask=inside, other=0.0, eviction_policy="evict_last")
    if owed_ptr is not None:
        x = paid_row(x, owed_ptr, post_ptr, kept_ptr, eps, columns, inside, HIDDEN)
    scale = tl.rsqrt(tl.sum(x * x, axis=0) / HIDDEN + eps)
    normed = x * norm.to(tl.float32)
    logits = capped(tl.sum(weight.to(tl.float32) * normed[None, :], axis=1) * scale, CAP)
    tl.store(logits_ptr + rows, logits, mask=there)
    best = tl.max(tl.where(there, logits, float("-inf")), axis=0)
    first = tl.min(tl.where(there & (logits == best), rows, vocab - 1), axis=0)
    tl.store(best_ptr + tl.program_id(0), best)
    tl.store(first_ptr + tl.program_id(0), first)


def head_gemv(
    x: torch.Tensor,
    norm: torch.Tensor,
    weight: torch.Tensor,
    logits: torch.Tensor,
    best: torch.Tensor,
    first: torch.Tensor,
    *,
    eps: float,
    tile: Tile,
    pdl: bool,
    softcap: float | None = None,
    owed: Owed | None = None,
) -> None:
    """Launch the kernel.

    Args:
        x: `[hidden]`, fp32; `hidden` is at most `MAX_COLUMNS`.
        norm, weight: `[hidden]` and `[vocab, hidden]`, in any float dtype.
        logits: `[vocab]`, fp32, written.
        best, first: fp32 and int32 `[ceil(vocab / tile.rows)]`, an entry a program, written.
        softcap: of the logits; None is none.
        owed: what `x` lacks, or None.

    Raises:
        TypeError, ValueError: what the checks of `launch` refuse, or a soft cap that is not above 0.
    """
    check_tensors("head_gemv", x=x, norm=norm, weight=weight, logits=logits, best=best, first=first)
    check_rank("head_gemv", 1, x=x, logits=logits)
    vocab, hidden = logits.shape[0], x.shape[0]
    check_dtype("head_gemv", torch.float32, x=x, logits=logits)
    check_norm("head_gemv", hidden, norm=norm)
    check_matrix("head_gemv", weight, vocab, hidden)
    programs = triton.cdiv(vocab, tile.rows)
    check_best("head_gemv", (programs,), best=best, first=first)
    head_gemv_kernel[(programs,)](
        x,
        norm,
        weight,
        logits,
        best,
        first,
        eps,
        vocab,
        HIDDEN=hidden,
        BLOCK=padded(hidden),
        ROWS=tile.rows,
        PDL=pdl,
        CAP=cap_argument("head_gemv", softcap),
        **owed_arguments("head_gemv", owed, x),
        num_warps=tile.warps,
        launch_pdl=pdl,
    )
