"""How near an arm's decode step comes to what its device can read, and where the step's time goes."""

from __future__ import annotations

from typing import Any

import pandas as pd

from skote.eval.derive import METRICS, Measured
from skote.eval.stats import percentile

TPOT = next(metric for metric in METRICS if metric.name == "tpot_ms")


def mean_context(requests: pd.DataFrame) -> float | None:
    """Positions that a decode step read on average, over the tokens after the first one of every finished request.

    The step that gives token k of a request reads its prompt and k - 1 tokens of its output: over its N tokens
    `input_tokens` + N / 2 on average, for each of N - 1 steps. None without such a step.
    """
    ok = requests[requests["status"] == "ok"]
    steps = (ok["output_tokens"] - 1).clip(lower=0)
    total = int(steps.sum())
    return float((steps * (ok["input_tokens"] + ok["output_tokens"] / 2)).sum() / total) if total else None


def roofline(measured: Measured, arm: str, manifest: dict[str, Any]) -> dict[str, float | None]:
    """The roofline of `arm`, null where something that it takes was not measured.

    `weight_bytes` and `kv_bytes`: what one decode step reads, one row at a time; `mean_context`: the positions that
    `kv_bytes` stands for; `floor_ms`: the time in which the device reads both; `achieved_share`: `floor_ms` / the
    median of `tpot_ms`.
    """
    model = manifest["model"]
    weights, position = model["bytes_per_token"], model.get("kv_bytes_per_token")
    bandwidth = (manifest.get("roofline") or {}).get("read_bandwidth_bytes_per_s")
    context = mean_context(measured.requests[measured.requests["arm"] == arm])
    kv = None if context is None or position is None else context * position
    floor_ms = None if kv is None or bandwidth is None else 1000 * (weights + kv) / bandwidth
    tpot = measured.samples(arm, TPOT).values
    return {
        "weight_bytes": weights,
        "mean_context": context,
        "kv_bytes": kv,
        "floor_ms": floor_ms,
        "achieved_share": floor_ms / percentile(tpot, 50) if floor_ms is not None and tpot.size else None,
    }


def step_kernels(manifest: dict[str, Any], arm: str) -> list[dict[str, Any]]:
    """The kernels of a decode step of the arm's first replica, the longest first, each with its `share` of their sum.

    Empty where the engine could not tell.
    """
    replicas = manifest["arms"].get(arm, {}).get("replicas", [])
    kernels = replicas[0]["info"].get("step_kernels", []) if replicas else []
    total = sum(kernel["us"] for kernel in kernels)
    longest_first = sorted(kernels, key=lambda kernel: -float(kernel["us"]))
    return [kernel | {"share": kernel["us"] / total} for kernel in longest_first]
