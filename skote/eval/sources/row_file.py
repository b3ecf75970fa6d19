"""A file of rows: read as a stream, faults counted or refused, and so many rows taken of it by a seed."""

from __future__ import annotations

import hashlib
import heapq
import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skote.eval.sources.formats import FORMATS, recognise
from skote.eval.sources.records import Entry, read_records
from skote.eval.sources.row import Row, RowError
from skote.eval.sources.source_config import SourceConfig
from skote.types import UsageError

Fit = Callable[[Row], Row | None]
"""A row as it can be served, or None where it is to be left out."""


@dataclass(slots=True)
class Reading:
    """What one reading of a file came across; `passed_over` rows are no requests of their own (`formats.replay`)."""

    format: str
    rows: int = 0
    malformed: int = 0
    first_malformed: str | None = None
    passed_over: int = 0
    dropped: int = 0

    def describe(self) -> dict[str, Any]:
        """JSON values for the manifest."""
        return {
            "format": self.format,
            "rows_read": self.rows,
            "malformed": self.malformed,
            "first_malformed": self.first_malformed,
            "passed_over": self.passed_over,
            "dropped": self.dropped,
        }


class RowFile:
    """The file that `config.path` names; `reading` is of the latest reading."""

    def __init__(self, config: SourceConfig) -> None:
        self._config = config
        self._path = Path(config.path or "")
        self.reading = Reading(config.format)

    def facts(self) -> dict[str, Any]:
        """JSON values for the manifest: the file as it lies there, and what the latest reading came across.

        Raises:
            UsageError: it cannot be read.
        """
        try:
            with self._path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            return {"path": self._path.name, "sha256": digest, **self.reading.describe()}
        except OSError as error:
            raise UsageError(f"workload.source.path={self._path} cannot be read: {error.strerror}.") from error

    def rows(self) -> Iterator[Row]:
        """All rows that can be read, in the file's order.

        Raises:
            UsageError: the file or its format cannot be read; or a row, where malformed ones are refused.
        """
        found = self.reading = Reading(self._config.format)
        for entry in read_records(self._path):
            found.rows += 1
            try:
                row = self._row(entry)
            except RowError as error:
                sentence = f"{entry.place}: {error}"
            else:
                if row is None:
                    found.passed_over += 1
                else:
                    yield row
                continue
            if self._config.malformed == "refuse":
                raise UsageError(
                    f"workload.source.path={self._path}, {sentence}; correct it, or leave such rows out with "
                    "workload.source.malformed=skip."
                )
            found.malformed += 1
            found.first_malformed = found.first_malformed or sentence

    def _row(self, entry: Entry) -> Row | None:
        if entry.fault is not None:
            raise RowError(entry.fault)
        if self.reading.format == "auto":
            self.reading.format = recognise(entry.record, self._path)
        return FORMATS[self.reading.format](entry.place, entry.record)

    def take(self, planned: int, spare: int, block: int, fit: Fit, rng: random.Random) -> list[Row]:
        """`planned` of the rows that `fit` does not leave out, and `spare` more, in blocks of `block`.

        The planned ones are the same however many are spare. "first" reads no further than it needs. "window" reads
        twice: to count, and to take what follows each other; its spare blocks are what comes behind it, and then the
        file's beginning. "rows" keeps no more than it takes: each block is a sample of its own of the whole file, in
        the file's order.

        Raises:
            UsageError: as `rows`; or there are too few.
        """

        def fitting() -> Iterator[Row]:
            for row in self.rows():
                fitted = fit(row)
                if fitted is None:
                    self.reading.dropped += 1
                else:
                    yield fitted

        count = planned + spare
        if self._config.sample == "first":
            taken = list(itertools.islice(fitting(), count))
        elif self._config.sample == "window":
            places = _window(sum(1 for _ in fitting()), planned, spare, block, rng)
            found = {index: row for index, row in enumerate(fitting()) if index in places}
            taken = [found[index] for index in places]
        else:
            # Those with the largest of random keys: a uniform sample, whatever their number turns out to be.
            keyed = ((rng.random(), index, row) for index, row in enumerate(fitting()))
            kept = heapq.nlargest(count, keyed, key=lambda each: each[:2])
            blocks = (kept[start : start + block] for start in range(0, len(kept), block))
            taken = [row for each in blocks for _, _, row in sorted(each, key=lambda item: item[1])]
        if len(taken) < count:
            raise UsageError(
                f"workload.source.path={self._path} has {len(taken)} rows that can be sent, and the run needs {count}: "
                "lower workload.blocks or workload.requests_per_block (measure.stop.max_blocks, too)."
            )
        return taken


def _window(total: int, planned: int, spare: int, block: int, rng: random.Random) -> dict[int, None]:
    """The places of the planned rows, which follow each other, and of the spare ones, in the order of their use."""
    start = rng.randrange(max(1, total - planned + 1))
    end = min(total, start + planned)
    after = min(spare, (total - end) // block * block)
    before = min(spare - after, start)
    return dict.fromkeys([*range(start, end), *range(end, end + after), *range(before)])
