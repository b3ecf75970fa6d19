"""The checks of a paged cache at a launcher's door: its pools, its block table, and the positions that have an angle.

Position p of row r lies in slot table[r, p // page] * page + p % page of every head of a pool.
"""

from __future__ import annotations

import torch

from skote.kernels.launch import check_dtype, check_float, check_offsets, check_rank, check_shape, padded


def check_rope(op: str, head_dim: int, *, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Check that `cos` and `sin` are fp32 `[positions, head_dim]`.

    Raises:
        TypeError, ValueError: another dtype or shape.
    """
    check_dtype(op, torch.float32, cos=cos, sin=sin)
    check_rank(op, 2, cos=cos)
    check_shape(op, (cos.shape[0], head_dim), cos=cos, sin=sin)


def check_head_dim(op: str, head_dim: int, least: int = 2) -> None:
    """Raises:
    ValueError: `head_dim` is no power of two, or smaller than `least`.
    """
    if padded(head_dim) != head_dim or head_dim < least:
        raise ValueError(f"{op}: head_dim {head_dim} must be a power of two of at least {least}.")


def check_pool(op: str, head_dim: int, **pools: torch.Tensor) -> None:
    """Check that `pools`, the cache's keys or values, are alike, `[kv_heads, slots, head_dim]`.

    Raises:
        TypeError: not fp32, fp16 or bf16, or not of one dtype.
        ValueError: another shape, or a head with more elements than 32-bit offsets reach.
    """
    check_float(op, **pools)
    check_rank(op, 3, **pools)
    alike, first = next(iter(pools.items()))
    kv_heads, slots, _ = first.shape
    check_shape(op, (kv_heads, slots, head_dim), **pools)
    for name, pool in pools.items():
        if pool.dtype != first.dtype:
            raise TypeError(f"{op}: {name} is {pool.dtype}, {alike} {first.dtype}; they must be alike.")
    check_offsets(op, **{"a head of the cache": slots * head_dim})


def check_table(op: str, table: torch.Tensor, *rows: tuple[int, ...], page: int, slots: int, positions: int) -> None:
    """Check that `table`, int32, is the pages of as many rows as one of `rows` says, for `positions` positions of each.

    What the entries are is not looked at: they lie on the device.

    Raises:
        TypeError: another dtype.
        ValueError: another shape, a cache of `slots` slots that is not whole pages, or too little room.
    """
    check_dtype(op, torch.int32, table=table)
    if table.ndim == 0 or tuple(table.shape[:-1]) not in rows:
        allowed = " or ".join(f"[{', '.join([*map(str, each), 'pages'])}]" for each in rows)
        raise ValueError(f"{op}: table has shape {tuple(table.shape)}, expected {allowed}.")
    pages = table.shape[-1]
    if slots % page or positions > min(pages * page, slots):
        raise ValueError(
            f"{op}: {positions} positions do not fit {pages} pages of {page} positions in a cache of {slots} slots."
        )
