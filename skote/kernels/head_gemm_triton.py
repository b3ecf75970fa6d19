"""The vocabulary's logits for 16 to 128 rows, and the first stage of each row's maximum.

logits = W n
best[m, p] = max over the ids of program p of row m's logits, first[m, p] = the lowest id that has it

n is normalised already (`add_rms_norm`). With a soft cap c the logits are c tanh(logits / c).
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
    GemmTile,
    check_best,
    check_dtype,
    check_matrix,
    check_operand,
    check_rank,
    check_rows,
    check_tensors,
    check_unsplit,
)
from skote.kernels.rows_dot_triton import rows_dot


def head_gemm_reference(
    normed: torch.Tensor, weight: torch.Tensor, logits: torch.Tensor, *, softcap: float | None = None
) -> None:
    """The logits in framework ops, fp32 inside; arguments as `head_gemm`."""
    logits.copy_(capped_reference(normed.float() @ weight.float().T, softcap))


@triton.jit
def head_gemm_kernel(
    normed_ptr,
    weight_ptr,
    logits_ptr,
    best_ptr,
    first_ptr,
    vocab,
    HIDDEN: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,  # ids a program
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
    CAP: tl.constexpr = 0.0,  # of the logits; 0 is none
):
    """Grid: (ceil(vocab / TILE),). Everything after the wait: normed, and all writes."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    ids = tl.program_id(0) * TILE + tl.arange(0, TILE)
    there = (ids < vocab)[None, :]
    rows = tl.arange(0, ROWS)
    logits = rows_dot(normed_ptr, weight_ptr, tl.minimum(ids, vocab - 1), 0, HIDDEN, ROWS, BLOCK, STAGES, 1)
    logits = capped(logits, CAP)
    tl.store(logits_ptr + rows[:, None] * vocab + ids[None, :], logits, mask=there)
    best = tl.max(tl.where(there, logits, float("-inf")), axis=1)
    first = tl.min(tl.where(there & (logits == best[:, None]), ids[None, :], vocab - 1), axis=1)
    places = rows * tl.num_programs(0) + tl.program_id(0)
    tl.store(best_ptr + places, best)
    tl.store(first_ptr + places, first)


def head_gemm(
    normed: torch.Tensor,
    weight: torch.Tensor,
    logits: torch.Tensor,
    best: torch.Tensor,
    first: torch.Tensor,
    *,
    tile: GemmTile,
    pdl: bool,
    softcap: float | None = None,
) -> None:
    """Launch the kernel.

    Args:
        normed: `[rows, hidden]`, in the weight's dtype, `rows` one of `ROW_TILES`.
        weight: `[vocab, hidden]`, in any float dtype; `hidden` is at most `MAX_COLUMNS`.
        logits: `[rows, vocab]`, fp32, written.
        best, first: fp32 and int32 `[rows, ceil(vocab / tile.rows)]`, an entry a program, written.
        tile: `splits` must be 1.
        softcap: of the logits; None is none.

    Raises:
        TypeError, ValueError: what the checks of `launch` refuse, or a soft cap that is not above 0.
    """
    check_tensors("head_gemm", normed=normed, weight=weight, logits=logits, best=best, first=first)
    check_rank("head_gemm", 2, normed=normed, logits=logits)
    (rows, hidden), vocab = normed.shape, logits.shape[1]
    check_rows("head_gemm", rows, logits=logits)
    check_dtype("head_gemm", torch.float32, logits=logits)
    check_matrix("head_gemm", weight, vocab, hidden)
    check_operand("head_gemm", weight, normed=normed)
    check_unsplit("head_gemm", tile)
    programs = triton.cdiv(vocab, tile.rows)
    check_best("head_gemm", (rows, programs), best=best, first=first)
    head_gemm_kernel[(programs,)](
        normed,
        weight,
        logits,
        best,
        first,
        vocab,
        HIDDEN=hidden,
        ROWS=rows,
        TILE=tile.rows,
        BLOCK=tile.columns(weight.dtype),
        STAGES=tile.stages,
        PDL=pdl,
        CAP=cap_argument("head_gemm", softcap),
        num_warps=tile.warps,
        launch_pdl=pdl,
    )
