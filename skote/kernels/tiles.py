"""How the kernels of a decode step are cut: what was best on an H200, with programmatic dependent launch."""

from __future__ import annotations

import math
from typing import NamedTuple, TypeVar

import torch

from skote.kernels.flash_decode_triton import Attention
from skote.kernels.launch import MAX_ROWS, MMA_COLUMNS, GemmTile, Tile


class StepTiles(NamedTuple):
    """A tile for each projection, and how attention is cut."""

    qkv: Tile
    o: Tile
    gate_up: Tile
    down: Tile
    head: Tile
    attention: Attention


class BatchTiles(NamedTuple):
    """The same for the multi-row kernels; their step's attention is cut alike whatever the positions in use."""

    qkv: GemmTile
    o: GemmTile
    gate_up: GemmTile
    down: GemmTile
    head: GemmTile
    attention: Attention


_Tiles = TypeVar("_Tiles", StepTiles, BatchTiles)

_LARGE = StepTiles(
    qkv=Tile(4, 8), o=Tile(4, 4), gate_up=Tile(4, 4), down=Tile(2, 16), head=Tile(4, 4), attention=Attention()
)
_LARGE_BF16 = _LARGE._replace(gate_up=Tile(4, 4, 2, mma=True), down=Tile(2, 8, 2, mma=True))
_MEDIUM = StepTiles(
    qkv=Tile(2, 2),
    o=Tile(2, 1),
    gate_up=Tile(8, 4),
    down=Tile(2, 8),
    head=Tile(8, 4),
    attention=Attention(page=512, tile=512, tile_warps=8),
)
_MEDIUM_BF16 = _MEDIUM._replace(o=Tile(2, 2, mma=True), down=Tile(2, 8, 2, mma=True))
_SMALL = StepTiles(
    qkv=Tile(2, 1),
    o=Tile(2, 1),
    gate_up=Tile(4, 1),
    down=Tile(4, 4),
    head=Tile(8, 4),
    attention=Attention(tile=64, tile_warps=2),
)

# Attention was measured where a head's row, its head_dim elements, has 128 bytes, and of _LARGE 256. A thread of
# `flash_tile` has room for 512 bytes of keys and values: more would spill from registers, and so would a block of
# `flash_stream` of longer rows.
_MEASURED_ROW = 128
_LONG_ROW = 512

# One kernel and one tree of sums for every length: neither what else is in the batch nor how many positions the step
# covers may show in a row's bits.
_BATCH_ATTENTION = Attention(page=128, tiled=0, grouped=0, fold=32)
# Of one width all row counts split the columns alike: a row's bits then are those of every other count (measured), so
# that a request's tokens do not depend on how many others share its step.
_MANY_ROWS = 64  # from here on a block of rows has as many bytes as one of weights
_LARGE_BATCH = BatchTiles(
    qkv=GemmTile(64, 128, 6, 4),
    o=GemmTile(64, 128, 4, 4, splits=4),
    gate_up=GemmTile(64, 128, 5, 4),
    down=GemmTile(64, 64, 5, 4, splits=4),
    head=GemmTile(128, 128, 3, 4),
    attention=_BATCH_ATTENTION,
)
_LARGE_MANY = BatchTiles(
    qkv=GemmTile(64, 128, 4, 4),
    o=GemmTile(128, 64, 4, 4, splits=4),
    gate_up=GemmTile(128, 64, 3, 4),
    down=GemmTile(64, 64, 5, 4, splits=4),
    head=GemmTile(64, 64, 4, 4),
    attention=_BATCH_ATTENTION,
)
_MEDIUM_BATCH = BatchTiles(
    qkv=GemmTile(64, 128, 6, 4),
    o=GemmTile(64, 128, 4, 4, splits=4),
    gate_up=GemmTile(64, 128, 5, 4),
    down=GemmTile(64, 128, 4, 4, splits=8),
    head=GemmTile(64, 64, 5, 4),
    attention=_BATCH_ATTENTION,
)
_MEDIUM_MANY = _MEDIUM_BATCH._replace(
    qkv=GemmTile(64, 128, 4, 4), gate_up=GemmTile(128, 64, 5, 4), head=GemmTile(64, 64, 4, 4)
)
_SMALL_BATCH = BatchTiles(
    qkv=GemmTile(64, 64, 5, 4),
    o=GemmTile(64, 64, 5, 4, splits=2),
    gate_up=GemmTile(64, 64, 5, 4),
    down=GemmTile(64, 64, 5, 4, splits=4),
    head=GemmTile(64, 64, 4, 4),
    attention=_BATCH_ATTENTION,
)


