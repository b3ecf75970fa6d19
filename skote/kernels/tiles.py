"""How the kernels of a single-row decode step are cut, measured on an H200 with programmatic dependent launch on."""

from __future__ import annotations

import math
from typing import NamedTuple

from skote.kernels.flash_decode_triton import Attention
from skote.kernels.launch import Tile


class StepTiles(NamedTuple):
    """A tile for each projection, and how attention is cut."""

    qkv: Tile
    o: Tile
    gate_up: Tile
    down: Tile
    head: Tile
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


def _dividing(tile: Tile, rows: int) -> Tile:
    return tile._replace(rows=math.gcd(tile.rows, rows))
