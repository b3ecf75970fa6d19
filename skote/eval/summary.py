"""metrics.json: every figure of a report, with its n, its interval and its verdict, recomputed from a run's files."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

import numpy as np

from skote.eval.derive import ADJUSTED, METRICS, THROUGHPUTS, Measured, Metric
from skote.eval.findings import Finding, find
from skote.eval.record import SCHEMA_VERSION, Run
from skote.eval.roofline import roofline, step_kernels
from skote.eval.stats import (
    THRESHOLD,
    Effect,
    Floats,
    Interval,
    block_effect,
    judge,
    minimum_samples,
    percentile,
    percentile_interval,
)
from skote.types import ExitCode

PERCENTILES = (50, 95, 99)
PRIMARY = ("e2el_ms", "p50")  # the run's verdict; every other one is secondary


def summarize(run: Run) -> dict[str, Any]:
    """The content of metrics.json: JSON values only, +inf as the string "inf", what is undefined as null.

    The same files always give the same content, to the last digit.
    """
    measured = Measured(run)
    manifest = run.manifest
    findings = find(measured, manifest)
    arms = {arm: _arm(measured, arm, manifest) for arm in measured.arms}
    deltas = _deltas(measured, arms, int(manifest["seed"])) if len(arms) == 2 else {}
    return {
        "schema_version": SCHEMA_VERSION,
        "run_id": manifest["run_id"],
        "status": manifest["status"],
        "exit_code": int(_exit_code(measured, manifest, findings)),
        "verdict": _verdict(deltas, findings),
        "arms": arms,
        "deltas": deltas,
        "findings": [asdict(finding) for finding in findings],
        "parity": _parity(manifest["parity"]),
        "harness": manifest["harness"],
        "roofline": manifest.get("roofline"),
        "threshold_pct": 100 * THRESHOLD,
    }


def _arm(measured: Measured, arm: str, manifest: dict[str, Any]) -> dict[str, Any]:
    rows = measured.requests[measured.requests["arm"] == arm]
    failed = measured.failures(arm)
    ok = rows[rows["status"] == "ok"]
    metrics = {metric.name: _distribution(measured.samples(arm, metric).values, metric) for metric in METRICS}
    for metric in METRICS:
        if metric.name in ADJUSTED:
            values = measured.samples(arm, metric).values
            adjusted = np.concatenate([values, np.full(failed, math.inf)])
            metrics[f"adj_{metric.name}"] = _distribution(adjusted, metric)
    metrics["tps_user"] = _per_user(metrics["tpot_ms"])
    windows = measured.passes[measured.passes["arm"] == arm]
    known = manifest["arms"].get(arm, {"engine": str(rows["engine"].iloc[0]), "replicas": []})
    replicas = known["replicas"]
    return {
        "engine": known["engine"],
        "requests": {"scheduled": len(rows), "ok": len(ok), "failed": failed},
        "tokens": {"input": int(ok["input_tokens"].sum()), "output": int(ok["output_tokens"].sum())},
        "blocks": int(rows["block"].nunique()),
        "window_s": float(windows["window_s"].sum()),
        "metrics": metrics,
        "throughput": {name: measured.throughput(arm).get(name) for name in THROUGHPUTS},
        "roofline": roofline(measured, arm, manifest),
        "step_kernels": step_kernels(manifest, arm),
        "peak_memory_bytes": [replica["peak_memory_bytes"] for replica in replicas],
        "load_s": [replica["load_s"] for replica in replicas],
        "compile_s": [replica["info"].get("compile_s") for replica in replicas],
    }


def _distribution(values: Floats, metric: Metric) -> dict[str, Any]:
    """n, mean and percentiles of `values [n]`; the samples of a pool are not independent, so a pool has no interval."""
    content: dict[str, Any] = {"unit": "ms", "per": metric.per, "n": values.size}
    content["mean"] = _number(float(values.mean())) if values.size else None
    for q in PERCENTILES:
        interval = percentile_interval(values, q) if metric.per == "request" else None
        reason = None
        if metric.per != "request":
            reason = f"pooled {metric.per}s of one request are not independent"
        elif interval is None:
            reason = f"n={values.size} < {minimum_samples(q)}"
        value = _number(percentile(values, q)) if values.size else None
        content[f"p{q}"] = {"value": value, "interval": _pair(interval), "reason": reason}
    return content


def _per_user(tpot: dict[str, Any]) -> dict[str, Any]:
    """1000 / tpot_ms, whose tail percentile is the slow one: p95 is what 95 % of the requests exceed."""
    content: dict[str, Any] = {"unit": "tok/s", "per": "request", "n": tpot["n"], "mean": None}
    for q in PERCENTILES:
        source = tpot[f"p{q}"]
        turned = source["interval"] and [_inverse(bound) for bound in reversed(source["interval"])]
        content[f"p{q}"] = {"value": _inverse(source["value"]), "interval": turned, "reason": source["reason"]}
    return content


def _deltas(measured: Measured, arms: dict[str, Any], seed: int) -> dict[str, Any]:
    deltas: dict[str, Any] = {}
    for metric in (metric for metric in METRICS if metric.compared):
        blocks = {arm: measured.samples(arm, metric).by_block() for arm in arms}
        deltas[metric.name] = {}
        for q in PERCENTILES:
            figures = [
                {block: percentile(values, q) for block, values in blocks[arm].items()}
                for arm in ("candidate", "baseline")
            ]
            overall = [arms[arm]["metrics"][metric.name][f"p{q}"]["value"] for arm in ("candidate", "baseline")]
            effect = _effect(measured, figures[0], figures[1], seed)
            primary = (metric.name, f"p{q}") == PRIMARY
            deltas[metric.name][f"p{q}"] = _delta(overall[0], overall[1], effect, primary=primary)
    rates = {arm: measured.block_throughput(arm) for arm in arms}
    for name in THROUGHPUTS:
        figures = [
            {block: values[name] for block, values in rates[arm].items() if values} for arm in ("candidate", "baseline")
        ]
        overall = [arms[arm]["throughput"][name] for arm in ("candidate", "baseline")]
        effect = _effect(measured, figures[0], figures[1], seed)
        deltas[name] = _delta(overall[0], overall[1], effect, higher_is_better=True)
    return deltas


def _effect(measured: Measured, candidate: dict[int, float], baseline: dict[int, float], seed: int) -> Effect:
    """The effect over the paired blocks in which both figures are positive, as a ratio needs them."""
    blocks = [b for b in measured.paired_blocks if candidate.get(b, 0.0) > 0 and baseline.get(b, 0.0) > 0]
    return block_effect(
        np.array([candidate[b] for b in blocks], dtype=np.float64),
        np.array([baseline[b] for b in blocks], dtype=np.float64),
        seed,
    )


def _delta(
    candidate: float | None,
    baseline: float | None,
    effect: Effect,
    *,
    primary: bool = False,
    higher_is_better: bool = False,
) -> dict[str, Any]:
    verdict = judge(effect.interval, higher_is_better=higher_is_better)
    return {
        "delta_pct": 100 * (candidate / baseline - 1) if candidate is not None and baseline else None,
        "interval_pct": effect.interval and [100 * effect.interval.low, 100 * effect.interval.high],
        "block_delta_pct": None if effect.center is None else 100 * effect.center,
        "detectable_pct": None if effect.detectable is None else 100 * effect.detectable,
        "blocks": effect.blocks,
        "method": effect.method,
        "verdict": verdict.label,
        "reason": verdict.reason,
        "role": "primary" if primary else "secondary",
    }


def _verdict(deltas: dict[str, Any], findings: list[Finding]) -> dict[str, Any]:
    """The run's label: INVALID, or that of the primary delta, or null where one arm ran."""
    valid = all(finding.severity != "invalid" for finding in findings)
    metric, q = PRIMARY
    primary = deltas[metric][q] if deltas else None
    label = primary["verdict"] if primary else None
    return {
        "label": label if valid else "INVALID",
        "reason": primary["reason"] if primary else None,
        "metric": metric,
        "percentile": q,
        "valid": valid,
    }


def _exit_code(measured: Measured, manifest: dict[str, Any], findings: list[Finding]) -> ExitCode:
    if any(finding.severity == "invalid" for finding in findings):
        return ExitCode.INVALID
    if manifest["status"] != "complete" or any(measured.failures(arm) for arm in measured.arms):
        return ExitCode.FAILED
    return ExitCode.DONE


def _parity(parity: dict[str, Any] | None) -> dict[str, Any] | None:
    """The parity section without the outputs' hashes, which are the manifest's."""
    return parity and {key: value for key, value in parity.items() if key != "outputs"}


def _number(value: float) -> float | str:
    return "inf" if math.isinf(value) else value


def _pair(interval: Interval | None) -> list[float | str] | None:
    return None if interval is None else [_number(interval.low), _number(interval.high)]


def _inverse(value: float | None) -> float | None:
    return 1000 / value if value else None
