"""Which requests the differences of latencies leave out, as a finding."""

from __future__ import annotations

from collections.abc import Iterator

from skote.eval.derive import Measured
from skote.eval.finding import Finding, requests


def survivor_findings(measured: Measured) -> Iterator[Finding]:
    """Where a request failed: how many finished ones have no counterpart, and what is compared without them."""
    if not measured.pairs_survivors:
        return
    ok = (measured.requests["status"] == "ok").to_numpy(dtype=bool)
    alone = int((ok & ~measured.finished_by_all).sum())
    left = int(measured.finished_by_all.sum()) // len(measured.arms)
    yield Finding(
        "warning",
        "survivors",
        alone,
        0,
        f"Differences of latencies are over the {requests(left)} that both arms finished: {requests(alone)} that one "
        "arm finished and the other did not are left out.",
    )
