"""A contract check: what it is given, what it returns, and the list of all."""

from __future__ import annotations

import pkgutil
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skote.types import Engine, FinishReason, Request, UsageError

REPEATS = 9
"""How often a timed figure is measured: the median's distribution-free 95 % interval leaves out the two extremes."""

Figures = dict[str, float | list[float]]
"""What a check found: counts and errors as they are, a timed figure as the list of its repeats."""
Check = Callable[["Subject"], Figures]

CHECKS = {
    "kv_cache": "skote.contracts.cache:kv_cache",
    "padding": "skote.contracts.cache:padding",
    "loading": "skote.contracts.loading:loading",
    "pad_token": "skote.contracts.loading:pad_token",
    "families": "skote.contracts.families:families",
    "device": "skote.contracts.families:device",
    "in_flight": "skote.contracts.dispatching:in_flight",
    "closing": "skote.contracts.dispatching:closing",
    "cancelling": "skote.contracts.dispatching:cancelling",
    "length_routing": "skote.contracts.routing:length_routing",
    "norm": "skote.contracts.numerics:norm",
    "flags": "skote.contracts.numerics:flags",
    "tf32": "skote.contracts.numerics:tf32",
    "convolutions": "skote.contracts.numerics:convolutions",
    "boundary": "skote.contracts.boundary:boundary",
    "surface": "skote.contracts.surface:surface",
    "collectives": "skote.contracts.collectives:collectives",
    "norm_speed": "skote.contracts.speed:norm_speed",
    "captures": "skote.contracts.speed:captures",
    "paged_kv": "skote.contracts.paged:paged_kv",
}
"""Each check's name and the function that does it."""


@dataclass(frozen=True, slots=True)
class Subject:
    """What a check runs on: the model of the run as engine options, one device, the dtype, and a folder for files."""

    model: dict[str, Any]
    device: str
    dtype: str
    directory: Path

    def options(self, **changes: object) -> dict[str, Any]:
        """Keyword arguments of any engine."""
        return self.model | {"device": self.device, "dtype": self.dtype} | changes

    def log(self, index: int) -> Path:
        """Where the replica of that index writes what it prints."""
        return self.directory / f"replica-{index}.log"


def run_checks(names: Sequence[str], subject: Subject, say: Callable[[str], None]) -> dict[str, Figures]:
    """The figures of each check in `names`, in their order; `say` is told what comes next.

    Raises:
        UsageError: an unknown check, or one that needs another device.
        SkoteError: what a check ran into.
    """
    for name in names:
        if name not in CHECKS:
            raise UsageError(f"claim.contracts has {name!r}; there are {', '.join(CHECKS)}.")
    figures = {}
    for name in names:
        say(f"Checking {name.replace('_', ' ')}")
        check: Check = pkgutil.resolve_name(CHECKS[name])
        figures[name] = check(subject)
        for figure, value in figures[name].items():
            say(f"  {figure.replace('_', ' ')}: {_said(value)}")
    return figures


def _said(value: float | list[float]) -> str:
    if not isinstance(value, list):
        return f"{value:g}"
    return f"{statistics.median(value):g} (median of {len(value)}, {min(value):g} to {max(value):g})"


def need_cuda(name: str, subject: Subject) -> None:
    """Raises:
    UsageError: the subject's device is no CUDA device.
    """
    if not subject.device.startswith("cuda"):
        raise UsageError(f"The check {name!r} needs a CUDA device: run it with devices=cuda:0, not {subject.device}.")


def prompts(vocab: int, lengths: Sequence[int]) -> list[tuple[int, ...]]:
    """One prompt of each length, the same ids every time, all different from their first token on."""
    return [
        tuple((17 + 31 * row + 7 * place * (row + 1)) % (vocab - 3) + 3 for place in range(length))
        for row, length in enumerate(lengths)
    ]


def greedy(engine: Engine, ids: Sequence[Sequence[int]], tokens: int) -> list[list[int]]:
    """The next `tokens` greedy tokens of each row of `ids`, run as one batch."""
    requests = [Request(f"row-{row}", tuple(prompt), tokens, ignore_eos=True) for row, prompt in enumerate(ids)]
    rows: list[list[int]] = [[] for _ in requests]

    def emit(row: int, token_ids: Sequence[int]) -> None:
        rows[row].extend(token_ids)

    reasons: list[FinishReason] = engine.generate(requests, emit)
    if len(reasons) != len(rows):
        raise UsageError(f"{type(engine).__name__} ended {len(reasons)} rows of {len(rows)}.")
    return rows


def differing(one: Sequence[Sequence[int | str]], other: Sequence[Sequence[int | str]]) -> int:
    """How many rows of the two are not equal."""
    return sum(list(a) != list(b) for a, b in zip(one, other, strict=True))