def step_tiles(hidden: int, intermediate: int, head_dim: int, dtype: torch.dtype) -> StepTiles:
    """The tiles for a decoder of this width, their rows cut to divide its matrices evenly.

    Measured in bf16 at 4096 (Llama-3.1-8B), 2048 (Llama-3.2-1B) and 576 (SmolLM2-135M); widths in between take the
    nearest, and heads whose rows of `head_dim` elements of `dtype` are longer than the measured ones take the
    attention that keeps them in registers.
    """
    mma = dtype == torch.bfloat16 and hidden % MMA_COLUMNS == intermediate % MMA_COLUMNS == 0
    large, medium = (_LARGE_BF16, _MEDIUM_BF16) if mma else (_LARGE, _MEDIUM)
    tiles = _by_width(hidden, large, medium, _SMALL)
    row = head_dim * dtype.itemsize
    if row > _MEASURED_ROW:
        tiles = tiles._replace(attention=_for_row(_LARGE.attention, row))
    return tiles._replace(
        o=_dividing(tiles.o, hidden),
        gate_up=_dividing(tiles.gate_up, 2 * intermediate),
        down=_dividing(tiles.down, hidden),
    )


def owing(tiles: StepTiles, dtype: torch.dtype) -> StepTiles:
    """`tiles` for a model with norms behind its projections: in fp32 what is owed to a row needs the registers of half
    of the weights' rows."""
    if dtype != torch.float32:
        return tiles
    gate_up, head = (each._replace(rows=max(each.rows // 2, 2)) for each in (tiles.gate_up, tiles.head))
    return tiles._replace(gate_up=gate_up, head=head)


def batch_tiles(hidden: int, intermediate: int, head_dim: int, itemsize: int, rows: int = MAX_ROWS) -> BatchTiles:
    """The tiles of the multi-row kernels for `rows` rows and a decoder of this width, measured like `step_tiles`; that
    of qkv divides `head_dim`, a power of two. Of `itemsize` bytes is an element of the cache.
    """
    width = min(hidden, intermediate)
    if rows < _MANY_ROWS:
        tiles = _by_width(width, _LARGE_BATCH, _MEDIUM_BATCH, _SMALL_BATCH)
    else:
        tiles = _by_width(width, _LARGE_MANY, _MEDIUM_MANY, _SMALL_BATCH)
    return tiles._replace(
        qkv=tiles.qkv._replace(rows=min(tiles.qkv.rows, head_dim)),
        attention=_for_row(tiles.attention, head_dim * itemsize),
    )


def _by_width(width: int, large: _Tiles, medium: _Tiles, small: _Tiles) -> _Tiles:
    return large if width > 3072 else medium if width > 1024 else small


def _dividing(tile: Tile, rows: int) -> Tile:
    taken = math.gcd(tile.rows, rows)
    return tile._replace(rows=taken, turns=math.gcd(tile.turns, rows // taken))


def _for_row(attention: Attention, row: int) -> Attention:
    """The cut for heads of `row` bytes: long ones are spread over more warps, and fewer are taken at once."""
    return attention._replace(tile_warps=8, block=32, stream_warps=8) if row > _LONG_ROW else attention
