"""Rows that no file has: their lengths are drawn."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Any

from skote.eval.sources.lengths import LengthConfig, drawn_lengths
from skote.eval.sources.row import Row
from skote.eval.sources.row_file import Fit, RowFile
from skote.eval.sources.source_config import SourceConfig
from skote.types import UsageError

MOST_DROPPED = 100
"""Rows that may be too long for each that is not, before the lengths are held to be impossible."""


class DrawnRows:
    """Rows of the lengths that `config.input` and `config.output` draw, of the latter only where it is given."""

    def __init__(self, config: SourceConfig) -> None:
        self._config = config
        self._dropped = 0

    def facts(self) -> dict[str, Any]:
        """JSON values for the manifest."""
        return {"path": None, "sha256": None, "format": "drawn", "dropped": self._dropped}

    def take(self, planned: int, spare: int, block: int, fit: Fit, rng: random.Random) -> list[Row]:
        """As `RowFile.take`: the next rows that `fit` does not leave out.

        Raises:
            UsageError: nearly all are too long, or a file of lengths cannot be read or has none.
        """
        del block
        taken: list[Row] = []
        self._dropped = 0
        rows = self._rows(rng)
        while len(taken) < planned + spare:
            row = fit(next(rows))
            if row is not None:
                taken.append(row)
                continue
            self._dropped += 1
            if self._dropped > MOST_DROPPED * (len(taken) + 1):
                raise UsageError(
                    f"Of the lengths of workload.source.input {len(taken)} of {len(taken) + self._dropped} fit into "
                    "the model's context: make them shorter, or choose workload.source.too_long=truncate."
                )
        return taken

    def _rows(self, rng: random.Random) -> Iterator[Row]:
        # Generators of their own, so that the lengths of prompts do not depend on how answers are drawn.
        prompts, answers = (random.Random(rng.random()) for _ in range(2))  # noqa: S311
        new: Iterator[int | None] = itertools.repeat(None)
        if self._config.output.distribution is not None:
            new = _lengths(self._config.output, "output_tokens", answers)
        for number, length in enumerate(_lengths(self._config.input, "input_tokens", prompts), start=1):
            yield Row(f"drawn request {number}", input_tokens=length, output_tokens=next(new))


def _lengths(config: LengthConfig, column: str, rng: random.Random) -> Iterator[int]:
    known: list[int] = []
    if config.distribution == "empirical":
        rows = RowFile(SourceConfig(path=config.path)).rows()
        known = sorted(length for row in rows if (length := getattr(row, column)) is not None)
        if not known:
            raise UsageError(f"{config.path} has no row that states {column}: lengths cannot be drawn from it.")
    return drawn_lengths(config, rng, known)
