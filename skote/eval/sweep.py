"""A sweep's own record, sweep.json: its jobs in the order in which they run, and how each ended.

It is written before the first job starts and after each one, so that a sweep that was killed says what is left. A
capacity search, which chooses its jobs as it goes, has the same in search.json.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from skote.eval.record import file_hashes, write_text
from skote.types import ExitCode, UsageError

SCHEMA_VERSION = 1
NAME = "sweep.json"
SEARCH = "search.json"

State = Literal["waiting", "done", "failed", "interrupted"]
T = TypeVar("T")


@dataclass
class Cell:
    """One job of a sweep: its directory below the sweep's, what was overridden, and how it ended."""

    directory: str
    overrides: list[str]
    state: State = "waiting"
    exit_code: int | None = None
    sentence: str | None = None

    def end(self, code: ExitCode, sentence: str | None) -> None:
        """Note how it ended; `sentence` says why it did not come to its end, and is None where it did."""
        self.exit_code, self.sentence = int(code), sentence
        self.state = "interrupted" if code == ExitCode.INTERRUPTED else "failed" if sentence else "done"


@dataclass
class Sweep:
    """The jobs of one command, in the order in which they run; `seed` is what that order was drawn from.

    `name` is that of its file: `NAME`, or `SEARCH`.
    """

    directory: Path
    arguments: list[str]
    seed: int
    cells: list[Cell]
    name: str = NAME

    def write(self) -> None:
        """Write its file.

        Raises:
            RecordError: it could not be written.
        """
        content = {
            "schema_version": SCHEMA_VERSION,
            "arguments": self.arguments,
            "seed": self.seed,
            "cells": [asdict(cell) for cell in self.cells],
        }
        write_text(self.directory / self.name, json.dumps(content, indent=2, sort_keys=True) + "\n")

    def name_of(self, cell: Cell) -> str:
        """A job by its directory and what it does not share with all others: "3 (workload.blocks=0 seed=1)"."""
        shared = set.intersection(*(set(each.overrides) for each in self.cells))
        own = [each for each in cell.overrides if each not in shared]
        return f"{cell.directory} ({' '.join(own)})" if own else cell.directory

    def troubled(self) -> list[Cell]:
        """The jobs that ended with another code than 0, in order."""
        return [cell for cell in self.cells if cell.exit_code]

    def worst(self) -> ExitCode:
        """The code of all jobs together, those that have not run left out."""
        return ExitCode.worst(cell.exit_code or 0 for cell in self.cells)


def read_sweep(directory: Path) -> Sweep:
    """The record of the sweep, or of the search, in `directory`.

    Raises:
        UsageError: there is none, or it cannot be understood.
    """
    path = directory / SEARCH if (directory / SEARCH).exists() else directory / NAME
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(
            f"resume={directory} needs the directory of a sweep (-m) or a search, with its {NAME} or {SEARCH}: "
            f"{error.strerror or error}."
        ) from error
    except ValueError as error:
        raise UsageError(f"{path} is damaged: {error}.") from error
    if not isinstance(content, dict) or content.get("schema_version") != SCHEMA_VERSION:
        raise UsageError(f"{path} was not written by this version of Skotergy: start it anew.")
    cells = [Cell(**cell) for cell in content["cells"]]
    return Sweep(directory, content["arguments"], content["seed"], cells, path.name)


def shuffled(items: Sequence[T], seed: int) -> list[T]:
    """`items` in an order drawn from `seed`, so that what drifts over a sweep does not follow what it varies."""
    order = list(items)
    random.Random(f"{seed}/sweep").shuffle(order)  # noqa: S311 - a reproducible shuffle
    return order


def cell_key(config: dict[str, Any], workload_sha256: str) -> str:
    """What a job is, as SHA-256: its resolved configuration (JSON values) and the hash of its requests."""
    content = json.dumps({"config": config, "workload": workload_sha256}, sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()


def finished_code(directory: Path, key: str) -> ExitCode | None:
    """The code of the job `key` in `directory`, where it came to its end and its files are as it left them."""
    try:
        manifest = json.loads((directory / "manifest.json").read_text(encoding="utf-8"))
        metrics = json.loads((directory / "metrics.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):  # nothing there, or half of it: the job runs again
        return None
    if manifest["status"] != "complete" or manifest.get("cell_key") != key:
        return None
    return ExitCode(metrics["exit_code"]) if manifest.get("files") == file_hashes(directory) else None
