"""One finding about a run's validity, as data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Severity = Literal["invalid", "warning", "info"]
SEVERITIES: tuple[Severity, ...] = ("invalid", "warning", "info")


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was checked and found wanting: the figure, the limit that it broke, one sentence for a reader."""

    severity: Severity
    code: str
    observed: float | int | str | None
    limit: float | int | str | None
    sentence: str


def requests(count: int) -> str:
    """`count` requests, in words."""
    return f"{count} request" if count == 1 else f"{count} requests"
