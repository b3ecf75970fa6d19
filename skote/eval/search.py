"""The search for the highest load that keeps the service level objectives: which load is tried next, and what is known.

The search brackets first, by doubling and halving, and then takes the geometric middle of the bracket. A load counts as
kept where the whole interval of its attainment lies at the asked-for share or above, as missed where it lies below; one
that lies across is tried again with other requests, and after so many tries its share alone decides. A load that is not
sustained has missed, whatever the limits: one under which the queue grows from first to last.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from skote.eval.slo import wilson
from skote.types import UsageError

SATURATED_BACKLOG = 0.25
"""Of a pass's requests, those unanswered when the last one is due (`backlog_share`): above it the load is not
sustained, or the pass too short to tell. A load of 4/3 of what an arm can take leaves so many."""

Outcome = Literal["kept", "missed", "undecided"]


@dataclass
class SearchConfig:
    """What loads are tried. The load is `workload.arrivals.rate`, or `speed_up` of a trace.

    Attributes:
        start: the first load; null does not search.
        least, most: no load outside is tried.
        precision: the search ends where the lowest load that missed is no more than this share above the highest kept.
        max_probes: of an arm, tries of one load counted one by one.
        tries: of a load whose interval lies across the asked-for share.
        parity: compare the arms' outputs first, in a run of its own.
    """

    start: float | None = None
    least: float = 0.01
    most: float = 10_000.0
    precision: float = 0.1
    max_probes: int = 16
    tries: int = 3
    parity: bool = True


def check_search(config: SearchConfig, load: str, *, limited: bool) -> None:
    """Check the options of a search over a workload of that `load`.

    Raises:
        UsageError: one is out of its range; the load has no rate to search over; or there are no limits to keep.
    """
    if config.start is None:
        return
    if load not in ("constant", "poisson", "gamma", "trace"):
        raise UsageError(
            f"search.start looks for the highest rate, and workload.load={load} has none: choose constant, poisson, "
            "gamma or trace."
        )
    if not limited:
        raise UsageError("A search needs limits to keep: slo.ttft_ms, slo.tpot_ms or slo.e2el_ms, or slo=NAME.")
    if not 0 < config.least <= config.start <= config.most:
        raise UsageError(
            f"search.least, start and most must ascend from above 0, got {config.least:g}, {config.start:g} and "
            f"{config.most:g}."
        )
    if not config.precision > 0:
        raise UsageError(f"search.precision must be above 0, got {config.precision:g}.")
    for name in ("max_probes", "tries"):
        if getattr(config, name) < 1:
            raise UsageError(f"search.{name} must be at least 1, got {getattr(config, name)}.")


@dataclass(frozen=True, slots=True)
class Tried:
    """All tries of one load together: how many requests were scheduled, and how many met every limit."""

    load: float
    scheduled: int
    met: int
    tries: int = 1
    is_saturated: bool = False

    def outcome(self, share: float) -> Outcome:
        """Whether `share` of the requests, or more, meet the limits; never under a load that is not sustained."""
        if self.is_saturated:
            return "missed"
        low, high = wilson(self.met, self.scheduled)
        return "kept" if low >= share else "missed" if high < share else "undecided"

    def is_kept(self, share: float) -> bool:
        """`outcome`, and where that is undecided whether so many have."""
        outcome = self.outcome(share)
        return outcome == "kept" or (outcome == "undecided" and self.met / self.scheduled >= share)


@dataclass(frozen=True, slots=True)
class Bracket:
    """The highest load that kept the limits and the lowest above it that missed them; None where there is none."""

    kept: float | None
    missed: float | None


def bracket(tried: Sequence[Tried], share: float) -> Bracket:
    """What is known of the capacity. Where noise has a load kept above one that missed, the lower one counts."""
    missed = min((each.load for each in tried if not each.is_kept(share)), default=None)
    below = [each.load for each in tried if each.is_kept(share) and (missed is None or each.load < missed)]
    return Bracket(max(below, default=None), missed)


def next_load(tried: Sequence[Tried], config: SearchConfig, share: float) -> float | None:
    """The load to try next; None where the search has ended. Needs `config.start`."""
    if config.start is None or sum(each.tries for each in tried) >= config.max_probes:
        return None
    if not tried:
        return config.start
    open_ = [each for each in tried if each.outcome(share) == "undecided" and each.tries < config.tries]
    if open_:
        return open_[-1].load
    known = bracket(tried, share)
    if known.missed is None:
        load = min(config.most, 2 * (known.kept or config.start))
    elif known.kept is None:
        load = max(config.least, known.missed / 2)
    elif known.missed <= known.kept * (1 + config.precision):
        return None
    else:
        load = math.sqrt(known.kept * known.missed)
    return None if any(each.load == load for each in tried) else load


def knee(points: Sequence[tuple[float, float]]) -> float | None:
    """The load at which latency begins to rise: of `points` (load, latency) the one farthest below the line from the
    first to the last, both axes scaled to 0 to 1 (Satopaa et al., "Finding a Kneedle in a Haystack", 2011).

    None with fewer than three loads, or where latency does not rise.
    """
    ordered = sorted(points)
    (first_load, first), (last_load, last) = (ordered[0], ordered[-1]) if ordered else ((0.0, 0.0), (0.0, 0.0))
    if len(ordered) < 3 or last <= first or last_load <= first_load:
        return None
    below = [
        (load - first_load) / (last_load - first_load) - (latency - first) / (last - first) for load, latency in ordered
    ]
    best = max(range(len(ordered)), key=below.__getitem__)
    return ordered[best][0] if below[best] > 0 else None
