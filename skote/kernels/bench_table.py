"""The table of the microbenchmarks: a line a way of computing an op, printed, and written to a file to keep."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple, TextIO

from skote.types import UsageError


class Ceiling(NamedTuple):
    """Bytes a second that `of` reaches, which shares are told of."""

    of: str
    rate: float


class Line(NamedTuple):
    """A line of the table; the fields are the columns of the file.

    Attributes:
        by: which way: triton, torch, ...
        moved: bytes that the op has to move.
        seconds: of one run.
        ceiling, ceiling_rate: what the device can do: reads or copies, in bytes a second.
        times_torch: how many times as fast as the way `torch` it is.
    """

    device: str
    op: str
    by: str
    moved: int
    seconds: float
    ceiling: str
    ceiling_rate: float
    times_torch: float


class Table:
    """Prints lines to `out`, and writes them as CSV to `path`, where one is given, each as it comes.

    Raises:
        UsageError: `path` cannot be written.
    """

    def __init__(self, device: str, out: TextIO, path: Path | None = None) -> None:
        self._device, self._out, self._path = device, out, path
        if path is not None:
            try:
                with path.open("w", newline="", encoding="utf-8") as file:
                    csv.writer(file).writerow(Line._fields)
            except OSError as error:
                raise UsageError(f"--csv: {path} cannot be written ({error.strerror}); name another file.") from error

    def head(self, ceiling: Ceiling) -> None:
        """Print the names of the columns."""
        share = f"of {ceiling.of}"
        self._out.write(f"\n{'op':28} {'by':14} {'MB':>8} {'us':>8} {'TB/s':>6} {share:>8} {'x torch':>8}\n")

    def add(self, op: str, moved: int, seconds: Mapping[str, float], ceiling: Ceiling) -> None:
        """A line for each way in `seconds`, of which one is `torch`; `moved` bytes go with each run."""
        for way, taken in seconds.items():
            rate, times = moved / taken, seconds["torch"] / taken
            self._out.write(
                f"{op:28} {way:14} {moved / 1e6:8.1f} {taken * 1e6:8.1f} {rate / 1e12:6.2f} {rate / ceiling.rate:8.1%} "
                f"{times:8.2f}\n"
            )
            if self._path is not None:
                with self._path.open("a", newline="", encoding="utf-8") as file:
                    csv.writer(file).writerow(Line(self._device, op, way, moved, taken, *ceiling, times))
