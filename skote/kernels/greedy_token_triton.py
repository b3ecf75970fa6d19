"""The end of a greedy step: each row's most likely token, fed back.

token = lowest id with the highest logit;   position += 1;   history[row, position] = token;   x = embed[token] * scale

A row with a negative position is idle: nothing of it is written. Where no logit is a number the token is -1, and x the
embedding of token 0.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from skote.kernels.launch import (
    check_best,
    check_columns,
    check_contiguous,
    check_dtype,
    check_float,
    check_rank,
    check_shape,
    check_tensors,
    padded,
)

MAX_PROGRAMS = 1 << 17
"""Entries of the first stage a row: the program that reduces them holds all at once."""


def greedy_token_reference(
    best: torch.Tensor,
    first: torch.Tensor,
    position: torch.Tensor,
    history: torch.Tensor,
    embed: torch.Tensor,
    x: torch.Tensor,
    *,
    scale: float = 1.0,
) -> None:
    """The same in framework ops; arguments as `greedy_token`."""
    rows = (position >= 0).nonzero().flatten()
    numbers = best[rows].masked_fill(best[rows].isnan(), -torch.inf)
    winner = numbers.argmax(1, keepdim=True)  # the first of equals
    token = first[rows].gather(1, winner)[:, 0].masked_fill(numbers.amax(1).isneginf(), -1)
    position[rows] += 1
    places = (each.to(history.device) for each in (rows, position[rows]))
    history[*places] = token.to(history.device)
    x[rows] = embed[token.clamp(min=0)].float() * scale


@triton.jit
def greedy_token_kernel(
    best_ptr,
    first_ptr,
    position_ptr,
    history_ptr,
    embed_ptr,
    x_ptr,
    programs,
    places,  # of a row of the history
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,  # a power of two, at least HIDDEN
    PROGRAMS: tl.constexpr,  # a power of two, at least `programs`
    PDL: tl.constexpr,
    SCALE: tl.constexpr = 1.0,  # of the embedding
):
    """Grid: (rows,). Second stage of the maximum (see `head_gemv`), then the step's only write of position."""
    if PDL:
        gdc_launch_dependents()
    row = tl.program_id(0)
    program = tl.arange(0, PROGRAMS)
    columns = tl.arange(0, BLOCK)
    if PDL:
        gdc_wait()
    position = tl.load(position_ptr + row, eviction_policy="evict_last")
    live = position >= 0
    best_ptr += row * programs
    best = tl.load(best_ptr + program, mask=program < programs, other=float("-inf"), eviction_policy="evict_last")
    top = tl.max(best, axis=0)
    winner = tl.min(tl.where((best == top) & (program < programs), program, programs - 1), axis=0)
    token = tl.load(first_ptr + row * programs + winner, eviction_policy="evict_last")
    token = tl.where(top > float("-inf"), token, -1)  # no logit is a number
    tl.store(history_ptr + row * places + position + 1, token, mask=live)
    tl.store(position_ptr + row, position + 1, mask=live)
    inside = (columns < HIDDEN) & live
    embedding = tl.load(
        embed_ptr + tl.maximum(token, 0).to(tl.int64) * HIDDEN + columns,
        mask=inside,
        other=0.0,
        eviction_policy="evict_last",
    )
    x = embedding.to(tl.float32)
    if SCALE != 1.0:
        x *= SCALE
    tl.store(x_ptr + row * HIDDEN + columns, x, mask=inside)


def greedy_token(
    best: torch.Tensor,
    first: torch.Tensor,
    position: torch.Tensor,
    history: torch.Tensor,
    embed: torch.Tensor,
    x: torch.Tensor,
    *,
    pdl: bool,
    scale: float = 1.0,
) -> None:
    """Launch the kernel.

    Args:
        best, first: fp32 and int32 `[rows, programs]`, the first stage's results (see `head_gemv`, `head_gemm`), of
            which there are at most `MAX_PROGRAMS` a row.
        position: int32 `[rows]`, advanced.
        history: int32 `[rows, places]`, longer than the last position; entry `position + 1` is written. On the device,
            or pinned memory of the host.
        embed: `[vocab, hidden]`, in any float dtype; `hidden` is at most `MAX_COLUMNS`.
        x: `[rows, hidden]`, fp32, overwritten with the tokens' rows.
        scale: of the embedding.

    Raises:
        TypeError, ValueError: what the checks of `launch` refuse, or a history out of the device's reach.
    """
    check_tensors("greedy_token", best=best, first=first, position=position, embed=embed, x=x)
    check_contiguous("greedy_token", history=history)
    if history.device != x.device and not (history.device.type == "cpu" and history.is_pinned()):
        raise ValueError(
            f"greedy_token: history is on {history.device}; it must lie on {x.device} or in the host's pinned memory."
        )
    check_rank("greedy_token", 2, best=best, history=history, embed=embed)
    (rows, programs), hidden = best.shape, embed.shape[1]
    check_columns("greedy_token", programs, MAX_PROGRAMS)
    check_columns("greedy_token", hidden)
    check_best("greedy_token", (rows, programs), best=best, first=first)
    check_dtype("greedy_token", torch.int32, position=position, history=history)
    check_shape("greedy_token", (rows,), position=position)
    check_shape("greedy_token", (rows, history.shape[1]), history=history)
    check_float("greedy_token", embed=embed)
    check_dtype("greedy_token", torch.float32, x=x)
    check_shape("greedy_token", (rows, hidden), x=x)
    block = padded(programs)
    greedy_token_kernel[(rows,)](
        best,
        first,
        position,
        history,
        embed,
        x,
        programs,
        history.shape[1],
        HIDDEN=hidden,
        BLOCK=padded(hidden),
        PROGRAMS=block,
        PDL=pdl,
        SCALE=scale,
        num_warps=min(max(block // 256, 4), 32),
        launch_pdl=pdl,
    )
