from __future__ import annotations

import json

import numpy as np
import pandas as pd
import pytest
from scipy import stats as reference

from skote.eval.record import read_run
from skote.eval.summary import summarize


def test_figures_equal_those_of_an_independent_script(synthetic):
    directory = synthetic().write()
    metrics = summarize(read_run(directory))
    rows = pd.read_parquet(directory / "requests.parquet").query("phase == 'measure'")
    rows = rows.assign(e2el=(rows.last_token_ns - rows.dispatched_ns) / 1e6)
    candidate, baseline = (rows[rows.arm == arm] for arm in ("candidate", "baseline"))
    p50 = candidate.e2el.quantile(0.5) / baseline.e2el.quantile(0.5) - 1
    logs = np.log(candidate.groupby("block").e2el.quantile(0.5) / baseline.groupby("block").e2el.quantile(0.5))
    bounds = np.expm1(reference.t.interval(0.95, len(logs) - 1, loc=logs.mean(), scale=reference.sem(logs)))
    window = sum(
        part.last_token_ns.max() - part.dispatched_ns.min() for _, part in candidate.groupby(["block", "round"])
    )

    delta = metrics["deltas"]["e2el_ms"]["p50"]
    content = metrics["arms"]["candidate"]

    assert content["metrics"]["e2el_ms"]["p95"]["value"] == pytest.approx(np.percentile(candidate.e2el, 95))
    assert delta["delta_pct"] == pytest.approx(100 * p50, rel=1e-11)
    assert delta["interval_pct"] == pytest.approx(100 * bounds, rel=1e-10)
    assert content["throughput"]["output_tok_s"] == pytest.approx(candidate.output_tokens.sum() / (window / 1e9))


def test_verdict_of_a_plain_run(synthetic):
    metrics = summarize(read_run(synthetic().write()))

    assert metrics["verdict"]["label"] == "FASTER"
    assert metrics["exit_code"] == 0
    assert metrics["findings"] == []
    assert metrics["deltas"]["e2el_ms"]["p50"]["role"] == "primary"
    assert metrics["deltas"]["ttft_ms"]["p50"]["role"] == "secondary"
    assert metrics["deltas"]["output_tok_s"]["verdict"] == "FASTER"


def test_an_arm_against_itself_is_the_same(synthetic, timeline):
    same = {"candidate": "baseline", "baseline": "baseline"}
    run = read_run(synthetic(arms=same).write(lambda arm, block, request: timeline(0.2, 100 + request, [40.0] * 15)))
    metrics = summarize(run)

    assert metrics["verdict"]["label"] == "SAME"
    assert metrics["deltas"]["e2el_ms"]["p50"]["delta_pct"] == 0


def test_intervals_are_refused_with_the_reason(synthetic):
    metrics = summarize(read_run(synthetic(blocks=3).write()))
    e2el = metrics["arms"]["candidate"]["metrics"]["e2el_ms"]

    assert e2el["p95"]["interval"] is None
    assert e2el["p95"]["reason"] == "n=36 < 72"
    assert metrics["deltas"]["e2el_ms"]["p50"]["interval_pct"] is None
    assert metrics["verdict"] == {
        "label": "INCONCLUSIVE",
        "reason": "too_few_blocks",
        "metric": "e2el_ms",
        "percentile": "p50",
        "valid": True,
    }
    assert metrics["exit_code"] == 0


def test_p95_has_its_interval_from_72_requests_on(synthetic):
    metrics = summarize(read_run(synthetic(blocks=6, requests=12).write()))

    assert metrics["arms"]["candidate"]["metrics"]["e2el_ms"]["p95"]["interval"] is not None
    assert metrics["arms"]["candidate"]["metrics"]["e2el_ms"]["p99"]["reason"] == "n=72 < 368"


def test_a_difference_of_a_percentile_takes_as_many_requests_as_its_interval(synthetic):
    """Each block's p95 of 12 requests is little else than their largest: with 72 in all it counts, with 60 not."""
    enough, fewer = (summarize(read_run(synthetic(blocks=blocks).write()))["deltas"]["e2el_ms"] for blocks in (6, 5))

    assert enough["p95"]["interval_pct"] is not None
    assert enough["p99"]["reason"] == "too_few_samples"
    assert fewer["p95"]["delta_pct"] is not None
    assert (fewer["p95"]["interval_pct"], fewer["p95"]["verdict"]) == (None, "INCONCLUSIVE")
    assert fewer["p95"]["reason"] == "too_few_samples"
    assert fewer["p50"]["interval_pct"] is not None


def test_a_gain_of_a_rate_points_upwards(synthetic):
    """The smallest gain that would have shown: of a latency below 100 %, of a rate above that of the latency."""
    deltas = summarize(read_run(synthetic(seed=2).write()))["deltas"]
    latency, rate = deltas["e2el_ms"]["p50"]["detectable_pct"], deltas["output_tok_s"]["detectable_pct"]
    rows = read_run(synthetic(seed=2).write()).requests.query("phase == 'measure'")
    passes = rows.groupby(["arm", "block"]).agg(first=("dispatched_ns", "min"), last=("last_token_ns", "max"))
    logs = -np.log(passes.loc["candidate"].diff(axis=1)["last"] / passes.loc["baseline"].diff(axis=1)["last"])
    reach = (reference.t.ppf(0.975, 5) + reference.t.ppf(0.8, 5)) * reference.sem(logs)

    assert 0 < latency < 100
    assert rate == pytest.approx(100 * np.expm1(np.log1p(0.02) + reach))


