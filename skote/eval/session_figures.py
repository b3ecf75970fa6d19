"""What conversations took: as a whole, and turn by turn."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from skote.eval.derive import PASS, Measured
from skote.eval.stats import percentile

METRICS = ("ttft_ms", "e2el_ms", "tpot_ms")


def sessions(measured: Measured, manifest: dict[str, Any]) -> dict[str, Any] | None:
    """The section "sessions" of metrics.json, an entry an arm; None for a run of single requests."""
    if "turns" not in manifest["workload"]:
        return None
    return {arm: _sessions(measured.requests[measured.requests["arm"] == arm]) for arm in measured.arms}


def _sessions(rows: pd.DataFrame) -> dict[str, Any]:
    parts = rows["request_id"].astype(str).str.rsplit("-t", n=1, expand=True)
    rows = rows.assign(session=parts[0], turn=parts[1].astype(int), ok=rows["status"] == "ok")
    whole = rows.groupby([*PASS, "session"])
    complete = whole["ok"].all()
    seconds = ((whole["last_token_ns"].max() - whole["scheduled_ns"].min()) / 1e9)[complete]
    return {
        "sessions": len(complete),
        "complete": int(complete.sum()),
        "duration_s": _percentiles(seconds),
        "by_turn": [
            {"turn": int(str(turn)), "ok": int(of["ok"].sum()), "input_tokens_mean": float(of["input_tokens"].mean())}
            | {name: _percentiles(of.loc[of["ok"], name]) for name in METRICS}
            for turn, of in rows.groupby("turn")
        ],
    }


def _percentiles(values: pd.Series[float]) -> dict[str, float | None]:
    known = np.asarray(values.dropna(), dtype=np.float64)
    return {f"p{q}": percentile(known, q) if known.size else None for q in (50, 95)}
