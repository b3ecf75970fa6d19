"""How an arm's load was spread over its replicas."""

from __future__ import annotations

from typing import Any

import numpy as np

from skote.eval.derive import Measured
from skote.eval.stats import percentile


def by_replica(measured: Measured, arm: str, devices: list[str]) -> list[dict[str, Any]]:
    """A row a replica of an arm whose replicas run on `devices`; empty where there is one alone.

    `requests` ok and failed, `tokens` read and written by the finished ones, `share` of the arm's tokens, and p50 and
    p95 of `e2el_ms` and `queue_ms`, null without samples.
    """
    if len(devices) < 2:
        return []
    mine = measured.requests[measured.requests["arm"] == arm]
    finished = mine[mine["status"] == "ok"]
    tokens = finished["input_tokens"] + finished["output_tokens"]
    rows = []
    for index, device in enumerate(devices):
        own = mine[mine["replica"] == index]
        ok = int((own["status"] == "ok").sum())
        served = int(tokens[finished["replica"] == index].sum())
        row: dict[str, Any] = {
            "replica": index,
            "device": device,
            "requests": {"ok": ok, "failed": len(own) - ok},
            "tokens": served,
            "share": served / int(tokens.sum()) if len(tokens) else None,
        }
        for metric in ("e2el_ms", "queue_ms"):
            values = own[metric].dropna().to_numpy(dtype=np.float64)
            row[metric] = {f"p{q}": percentile(values, q) if values.size else None for q in (50, 95)}
        rows.append(row)
    return rows


def imbalance(rows: list[dict[str, Any]]) -> float | None:
    """The most loaded replica's tokens over the mean of all: 1 where the load is even; null without two or load."""
    served = [row["tokens"] for row in rows]
    return max(served) * len(served) / sum(served) if rows and sum(served) else None
