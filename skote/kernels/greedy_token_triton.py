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
        best, first: `[rows, programs]`, the first stage's results (see `head_gemv`, `head_gemm`).
        position: int32 `[rows]`, advanced.
        history: int32 `[rows, places]`, longer than the last position; entry `position + 1` is written. On the device,
            or pinned memory of the host.
        embed: `[vocab, hidden]`; x: `[rows, hidden]`, fp32, overwritten with the tokens' rows.
        scale: of the embedding.

    Raises:
        TypeError, ValueError: what `check_tensors` refuses, too many entries, or a history out of the device's reach.
    """
    check_tensors("greedy_token", best=best, first=first, position=position, embed=embed, x=x)
    if not (history.device == x.device or history.is_pinned()):
        raise ValueError("greedy_token: history must lie on the device or in pinned memory.")
    (rows, programs), hidden = best.shape, x.shape[1]
    if programs > MAX_PROGRAMS or first.shape != best.shape or embed.shape[1] != hidden:
        raise ValueError(
            f"greedy_token: {programs} entries a row (at most {MAX_PROGRAMS}), first {tuple(first.shape)}, embed "
            f"{tuple(embed.shape)} and x {tuple(x.shape)} do not belong together."
        )
    if position.shape != (rows,) or x.shape[0] != rows or history.ndim != 2 or history.shape[0] != rows:
        raise ValueError(
            f"greedy_token: position {tuple(position.shape)}, x {tuple(x.shape)} and history {tuple(history.shape)} "
            f"do not have {rows} rows."
        )
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
