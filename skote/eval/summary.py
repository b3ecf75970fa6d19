"""metrics.json: every figure of a report, with its n, its interval and its verdict, recomputed from a run's files."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import numpy as np

from skote.eval.balance import by_replica, imbalance
from skote.eval.check import judge_checks
from skote.eval.claims import judge_claim
from skote.eval.derive import ADJUSTED, METRICS, THROUGHPUTS, Measured, Metric, Samples
from skote.eval.device_state import device_states, joules_per_token
from skote.eval.finding import Finding
from skote.eval.findings import find
from skote.eval.record import Run, manifest_sha256
from skote.eval.roofline import roofline, step_kernels
from skote.eval.schema_version import SCHEMA_VERSION
from skote.eval.session_figures import sessions
from skote.eval.slo import attainment
from skote.eval.stats import (
    THRESHOLD,
    Effect,
    Floats,
    Interval,
    block_effect,
    minimum_samples,
    percentile,
    percentile_effect,
    percentile_interval,
)
from skote.eval.steady import STEADY_METRICS, Steady, steady_state
from skote.eval.traffic import traffic
from skote.types import ExitCode, device_parts

PERCENTILES = (50, 95, 99)
PRIMARY = ("e2el_ms", "p50")  # the run's verdict; every other one is secondary
DIGITS = 12  # significant ones: far more than a clock has, and fewer than processors agree on in a logarithm


def summarize(run: Run) -> dict[str, Any]:
    """The content of metrics.json: JSON values only, +inf as the string "inf", what is undefined as null.

    The same files always give the same content, to the last digit.
    """
    return summarize_measured(Measured(run), run.manifest)


def summarize_measured(measured: Measured, manifest: dict[str, Any]) -> dict[str, Any]:
    """`summarize` of the run that both are of."""
    content = _content(manifest, measured)
    content |= judge_checks(manifest, content)
    rounded: dict[str, Any] = _rounded(content | judge_claim(manifest, content))
    return rounded


def _content(manifest: dict[str, Any], measured: Measured) -> dict[str, Any]:
    findings = find(measured, manifest)
    arms = {arm: _arm(measured, arm, manifest) for arm in measured.arms}
    deltas = _deltas(measured, arms, int(manifest["seed"])) if len(arms) == 2 else {}
    return {
        "schema_version": SCHEMA_VERSION,
        "run_id": manifest["run_id"],
        "manifest_sha256": manifest_sha256(manifest),
        "status": manifest["status"],
        "exit_code": int(_exit_code(measured, manifest, findings)),
        "verdict": _verdict(deltas, findings, manifest["status"]),
        "arms": arms,
        "deltas": deltas,
        "steady": _steady(measured, manifest),
        "stop": manifest["stop"],
        "findings": [asdict(finding) for finding in findings],
        "parity": _parity(manifest["parity"]),
        "harness": manifest["harness"],
        "roofline": manifest.get("roofline"),
        "devices": device_states(measured),
        "threshold_pct": 100 * THRESHOLD,
    } | _where_used(
        traffic=traffic(measured, manifest), slo=attainment(measured, manifest), sessions=sessions(measured, manifest)
    )


def _where_used(**sections: dict[str, Any] | None) -> dict[str, Any]:
    """The sections of what a run may do without; one that has done so has no key for it."""
    return {name: section for name, section in sections.items() if section is not None}


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
    own = [replica["device"] for replica in replicas]
    used = [part for device in own for part in device_parts(device)] or manifest["devices"]
    transfers = [replica["info"].get("device_transfers") for replica in replicas]
    spread = by_replica(measured, arm, own)
    return {
        "engine": known["engine"],
        "requests": {"scheduled": len(rows), "ok": len(ok), "failed": failed},
        "tokens": {"input": int(ok["input_tokens"].sum()), "output": int(ok["output_tokens"].sum())},
        "blocks": int(rows["block"].nunique()),
        "window_s": float(windows["window_s"].sum()),
        "metrics": metrics,
        "throughput": {name: measured.throughput(arm).get(name) for name in THROUGHPUTS},
        "j_per_output_token": joules_per_token(measured, arm, used),
        "by_replica": spread,
        "imbalance": imbalance(spread),
        "roofline": roofline(measured, arm, manifest),
        "step_kernels": step_kernels(manifest, arm),
        "peak_memory_bytes": [replica["peak_memory_bytes"] for replica in replicas],
        "peak_device_memory_bytes": [replica.get("peak_device_memory_bytes") for replica in replicas],
        "load_s": [replica["load_s"] for replica in replicas],
        "compile_s": [replica["info"].get("compile_s") for replica in replicas],
        **({"device_transfers": transfers[0]} if transfers and transfers[0] else {}),
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
        samples = {arm: measured.samples(arm, metric, compared=True) for arm in arms}
        deltas[metric.name] = _latency_deltas(measured, metric, arms, samples, seed)
    rates = {arm: measured.block_throughput(arm) for arm in arms}
    for name in THROUGHPUTS:
        by_block = {arm: {block: found[name] for block, found in rates[arm].items() if found} for arm in arms}
        overall = {arm: arms[arm]["throughput"][name] for arm in arms}
        deltas[name] = _rate_delta(overall, by_block, measured, seed)
    return deltas


def _latency_deltas(
    measured: Measured, metric: Metric, arms: dict[str, Any], samples: Mapping[str, Samples], seed: int
) -> dict[str, Any]:
    """The deltas of a latency, over the `samples` of each arm that are compared.

    Where those are all that an arm has, their percentiles are the ones that `arms` holds already.
    """
    figures = {arm: content["metrics"][metric.name] for arm, content in arms.items()}
    if measured.pairs_survivors:
        figures = {arm: _distribution(samples[arm].values, metric) for arm in arms}
    blocks = {arm: samples[arm].by_block() for arm in arms}
    deltas = {}
    for q in PERCENTILES:
        effect = percentile_effect(blocks["candidate"], blocks["baseline"], measured.paired_blocks, q, seed)
        overall = {arm: figures[arm][f"p{q}"]["value"] for arm in figures}
        deltas[f"p{q}"] = _delta(overall, effect, primary=(metric.name, f"p{q}") == PRIMARY)
    return deltas


def _rate_delta(
    overall: dict[str, float | None], by_block: dict[str, dict[int, float]], measured: Measured, seed: int
) -> dict[str, Any]:
    """The delta of a throughput, over the paired blocks in which both figures are positive, as a ratio needs them."""
    candidate, baseline = by_block["candidate"], by_block["baseline"]
    blocks = [b for b in measured.paired_blocks if candidate.get(b, 0.0) > 0 and baseline.get(b, 0.0) > 0]
    effect = block_effect(
        np.array([candidate[b] for b in blocks], dtype=np.float64),
        np.array([baseline[b] for b in blocks], dtype=np.float64),
        seed,
        higher_is_better=True,
    )
    return _delta(overall, effect, higher_is_better=True)


def _steady(measured: Measured, manifest: dict[str, Any]) -> dict[str, Any] | None:
    """The steady state's figures, laid out as those of the whole run are; None where the load has none."""
    found = steady_state(measured, manifest["workload"])
    if found is None:
        return None
    arms = {arm: _steady_arm(found[arm]) for arm in measured.arms}
    if len(arms) < 2:
        return {"arms": arms, "deltas": {}}
    seed = int(manifest["seed"])
    deltas: dict[str, Any] = {}
    for metric in (metric for metric in METRICS if metric.name in STEADY_METRICS):
        samples = {arm: found[arm].compared[metric.name] for arm in arms}
        deltas[metric.name] = _latency_deltas(measured, metric, arms, samples, seed)
        for delta in deltas[metric.name].values():
            delta["role"] = "secondary"
    overall = {arm: found[arm].output_tok_s for arm in arms}
    rates = {arm: found[arm].block_output_tok_s for arm in arms}
    return {"arms": arms, "deltas": deltas | {"output_tok_s": _rate_delta(overall, rates, measured, seed)}}