def test_figures_have_twelve_digits_that_every_machine_agrees_on(synthetic):
    value = summarize(read_run(synthetic().write()))["deltas"]["e2el_ms"]["p50"]["delta_pct"]

    assert value == float(f"{value:.12g}")


def test_failures_stand_at_the_end_of_the_adjusted_tail(synthetic, timeline):
    """One of ten requests fails: the plain p95 is finite, the adjusted one is not, and the run ends with 1."""
    run = read_run(
        synthetic(requests=10, blocks=1, arms={"candidate": "baseline"}).write(
            lambda arm, block, request: timeline(0.2, 100, [40.0] * 15, ok=request != 4)
        )
    )
    metrics = summarize(run)
    candidate = metrics["arms"]["candidate"]

    assert candidate["requests"] == {"scheduled": 10, "ok": 9, "failed": 1}
    assert candidate["metrics"]["e2el_ms"]["p95"]["value"] == 700
    assert candidate["metrics"]["adj_e2el_ms"]["n"] == 10
    assert candidate["metrics"]["adj_e2el_ms"]["p50"]["value"] == 700
    assert candidate["metrics"]["adj_e2el_ms"]["p95"]["value"] == "inf"
    assert metrics["exit_code"] == 1


def test_exit_code_is_1_where_every_request_failed(synthetic, timeline):
    run = read_run(synthetic(blocks=1).write(lambda arm, block, request: timeline(0.2, 100, [40.0], ok=False)))
    metrics = summarize(run)

    assert metrics["exit_code"] == 1
    assert metrics["arms"]["candidate"]["metrics"]["e2el_ms"]["p50"]["value"] is None
    assert metrics["arms"]["candidate"]["throughput"]["output_tok_s"] is None
    json.dumps(metrics, allow_nan=False)


@pytest.mark.parametrize(("status", "code"), [("complete", 0), ("interrupted", 1), ("failed", 1)])
def test_exit_code_follows_the_status(synthetic, status, code):
    metrics = summarize(read_run(synthetic(blocks=5, manifest={"status": status, "error": "It broke."}).write()))

    assert metrics["exit_code"] == code


def test_an_invalid_run_has_no_other_verdict(synthetic):
    metrics = summarize(read_run(synthetic(manifest={"parity": None}).write()))

    assert metrics["verdict"]["label"] == "INVALID"
    assert metrics["verdict"]["valid"] is False
    assert metrics["exit_code"] == 2


def test_users_tail_is_the_slow_one(synthetic, timeline):
    run = read_run(
        synthetic(requests=11, blocks=1, arms={"candidate": "baseline"}).write(
            lambda arm, block, request: timeline(0.2, 100, [10.0 * (request + 1)] * 15)
        )
    )
    metrics = summarize(run)["arms"]["candidate"]["metrics"]

    assert metrics["tpot_ms"]["p50"]["value"] == 60
    assert metrics["tps_user"]["p50"]["value"] == pytest.approx(1000 / 60)
    assert metrics["tps_user"]["p95"]["value"] == pytest.approx(1000 / 105)
    low, high = metrics["tps_user"]["p50"]["interval"]
    assert low < 1000 / 60 < high


def test_pooled_metrics_have_no_interval(synthetic):
    itl = summarize(read_run(synthetic().write()))["arms"]["candidate"]["metrics"]["itl_ms"]

    assert itl["n"] == 72 * 15
    assert itl["p50"]["interval"] is None
    assert itl["p50"]["reason"] == "pooled tokens of one request are not independent"


def test_the_content_is_json_and_the_same_every_time(synthetic):
    directory = synthetic(blocks=20, requests=3).write()
    once, again = (json.dumps(summarize(read_run(directory)), allow_nan=False) for _ in range(2))

    assert once == again
    assert json.loads(once)["deltas"]["e2el_ms"]["p50"]["method"] == "bootstrap"


def test_a_split_arm_has_what_it_moves_and_the_energy_of_both_its_devices(synthetic, monkeypatch):
    builder = synthetic()
    read = read_run(builder.write())
    moved = {"tensors_per_token": 46, "bytes_per_token": 5000}
    read.manifest["arms"]["baseline"]["replicas"][0] |= {"device": "cuda:0+cuda:1"}
    read.manifest["arms"]["baseline"]["replicas"][0]["info"]["device_transfers"] = moved
    asked = []
    monkeypatch.setattr("skote.eval.summary.joules_per_token", lambda measured, arm, devices: asked.append(devices))
    metrics = summarize(read)

    assert metrics["arms"]["baseline"]["device_transfers"] == moved
    assert "device_transfers" not in metrics["arms"]["candidate"]
    assert sorted(asked) == [["cpu"], ["cuda:0", "cuda:1"]]
