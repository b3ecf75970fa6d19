"""Attention of each row's new position over a paged KV cache (flash-decoding, arXiv 2205.14135, split over keys).

    out[r, h] = softmax(q[r, h] K[g]^T / sqrt(D)) V[g]        for head h of group g, over row r's positions 0 .. newest

Position p of row r lives in slot table[r, p // PAGE] * PAGE + p % PAGE of a pool that all rows share. A row whose
newest position is negative is idle: its `out` is zero. The positions are cut into splits of a fixed size: a program
leaves a split's unnormalised sum, maximum and denominator; `flash_fold` puts a row's splits together in their order.

Three kernels do the splits; which one runs depends on how many positions may be in use, never on anything else:

- `flash_tile`, for the shortest contexts, where latency is all: one program a query head, fp32 in registers;
- `flash_group`: one program a kv head, whose queries share every key read, through tensor cores;
- `flash_stream`, for long contexts, where the cache's bytes are all: the same over a whole page, block after block.

The first two load a split before the wait, but for the newest position.

With a window w row r attends to positions newest - w + 1 .. newest alone, and no split before them is read. With a soft
cap c its scores become c tanh(scores / c) (Gemma 2, arXiv 2408.00118).
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from skote.kernels.activation_triton import cap_argument
from skote.kernels.attention import capped
from skote.kernels.flash_split_triton import first_split, flash_group_kernel, flash_stream_kernel, flash_tile_kernel
from skote.kernels.launch import (
    check_dtype,
    check_float,
    check_offsets,
    check_rank,
    check_shape,
    check_tensors,
    check_window,
    padded,
)
from skote.kernels.pages import check_head_dim, check_pool, check_table

STREAM_ROWS = 16  # tl.dot's smallest tile: a group's queries are padded to it
MIN_HEAD_DIM = 16


class Attention(NamedTuple):
    """How decode attention is cut. `page` is a multiple of `tile`, `group` and `block`; all are powers of two.

    Up to `tiled` positions a split is `tile` of them, up to `grouped` it is `group`, beyond a page, read in blocks.
    `fold` splits are put together at once; None: as many as suit their number. With `tiled` and `grouped` 0 and `fold`
    set, a row's bits do not depend on how many positions may be in use.
    """

    page: int = 256
    tile: int = 64
    tile_warps: int = 4
    tiled: int = 512
    group: int = 64
    group_warps: int = 8
    grouped: int = 16384
    block: int = 64
    stages: int = 2
    stream_warps: int = 4
    fold: int | None = None

    def split(self, positions: int) -> int:
        """Positions a split, where at most `positions` are in use."""
        if positions <= self.tiled:
            return self.tile
        return self.group if positions <= self.grouped else self.page

    def splits(self, positions: int, window: int | None) -> tuple[int, int]:
        """Positions a split and splits a row, where `positions` may be in use and `window` of them are attended to."""
        if window is None or window >= positions:
            split = self.split(positions)
            return split, triton.cdiv(positions, split)
        split = self.split(window)
        return split, min(triton.cdiv(positions, split), triton.cdiv(window, split) + 1)


def flash_decode_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    position: torch.Tensor,
    table: torch.Tensor,
    *,
    page: int,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """The formula in framework ops, row by row, fp32 inside: shape and dtype of `q`; arguments as `flash_decode`."""
    out = torch.zeros_like(q)
    group = q.shape[1] // k.shape[0]
    for row, newest in enumerate(position.tolist()):
        if newest < 0:
            continue
        places = torch.arange(0 if window is None else max(newest + 1 - window, 0), newest + 1, device=q.device)
        slots = table[row, places // page].long() * page + places % page
        keys = k[:, slots].float().repeat_interleave(group, 0)
        values = v[:, slots].float().repeat_interleave(group, 0)
        products = (keys * q[row].float()[:, None]).sum(-1)
        scores = products / math.sqrt(q.shape[2]) if scale is None else products * scale
        out[row] = (capped(scores, softcap).softmax(-1)[..., None] * values).sum(1).to(q.dtype)
    return out


@triton.jit
def flash_fold_kernel(
    position_ptr,
    sums_ptr,
    stats_ptr,
    out_ptr,
    room,  # splits of a row in `sums` and `stats`
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    SPLIT: tl.constexpr,
    FOLD: tl.constexpr,  # splits at once
    DIMS: tl.constexpr,  # of the head, a program
    PDL: tl.constexpr,
    WINDOW: tl.constexpr = 0,
):
    """Grid: (HEADS, HEAD_DIM / DIMS, rows). Put a row's partial sums together in `out` [rows, HEADS, HEAD_DIM]."""
    if PDL:
        gdc_launch_dependents()
    head = tl.program_id(0)
    dims = tl.program_id(1) * DIMS + tl.arange(0, DIMS)
    row = tl.program_id(2)
    position = tl.maximum(tl.load(position_ptr + row), -1)
    splits = (position + SPLIT) // SPLIT - first_split(position, WINDOW, SPLIT)  # none of an idle row
    if PDL:
        gdc_wait()
    top = float("-inf")
    total = 0.0
    mixed = tl.zeros([DIMS], tl.float32)
    for start in range(0, splits, FOLD):
        split = start + tl.arange(0, FOLD)
        there = split < splits
        split += row * room
        tops = tl.load(
            stats_ptr + split * 2 * HEADS + head, mask=there, other=float("-inf"), eviction_policy="evict_last"
        )
        totals = tl.load(
            stats_ptr + (split * 2 + 1) * HEADS + head, mask=there, other=0.0, eviction_policy="evict_last"
        )
        sums = tl.load(
            sums_ptr + (split * HEADS + head)[:, None] * HEAD_DIM + dims[None, :],
            mask=there[:, None],
            other=0.0,
            eviction_policy="evict_last",
        )
        higher = tl.maximum(top, tl.max(tops, axis=0))
        weights = tl.exp2(tops - higher)
        kept = tl.exp2(top - higher)
        total = total * kept + tl.sum(totals * weights, axis=0)
        mixed = mixed * kept + tl.sum(sums * weights[:, None], axis=0)
        top = higher
    out = mixed / tl.maximum(total, 1.0)  # the highest score alone counts 1: only an idle row has less
    tl.store(out_ptr + (row * HEADS + head) * HEAD_DIM + dims, out.to(out_ptr.dtype.element_ty))


