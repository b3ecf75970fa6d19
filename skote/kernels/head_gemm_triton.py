"""The vocabulary's logits for 16 rows, and the first stage of each row's maximum.

logits = W (x / sqrt(mean(x^2) + eps) * norm)
best[m, p] = max over the ids of program p of row m's logits, first[m, p] = the lowest id that has it
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from skote.kernels.launch import MAX_ROWS, GemmTile, check_matrix, check_rows, check_tensors
from skote.kernels.normed_rows_triton import ROWS, normed_rows_dot
from skote.kernels.rms_norm import rms_norm_reference


def head_gemm_reference(
    x: torch.Tensor, norm: torch.Tensor, weight: torch.Tensor, logits: torch.Tensor, *, eps: float
) -> None:
    """The logits in framework ops, fp32 inside; arguments as `head_gemm`."""
    logits.copy_(rms_norm_reference(x, norm, eps) @ weight.float().T)


@triton.jit
def head_gemm_kernel(
    x_ptr,
    norm_ptr,
    weight_ptr,
    logits_ptr,
    best_ptr,
    first_ptr,
    eps,
    vocab,
    HIDDEN: tl.constexpr,
    TILE: tl.constexpr,  # ids a program
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid: (ceil(vocab / TILE),). Everything after the wait: x, and all writes."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    ids = tl.program_id(0) * TILE + tl.arange(0, TILE)
    there = (ids < vocab)[None, :]
    rows = tl.arange(0, ROWS)
    logits = normed_rows_dot(x_ptr, norm_ptr, weight_ptr, tl.minimum(ids, vocab - 1), eps, HIDDEN, BLOCK, STAGES)
    tl.store(logits_ptr + rows[:, None] * vocab + ids[None, :], logits, mask=there)
    best = tl.max(tl.where(there, logits, float("-inf")), axis=1)
    first = tl.min(tl.where(there & (logits == best[:, None]), ids[None, :], vocab - 1), axis=1)
    places = rows * tl.num_programs(0) + tl.program_id(0)
    tl.store(best_ptr + places, best)
    tl.store(first_ptr + places, first)


def head_gemm(
    x: torch.Tensor,
    norm: torch.Tensor,
    weight: torch.Tensor,
    logits: torch.Tensor,
    best: torch.Tensor,
    first: torch.Tensor,
    *,
    eps: float,
    tile: GemmTile,
    pdl: bool,
) -> None:
    """Launch the kernel: `x` [16, hidden] fp32, `norm` [hidden], `weight` [vocab, hidden]; writes fp32 `logits`
    [16, vocab].

    `best` (fp32) and `first` (int32), `[16, ceil(vocab / tile.rows)]`, are written, an entry a program.

    Raises:
        TypeError, ValueError: what the checks of `launch` refuse, or a result of another shape.
    """
    check_tensors("head_gemm", x=x, norm=norm, weight=weight, logits=logits, best=best, first=first)
    check_rows("head_gemm", x=x, logits=logits, best=best, first=first)
    vocab, hidden = logits.shape[1], x.shape[1]
    check_matrix("head_gemm", weight, vocab, hidden)
    programs = triton.cdiv(vocab, tile.rows)
    if best.shape != (MAX_ROWS, programs) or first.shape != best.shape:
        raise ValueError(f"head_gemm: best and first must have {programs} entries a row, one a program.")
    head_gemm_kernel[(programs,)](
        x,
        norm,
        weight,
        logits,
        best,
        first,
        eps,
        vocab,
        HIDDEN=hidden,
        TILE=tile.rows,
        BLOCK=tile.columns(weight.dtype),
        STAGES=tile.stages,
        PDL=pdl,
        num_warps=tile.warps,
        launch_pdl=pdl,
    )
