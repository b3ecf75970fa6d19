"""The kernels that attend to one split of the cache each; `flash_decode_triton` has the formula and launches them.

With a WINDOW a row attends to that many of its newest positions, and its splits are counted from the first that has
one of them. With a CAP the scores are CAP tanh(scores / CAP); `scale` then lacks the factor log2(e).

All leave, for each row, split and query head, `sums` [rows, splits, heads, head_dim], the unnormalised sum, and `stats`
[rows, splits, 2, heads], the maximum of the scaled scores and the denominator; for an idle row, nothing. Scores are
scaled by log2(e) beside their own scale, since exp2 is what the hardware has. All sums are fp32; in half precision the
products of `flash_group` and `flash_stream` take weights that were rounded to the values' dtype.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from skote.kernels.activation_triton import capped


@triton.jit
def first_split(position, WINDOW: tl.constexpr, SPLIT: tl.constexpr):
    """Of splits of SPLIT positions, the first one that a row at `position` attends to."""
    first = 0
    if WINDOW > 0:
        first = tl.maximum(position + 1 - WINDOW, 0) // SPLIT
    return first


@triton.jit
def visible(places, position, WINDOW: tl.constexpr):
    """Which `places` a row at `position` attends to."""
    seen = places <= position
    if WINDOW > 0:
        seen = seen & (places > position - WINDOW)
    return seen


@triton.jit
def in_base_2(scores, CAP: tl.constexpr):
    """Scores as `exp2` takes them, of what came out of q k^T times the kernel's scale."""
    if CAP > 0.0:
        scores = capped(scores, CAP) * 1.4426950408889634
    return scores


