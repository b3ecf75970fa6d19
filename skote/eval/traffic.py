"""What became of a schedule: how late requests left, how fast they were sent, and what their batches padded."""

from __future__ import annotations

from typing import Any

import pandas as pd

from skote.eval.derive import PASS, Measured
from skote.eval.stats import percentile


def traffic(measured: Measured, manifest: dict[str, Any]) -> dict[str, Any] | None:
    """The section "traffic" of metrics.json, an entry an arm; None where no schedule said when requests are sent."""
    if "schedule" not in manifest["workload"]:
        return None
    return {arm: _traffic(measured.requests[measured.requests["arm"] == arm]) for arm in measured.arms}


def padded_share(rows: pd.DataFrame) -> float | None:
    """Of the prompt tokens that launches compute, each row as long as its longest, those that are padding.

    A launch is what one replica began with at one moment (`admitted_ns`): rows that join a running batch are one each,
    and pad nothing. None where nothing was begun with.
    """
    launches = rows.groupby([*PASS, "replica", "admitted_ns"])["input_tokens"]
    computed = float((launches.size() * launches.max()).sum())
    return 1 - float(launches.sum().sum()) / computed if computed else None


def _traffic(rows: pd.DataFrame) -> dict[str, Any]:
    lag = ((rows["dispatched_ns"] - rows["scheduled_ns"]) / 1e6).to_numpy(dtype="float64")
    return {
        "offered_req_s": _rate(rows, "scheduled_ns"),
        "sent_req_s": _rate(rows, "dispatched_ns"),
        "dispatch_lag_ms": {f"p{q}": percentile(lag, q) for q in (50, 95, 99)} | {"max": float(lag.max())},
        "padded_share": padded_share(rows),
        "backlog_share": _backlog_share(rows),
    }


def _backlog_share(rows: pd.DataFrame) -> float:
    """Of a pass's requests those that were not answered yet when the last one was due, in the mean over passes.

    Where the load is sustained they are the few that run; a queue that grows from first to last makes them many.
    """
    last_due = rows.groupby(PASS)["scheduled_ns"].transform("max")
    return float((rows["end_ns"] > last_due).groupby([rows[key] for key in PASS]).mean().mean())


def _rate(rows: pd.DataFrame, stamp: str) -> float | None:
    """Requests a second over all passes: the gaps between their stamps over the time that these take."""
    passes = rows.groupby(PASS)[stamp]
    seconds = float((passes.max() - passes.min()).sum()) / 1e9
    return float((passes.size() - 1).sum()) / seconds if seconds > 0 else None
