"""How the kernels of a decode step are cut.

Those of the single-row step were measured on an H200 with programmatic dependent launch on; those of the multi-row step
are reasoned, not measured: a few hundred programs, and 64 KiB of weights in flight on a multiprocessor.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from skote.kernels.flash_decode_triton import Attention
from skote.kernels.launch import GemmTile, Tile


class StepTiles(NamedTuple):
    """A tile for each projection, and how attention is cut."""

    qkv: Tile
    o: Tile
    gate_up: Tile
    down: Tile
    head: Tile
    attention: Attention


class BatchTiles(NamedTuple):
    """The same for the multi-row step; its attention is cut alike whatever the positions in use."""

    qkv: GemmTile
    o: GemmTile
    gate_up: GemmTile
    down: GemmTile
    head: GemmTile
    attention: Attention


_LARGE = StepTiles(
    qkv=Tile(4, 8), o=Tile(4, 4), gate_up=Tile(4, 4), down=Tile(2, 16), head=Tile(4, 4), attention=Attention()
)
_MEDIUM = StepTiles(
    qkv=Tile(2, 2),
    o=Tile(2, 1),
    gate_up=Tile(8, 4),
    down=Tile(2, 8),
    head=Tile(8, 4),
    attention=Attention(page=512, tile=512, tile_warps=8),
)
_SMALL = StepTiles(
    qkv=Tile(2, 1),
    o=Tile(2, 1),
    gate_up=Tile(4, 1),
    down=Tile(4, 4),
    head=Tile(8, 4),
    attention=Attention(tile=64, tile_warps=2),
)


# One kernel and one tree of sums for every length: neither what else is in the batch nor how many positions the step
# covers may show in a row's bits.
_BATCH_ATTENTION = Attention(page=128, tiled=0, grouped=0, fold=32)
_LARGE_BATCH = BatchTiles(
    qkv=GemmTile(32, 256, 4, 4),
    o=GemmTile(32, 256, 4, 4),
    gate_up=GemmTile(64, 256, 3, 4),
    down=GemmTile(32, 256, 4, 4),
    head=GemmTile(64, 256, 3, 4),
    attention=_BATCH_ATTENTION,
)
_SMALL_BATCH = BatchTiles(
    qkv=GemmTile(16, 128, 4, 2),
    o=GemmTile(16, 128, 4, 2),
    gate_up=GemmTile(32, 128, 4, 2),
    down=GemmTile(16, 128, 4, 2),
    head=GemmTile(32, 128, 4, 2),
    attention=_BATCH_ATTENTION,
)


def step_tiles(hidden: int, intermediate: int) -> StepTiles:
    """The tiles for a decoder of this width, their rows cut to divide its matrices evenly.

    Measured at 4096 (Llama-3.1-8B), 2048 (Llama-3.2-1B) and 576 (SmolLM2-135M); widths in between take the nearest.
    """
    tiles = _LARGE if hidden > 3072 else _MEDIUM if hidden > 1024 else _SMALL
    return tiles._replace(
        o=_dividing(tiles.o, hidden),
        gate_up=_dividing(tiles.gate_up, 2 * intermediate),
        down=_dividing(tiles.down, hidden),
    )


def batch_tiles(hidden: int, intermediate: int) -> BatchTiles:
    """The tiles of the multi-row step for a decoder of this width; those of small ones keep their few rows spread out.

    A head has to be a multiple of `qkv.rows`.
    """
    return _LARGE_BATCH if min(hidden, intermediate) > 1024 else _SMALL_BATCH


def _dividing(tile: Tile, rows: int) -> Tile:
    return tile._replace(rows=math.gcd(tile.rows, rows))