@triton.jit
def flash_tile_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    position_ptr,
    table_ptr,
    out_ptr,
    sums_ptr,
    stats_ptr,
    scale,  # log2(e) / sqrt(D)
    head_stride,  # elements from one head of the cache to the next
    pages,  # of a row of the table
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,  # query heads a kv head
    HEAD_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,  # positions a split
    SINGLE: tl.constexpr,  # one split holds everything: write `out`, not the partial sums
    PDL: tl.constexpr,
    WINDOW: tl.constexpr = 0,  # positions that are attended to; 0 is all
    CAP: tl.constexpr = 0.0,
):
    """Grid: (HEADS, splits, rows).

    Before the wait: position, page table, and the keys and values of earlier steps. After it: q and the newest slot.
    """
    if PDL:
        gdc_launch_dependents()
    head = tl.program_id(0)
    split = tl.program_id(1)
    row = tl.program_id(2)
    position = tl.load(position_ptr + row)
    start = (split + first_split(position, WINDOW, TILE)) * TILE
    if start <= position:
        places = start + tl.arange(0, TILE)
        dims = tl.arange(0, HEAD_DIM)
        base = (head // GROUP).to(tl.int64) * head_stride
        slot = tl.load(table_ptr + row * pages + start // PAGE) * PAGE + start % PAGE  # of the split's first position
        offsets = base + ((slot + tl.arange(0, TILE)) * HEAD_DIM)[:, None] + dims[None, :]
        earlier = (places < position)[:, None]
        keys = tl.load(k_ptr + offsets, mask=earlier, other=0.0)
        values = tl.load(v_ptr + offsets, mask=earlier, other=0.0)
        newest = base + (slot + position - start) * HEAD_DIM + dims
        holds_newest = (position < start + TILE) & (dims >= 0)
        if PDL:
            gdc_wait()
        q = tl.load(q_ptr + (row * HEADS + head) * HEAD_DIM + dims, eviction_policy="evict_last").to(tl.float32)
        new_key = tl.load(k_ptr + newest, mask=holds_newest, other=0.0, eviction_policy="evict_last")
        new_value = tl.load(v_ptr + newest, mask=holds_newest, other=0.0, eviction_policy="evict_last")
        is_newest = (places == position)[:, None]
        wide_keys = tl.where(is_newest, new_key[None, :], keys).to(tl.float32)
        wide_values = tl.where(is_newest, new_value[None, :], values).to(tl.float32)
        scores = in_base_2(tl.sum(wide_keys * q[None, :], axis=1) * scale, CAP)
        scores = tl.where(visible(places, position, WINDOW), scores, float("-inf"))
        top = tl.max(scores, axis=0)
        weights = tl.exp2(scores - top)
        total = tl.sum(weights, axis=0)
        mixed = tl.sum(wide_values * weights[:, None], axis=0)
        if SINGLE:
            out = (mixed / total).to(out_ptr.dtype.element_ty)
            tl.store(out_ptr + (row * HEADS + head) * HEAD_DIM + dims, out)
        else:
            split += row * tl.num_programs(1)
            tl.store(sums_ptr + (split * HEADS + head) * HEAD_DIM + dims, mixed)
            tl.store(stats_ptr + split * 2 * HEADS + head, top)
            tl.store(stats_ptr + (split * 2 + 1) * HEADS + head, total)
    else:
        if PDL:
            gdc_wait()
        if SINGLE:  # the row is idle
            dims = tl.arange(0, HEAD_DIM)
            zeros = tl.zeros([HEAD_DIM], out_ptr.dtype.element_ty)
            tl.store(out_ptr + (row * HEADS + head) * HEAD_DIM + dims, zeros)


@triton.jit
def flash_group_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    position_ptr,
    table_ptr,
    sums_ptr,
    stats_ptr,
    scale,
    head_stride,
    pages,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,  # a power of two, at least GROUP and what tl.dot takes
    HEAD_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,  # positions a split
    PDL: tl.constexpr,
    WINDOW: tl.constexpr = 0,  # positions that are attended to; 0 is all
    CAP: tl.constexpr = 0.0,
):
    """Grid: (kv_heads, splits, rows). Results as `flash_tile_kernel`, and as there what is loaded before the wait."""
    if PDL:
        gdc_launch_dependents()
    kv_head = tl.program_id(0)
    split = tl.program_id(1)
    row = tl.program_id(2)
    position = tl.load(position_ptr + row)
    start = (split + first_split(position, WINDOW, TILE)) * TILE
    if start <= position:
        places = start + tl.arange(0, TILE)
        dims = tl.arange(0, HEAD_DIM)
        rows = tl.arange(0, ROWS)
        shared = rows < GROUP
        heads = kv_head * GROUP + rows
        base = kv_head.to(tl.int64) * head_stride
        slot = tl.load(table_ptr + row * pages + start // PAGE) * PAGE + start % PAGE  # of the split's first position
        offsets = base + ((slot + tl.arange(0, TILE)) * HEAD_DIM)[:, None] + dims[None, :]
        earlier = (places < position)[:, None]
        keys = tl.load(k_ptr + offsets, mask=earlier, other=0.0)
        values = tl.load(v_ptr + offsets, mask=earlier, other=0.0)
        newest = base + (slot + position - start) * HEAD_DIM + dims
        holds_newest = (position < start + TILE) & (dims >= 0)
        if PDL:
            gdc_wait()
        q = tl.load(
            q_ptr + (row * HEADS + heads[:, None]) * HEAD_DIM + dims[None, :],
            mask=shared[:, None],
            other=0.0,
            eviction_policy="evict_last",
        )
        new_key = tl.load(k_ptr + newest, mask=holds_newest, other=0.0, eviction_policy="evict_last")
        new_value = tl.load(v_ptr + newest, mask=holds_newest, other=0.0, eviction_policy="evict_last")
        is_newest = (places == position)[:, None]
        keys = tl.where(is_newest, new_key[None, :], keys)
        values = tl.where(is_newest, new_value[None, :], values)
        scores = in_base_2(tl.dot(q.to(keys.dtype), tl.trans(keys), input_precision="ieee") * scale, CAP)
        scores = tl.where(visible(places, position, WINDOW)[None, :], scores, float("-inf"))
        top = tl.max(scores, axis=1)
        weights = tl.exp2(scores - top[:, None])
        mixed = tl.dot(weights.to(values.dtype), values, input_precision="ieee")
        split += row * tl.num_programs(1)
        tl.store(sums_ptr + (split * HEADS + heads[:, None]) * HEAD_DIM + dims[None, :], mixed, mask=shared[:, None])
        tl.store(stats_ptr + split * 2 * HEADS + heads, top, mask=shared)
        tl.store(stats_ptr + (split * 2 + 1) * HEADS + heads, tl.sum(weights, axis=1), mask=shared)
    elif PDL:
        gdc_wait()


@triton.jit
def flash_stream_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    position_ptr,
    table_ptr,
    sums_ptr,
    stats_ptr,
    scale,
    head_stride,
    pages,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,  # a power of two, at least GROUP and what tl.dot takes
    HEAD_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,  # positions at once
    STAGES: tl.constexpr,  # blocks in flight
    PDL: tl.constexpr,
    WINDOW: tl.constexpr = 0,  # positions that are attended to; 0 is all
    CAP: tl.constexpr = 0.0,
):
    """Grid: (kv_heads, splits, rows). Results as `flash_tile_kernel`, a page a split.

    The wait comes before the loop: a load inside one may be moved ahead of a wait inside it (triton #11905). Asking for
    the page ahead of the wait, to L2, was tried and costs 7 % of a step at 32,768 positions.
    """
    if PDL:
        gdc_launch_dependents()
    kv_head = tl.program_id(0)
    page = tl.program_id(1)
    row = tl.program_id(2)
    position = tl.load(position_ptr + row)
    page += first_split(position, WINDOW, PAGE)
    if page * PAGE <= position:
        first_slot = tl.load(table_ptr + row * pages + page).to(tl.int64) * PAGE
        base = kv_head.to(tl.int64) * head_stride + first_slot * HEAD_DIM
        if PDL:
            gdc_wait()
        rows = tl.arange(0, ROWS)
        shared = rows < GROUP
        heads = kv_head * GROUP + rows
        dims = tl.arange(0, HEAD_DIM)
        q = tl.load(
            q_ptr + (row * HEADS + heads[:, None]) * HEAD_DIM + dims[None, :],
            mask=shared[:, None],
            other=0.0,
            eviction_policy="evict_last",
        )
        q = q.to(k_ptr.dtype.element_ty)
        used = tl.minimum(position + 1 - page * PAGE, PAGE)
        top = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        mixed = tl.zeros([ROWS, HEAD_DIM], tl.float32)
        unseen = 0
        if WINDOW > 0:  # of the page, the blocks before the window
            unseen = first_split(position - page * PAGE, WINDOW, BLOCK) * BLOCK
        for start in tl.range(unseen, used, BLOCK, num_stages=STAGES):
            places = start + tl.arange(0, BLOCK)
            offsets = base + places[:, None] * HEAD_DIM + dims[None, :]
            keys = tl.load(k_ptr + offsets, mask=(places < used)[:, None], other=0.0)
            scores = in_base_2(tl.dot(q, tl.trans(keys), input_precision="ieee") * scale, CAP)
            seen = visible(places, position - page * PAGE, WINDOW) if WINDOW > 0 else places < used
            scores = tl.where(seen[None, :], scores, float("-inf"))
            higher = tl.maximum(top, tl.max(scores, axis=1))
            kept = tl.exp2(top - higher)
            weights = tl.exp2(scores - higher[:, None])
            total = total * kept + tl.sum(weights, axis=1)
            values = tl.load(v_ptr + offsets, mask=(places < used)[:, None], other=0.0)
            mixed = mixed * kept[:, None] + tl.dot(weights.to(values.dtype), values, input_precision="ieee")
            top = higher
        split = row * tl.num_programs(1) + page - first_split(position, WINDOW, PAGE)
        tl.store(sums_ptr + (split * HEADS + heads[:, None]) * HEAD_DIM + dims[None, :], mixed, mask=shared[:, None])
        tl.store(stats_ptr + split * 2 * HEADS + heads, top, mask=shared)
        tl.store(stats_ptr + (split * 2 + 1) * HEADS + heads, total, mask=shared)
    elif PDL:
        gdc_wait()