def flash_decode(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    position: torch.Tensor,
    table: torch.Tensor,
    out: torch.Tensor,
    sums: torch.Tensor,
    stats: torch.Tensor,
    *,
    positions: int,
    cut: Attention,
    pdl: bool,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
) -> None:
    """Launch the kernels for a cache of which at most the first `positions` positions are in use.

    Args:
        q: `[rows, heads, head_dim]`, in any float dtype; `heads` is a multiple of `kv_heads`.
        k, v: `[kv_heads, slots, head_dim]`, the pool of all rows, both in one float dtype; `head_dim` is a power of two
            of at least 16, and `slots` are whole pages.
        position: int32 `[rows]`, below `positions`, negative where a row is idle.
        table: int32 `[rows, pages]`, physical page of each logical one; those of idle rows are pages of the pool too.
        out: `[rows, heads, head_dim]`, in any float dtype, written.
        sums, stats: fp32 room for `[rows, splits, heads, head_dim]` and `[rows, splits, 2, heads]`, overwritten.
        scale: of q K^T, in place of 1 / sqrt(head_dim).
        window: how many of the newest positions are attended to; None is all.
        softcap: of the scores; None is none.

    Raises:
        TypeError, ValueError: what the checks of `launch` and `pages` refuse, a soft cap that is not above 0, or too
            little room.
    """
    check_tensors("flash_decode", q=q, k=k, v=v, position=position, table=table, out=out, sums=sums, stats=stats)
    check_rank("flash_decode", 3, q=q, k=k)
    (rows, heads, head_dim), (kv_heads, slots, _) = q.shape, k.shape
    check_float("flash_decode", q=q, out=out)
    check_head_dim("flash_decode", head_dim, MIN_HEAD_DIM)
    check_pool("flash_decode", head_dim, k=k, v=v)
    if kv_heads == 0 or heads % kv_heads:
        raise ValueError(f"flash_decode: {heads} query heads cannot share {kv_heads} kv heads evenly.")
    check_shape("flash_decode", (rows, heads, head_dim), out=out)
    check_dtype("flash_decode", torch.int32, position=position)
    check_shape("flash_decode", (rows,), position=position)
    check_table("flash_decode", table, (rows,), page=cut.page, slots=slots, positions=positions)
    check_dtype("flash_decode", torch.float32, sums=sums, stats=stats)
    check_offsets("flash_decode", sums=sums.numel())
    cap = cap_argument("flash_decode", softcap)
    check_window("flash_decode", window)
    window = None if window is None or window >= positions else window
    split, splits = cut.splits(positions, window)
    if sums.numel() < rows * splits * heads * head_dim or stats.numel() < rows * splits * 2 * heads:
        raise ValueError(
            f"flash_decode: sums {tuple(sums.shape)} or stats {tuple(stats.shape)} are too small for {rows} rows of "
            f"{splits} splits."
        )
    base = 1.0 if softcap else math.log2(math.e)
    factor = base / math.sqrt(head_dim) if scale is None else base * scale
    shape: dict[str, float] = {
        "HEADS": heads,
        "GROUP": heads // kv_heads,
        "HEAD_DIM": head_dim,
        "PAGE": cut.page,
        "PDL": pdl,
        "WINDOW": window or 0,
        "CAP": cap,
    }
    reach = window or positions
    if reach <= cut.tiled:
        flash_tile_kernel[(heads, splits, rows)](
            q,
            k,
            v,
            position,
            table,
            out,
            sums,
            stats,
            factor,
            slots * head_dim,
            table.shape[1],
            TILE=cut.tile,
            SINGLE=splits == 1,
            num_warps=cut.tile_warps,
            launch_pdl=pdl,
            **shape,
        )
        if splits == 1:
            return
    elif reach <= cut.grouped:
        flash_group_kernel[(kv_heads, splits, rows)](
            q,
            k,
            v,
            position,
            table,
            sums,
            stats,
            factor,
            slots * head_dim,
            table.shape[1],
            ROWS=max(padded(heads // kv_heads), STREAM_ROWS),
            TILE=cut.group,
            num_warps=cut.group_warps,
            launch_pdl=pdl,
            **shape,
        )
    else:
        flash_stream_kernel[(kv_heads, splits, rows)](
            q,
            k,
            v,
            position,
            table,
            sums,
            stats,
            factor,
            slots * head_dim,
            table.shape[1],
            ROWS=max(padded(heads // kv_heads), STREAM_ROWS),
            BLOCK=cut.block,
            STAGES=cut.stages,
            num_warps=cut.stream_warps,
            launch_pdl=pdl,
            **shape,
        )
    fold, dims = fold_shape(cut.fold or splits, head_dim)
    flash_fold_kernel[(heads, head_dim // dims, rows)](
        position,
        sums,
        stats,
        out,
        splits,
        HEADS=heads,
        HEAD_DIM=head_dim,
        SPLIT=split,
        FOLD=fold,
        DIMS=dims,
        PDL=pdl,
        WINDOW=window or 0,
        num_warps=1 if fold <= 32 else 4,
        launch_pdl=pdl,
    )


def fold_shape(splits: int, head_dim: int) -> tuple[int, int]:
    """(splits at once, dimensions a program) of `flash_fold_kernel`: one warp where a few splits are all there are."""
    return min(padded(splits), 128), min(head_dim, 32)
