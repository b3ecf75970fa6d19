"""Service level objectives: the limits of a request's latencies, how many requests meet them, and the goodput."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pandas as pd

from skote.eval.derive import Measured
from skote.types import Completion, UsageError

Z95 = 1.959963984540054
SINCE_SCHEDULED = {"ttft_ms": "ttft_sched_ms", "e2el_ms": "e2el_sched_ms"}
"""A request that leaves late is late for its user: these limits hold from the moment it was scheduled."""


@dataclass
class SloConfig:
    """What a request has to keep; a limit that is null plays no part.

    Attributes:
        name: what reports call it.
        ttft_ms: from the scheduled moment to the first token.
        tpot_ms: between two tokens, in the mean of a request; one of a single token keeps any.
        e2el_ms: from the scheduled moment to the last token.
        attainment: the share of all scheduled requests that have to keep every limit.
        stop: whether a load by the clock ends as soon as too many have missed for `attainment` to be reached.
    """

    name: str = ""
    ttft_ms: float | None = None
    tpot_ms: float | None = None
    e2el_ms: float | None = None
    attainment: float = 0.99
    stop: bool = False

    @property
    def limits(self) -> dict[str, float]:
        """The limits that play a part, in ms."""
        named = {"ttft_ms": self.ttft_ms, "tpot_ms": self.tpot_ms, "e2el_ms": self.e2el_ms}
        return {name: limit for name, limit in named.items() if limit is not None}


def check_slo(config: SloConfig) -> None:
    """Check the limits.

    Raises:
        UsageError: a limit that is not above 0, or a share outside (0, 1].
    """
    for name, limit in config.limits.items():
        if not limit > 0:
            raise UsageError(f"slo.{name} must be above 0, or null for no limit, got {limit:g}.")
    if not 0 < config.attainment <= 1:
        raise UsageError(f"slo.attainment must lie in (0, 1], got {config.attainment:g}.")


def recorded_slo(manifest: dict[str, Any]) -> SloConfig:
    """The objectives of a run, from its manifest; a run that is older than they has none."""
    return SloConfig(**(manifest["config"].get("slo") or {}))


def keeps(requests: pd.DataFrame, limits: dict[str, float]) -> pd.DataFrame:
    """Whether each of `Measured.requests` keeps each limit, a column a limit; one that failed keeps none."""
    ok = requests["status"] == "ok"
    kept = {}
    for name, limit in limits.items():
        values = requests[SINCE_SCHEDULED.get(name, name)]
        alone = requests["output_tokens"] <= requests["first_chunk_tokens"] if name == "tpot_ms" else False
        kept[name] = ok & ((values <= limit) | alone)
    return pd.DataFrame(kept, index=requests.index)


class Watch:
    """Counts what misses the limits while a run goes on, of an arm that is to get `scheduled` requests."""

    def __init__(self, config: SloConfig, scheduled: int) -> None:
        self._config, self._scheduled, self._missed = config, scheduled, 0

    def note(self, scheduled_ns: int, completion: Completion) -> None:
        """A request that was scheduled then has ended."""
        self._missed += not _kept(scheduled_ns, completion, self._config.limits)

    @property
    def is_hopeless(self) -> bool:
        """Whether `attainment` lies above the interval of the share that would keep the limits if all others did."""
        if not (self._config.stop and self._config.limits):
            return False
        return wilson(self._scheduled - self._missed, self._scheduled)[1] < self._config.attainment


def _kept(scheduled_ns: int, completion: Completion, limits: dict[str, float]) -> bool:
    """`keeps`, of a completion that is in no table yet."""
    chunks = completion.chunks
    if completion.status != "ok" or not chunks:
        return False
    first_ns, last_ns = chunks[0].t_ns, chunks[-1].t_ns
    later = len(completion.output_ids) - chunks[0].n_tokens
    values = {
        "ttft_ms": (first_ns - scheduled_ns) / 1e6,
        "tpot_ms": (last_ns - first_ns) / 1e6 / later if later > 0 else 0.0,
        "e2el_ms": (last_ns - scheduled_ns) / 1e6,
    }
    return all(values[name] <= limit for name, limit in limits.items())


def attainment(measured: Measured, manifest: dict[str, Any]) -> dict[str, Any] | None:
    """The section "slo" of metrics.json, an entry an arm; None for a run without limits."""
    config = recorded_slo(manifest)
    if not config.limits:
        return None
    return {"config": asdict(config), "arms": {arm: _attained(measured, arm, config) for arm in measured.arms}}


def _attained(measured: Measured, arm: str, config: SloConfig) -> dict[str, Any]:
    rows = measured.requests[measured.requests["arm"] == arm]
    kept = keeps(rows, config.limits)
    every = kept.all(axis=1)
    met, scheduled = int(every.sum()), len(rows)
    passes = measured.passes[measured.passes["arm"] == arm]
    seconds = float(passes["window_s"].sum())
    low, high = wilson(met, scheduled)
    return {
        "scheduled": scheduled,
        "met": met,
        "attainment": met / scheduled,
        "interval": [low, high],
        "attained": met / scheduled >= config.attainment,
        "by_limit": {name: float(kept[name].mean()) for name in kept},
        "by_block": [float(every[rows["block"] == block].mean()) for block in np.unique(rows["block"])],
        "goodput_req_s": met / seconds if seconds > 0 else None,
    }


def wilson(successes: int, trials: int) -> tuple[float, float]:
    """The 95 % interval of a share, by Wilson's score: within [0, 1], and of use also at 0 and `trials`.

    It takes the trials for independent; requests that wait in one queue are less than that.
    """
    share, z2 = successes / trials, Z95 * Z95
    center = (share + z2 / (2 * trials)) / (1 + z2 / trials)
    half = Z95 / (1 + z2 / trials) * math.sqrt(share * (1 - share) / trials + z2 / (4 * trials * trials))
    return max(0.0, center - half), min(1.0, center + half)