def _steady_arm(steady: Steady) -> dict[str, Any]:
    metrics = {
        metric.name: _distribution(steady.latencies[metric.name].values, metric)
        for metric in METRICS
        if metric.name in steady.latencies
    }
    return {"requests": steady.requests, "metrics": metrics, "throughput": {"output_tok_s": steady.output_tok_s}}


def _delta(
    overall: dict[str, float | None], effect: Effect, *, primary: bool = False, higher_is_better: bool = False
) -> dict[str, Any]:
    candidate, baseline = overall["candidate"], overall["baseline"]
    verdict = effect.verdict(higher_is_better=higher_is_better)
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


def _verdict(deltas: dict[str, Any], findings: list[Finding], status: str) -> dict[str, Any]:
    """The run's label: INVALID, or that of the primary delta, or null where one arm ran.

    A run that did not come to its end has none: its timed outputs were never judged.
    """
    valid = all(finding.severity != "invalid" for finding in findings)
    metric, q = PRIMARY
    primary = deltas[metric][q] if deltas else None
    label = primary["verdict"] if primary else None
    reason = primary["reason"] if primary else None
    if status != "complete" and primary:
        label, reason = "INCONCLUSIVE", "run_incomplete"
    return {
        "label": label if valid else "INVALID",
        "reason": reason,
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


def _rounded(value: Any) -> Any:  # noqa: ANN401 (a JSON value)
    """The same JSON value with every number rounded to `DIGITS` significant digits."""
    if isinstance(value, dict):
        return {key: _rounded(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_rounded(entry) for entry in value]
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value


def _number(value: float) -> float | str:
    return "inf" if math.isinf(value) else value


def _pair(interval: Interval | None) -> list[float | str] | None:
    return None if interval is None else [_number(interval.low), _number(interval.high)]


def _inverse(value: float | None) -> float | None:
    return 1000 / value if value else None
