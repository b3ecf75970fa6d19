"""The end of a greedy step: the most likely token, fed back.

token = lowest id with the highest logit;   position += 1;   history[position] = token;   x = embed[token]
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from skote.kernels.launch import check_tensors, padded

MAX_PROGRAMS = 1 << 17


@triton.jit
def greedy_token_kernel(
    best_ptr,
    first_ptr,
    position_ptr,
    history_ptr,
    embed_ptr,
    x_ptr,
    programs,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,  # a power of two, at least HIDDEN
    PROGRAMS: tl.constexpr,  # a power of two, at least `programs`
    PDL: tl.constexpr,
):
    """Grid: (1,). Second stage of the maximum (see `head_gemv`), then the step's only write of position."""
    if PDL:
        gdc_launch_dependents()
    program = tl.arange(0, PROGRAMS)
    columns = tl.arange(0, BLOCK)
    inside = columns < HIDDEN
    if PDL:
        gdc_wait()
    best = tl.load(best_ptr + program, mask=program < programs, other=float("-inf"), eviction_policy="evict_last")
    top = tl.max(best, axis=0)
    winner = tl.min(tl.where((best == top) & (program < programs), program, programs - 1), axis=0)
    token = tl.load(first_ptr + winner, eviction_policy="evict_last")
    position = tl.load(position_ptr, eviction_policy="evict_last") + 1
    tl.store(history_ptr + position, token)
    tl.store(position_ptr, position)
    row = tl.load(
        embed_ptr + token.to(tl.int64) * HIDDEN + columns, mask=inside, other=0.0, eviction_policy="evict_last"
    )
    tl.store(x_ptr + columns, row.to(tl.float32), mask=inside)


def greedy_token(
    best: torch.Tensor,
    first: torch.Tensor,
    position: torch.Tensor,
    history: torch.Tensor,
    embed: torch.Tensor,
    x: torch.Tensor,
    *,
    pdl: bool,
) -> None:
    """Launch the kernel.

    Args:
        best, first: the first stage's results, one entry a program of `head_gemv`.
        position: int32 `[1]`, advanced.
        history: int32, longer than the last position; entry `position + 1` is written. On the device, or pinned memory
            of the host.
        embed: `[vocab, hidden]`; x: `[hidden]`, fp32, overwritten with the token's row.

    Raises:
        TypeError, ValueError: what `check_tensors` refuses, too many entries, or a history out of the device's reach.
    """
    check_tensors("greedy_token", best=best, first=first, position=position, embed=embed, x=x)
    if not (history.device == x.device or history.is_pinned()):
        raise ValueError("greedy_token: history must lie on the device or in pinned memory.")
    programs, hidden = best.shape[0], x.shape[0]
    if programs > MAX_PROGRAMS or first.shape != best.shape or embed.shape[1] != hidden:
        raise ValueError(
            f"greedy_token: {programs} entries (at most {MAX_PROGRAMS}), first {tuple(first.shape)}, embed "
            f"{tuple(embed.shape)} and x of {hidden} do not belong together."
        )
    block = padded(programs)
    greedy_token_kernel[(1,)](
        best,
        first,
        position,
        history,
        embed,
        x,
        programs,
        HIDDEN=hidden,
        BLOCK=padded(hidden),
        PROGRAMS=block,
        PDL=pdl,
        num_warps=min(max(block // 256, 4), 32),
        launch_pdl=pdl,
    )
