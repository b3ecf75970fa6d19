"""Steady state: a run without the ramp and the drain of its passes, beside the figures of the whole.

While a closed loop of c requests fills, its first c requests find an emptier system than the later ones do, and while
it drains the last c do. So of every pass the c requests that were dispatched first and the c that were dispatched last
are left out. For the throughput the window of a pass of n requests reaches from the c-th end to the (n - c)-th, at
which the last request takes its slot: between the two the loop is full, and n - 2c requests end.

A burst has no steady state: all of its requests start at once, each belongs to the ramp or to the drain.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from skote.eval.derive import METRICS, Measured, Samples

STEADY_METRICS = ("e2el_ms", "ttft_ms", "tpot_ms")


@dataclass(frozen=True, slots=True)
class Steady:
    """One arm's steady state.

    `requests` that finished in it; `latencies` of `STEADY_METRICS`, and those of them that differences are over; output
    tokens a second over all passes, None where nothing is left, and in each block.
    """

    requests: int
    latencies: dict[str, Samples]
    compared: dict[str, Samples]
    output_tok_s: float | None
    block_output_tok_s: dict[int, float]


def steady_state(measured: Measured, workload: dict[str, Any]) -> dict[str, Steady] | None:
    """The steady state of every arm under the manifest's `workload`.

    None for a burst, for a load by the clock, and for one request at a time, where nothing ramps.
    """
    if workload["load"] != "closed" or workload["concurrency"] == 1:
        return None
    concurrency = int(workload["concurrency"])
    return {arm: _steady(measured, arm, concurrency) for arm in measured.arms}


def _steady(measured: Measured, arm: str, concurrency: int) -> Steady:
    rows = measured.requests[measured.requests["arm"] == arm]
    passes = [part for _, part in rows.groupby("block", sort=True)]
    kept = pd.concat([_without_ends(part, "dispatched_ns", concurrency) for part in passes])
    kept = kept[kept["status"] == "ok"]
    latencies = _latencies(kept)
    paired = measured.pairs_survivors
    compared = _latencies(kept[measured.finished_by_all[kept.index]]) if paired else latencies
    windows = {int(part["block"].iloc[0]): _window(part, concurrency) for part in passes}
    rates = {block: tokens / seconds for block, (seconds, tokens) in windows.items() if seconds > 0}
    seconds, tokens = np.sum(list(windows.values()), axis=0).tolist()
    return Steady(len(kept), latencies, compared, tokens / seconds if seconds > 0 else None, rates)


def _latencies(rows: pd.DataFrame) -> dict[str, Samples]:
    """The samples of `STEADY_METRICS`, in the order of `METRICS`."""
    samples = {}
    for name in (metric.name for metric in METRICS if metric.name in STEADY_METRICS):
        defined = rows[rows[name].notna()]
        samples[name] = Samples(defined[name].to_numpy(dtype=np.float64), defined["block"].to_numpy(dtype=np.int64))
    return samples


def _without_ends(rows: pd.DataFrame, stamp: str, concurrency: int) -> pd.DataFrame:
    """A pass's rows in the order of `stamp`, without the first and the last `concurrency`."""
    return rows.sort_values(stamp, kind="stable").iloc[concurrency:-concurrency]


def _window(rows: pd.DataFrame, concurrency: int) -> tuple[float, float]:
    """Seconds from a pass's c-th end to its (n - c)-th, and the output tokens of the requests that ended in them."""
    within = _without_ends(rows, "end_ns", concurrency)
    if within.empty:
        return 0.0, 0.0
    began_ns = rows["end_ns"].nsmallest(concurrency).iloc[-1]
    seconds = int(within["end_ns"].iloc[-1] - began_ns) / 1e9
    return seconds, float(within.loc[within["status"] == "ok", "output_tokens"].sum())
