from __future__ import annotations

import pytest

from skote.eval.check import CheckConfig, check_limits, judge_checks
from skote.types import UsageError


def delta(value, interval, reason="interval_crosses_threshold"):
    return {"delta_pct": value, "interval_pct": interval, "reason": reason}


def metrics(low=-3.0, high=1.0, failed=0, parity=True, tok_s=100.0, **more):
    arm = {"requests": {"scheduled": 10, "failed": 0}, "throughput": {"output_tok_s": tok_s}}
    candidate = arm | {"requests": {"scheduled": 10, "failed": failed}}
    same = {"p50": delta((low + high) / 2, [low, high])}
    return {
        "status": "complete",
        "exit_code": 1 if failed else 0,
        "arms": {"candidate": candidate, "baseline": arm},
        "deltas": {"e2el_ms": same, "ttft_ms": same, "tpot_ms": same},
        "parity": {"passed": parity, "sentence": "As it was."},
        "findings": [],
    } | more


def judged(content, **limits):
    none = {"p50_delta_max": None, "ratio_to_baseline_max": None, "tok_s_min": None, "error_rate_max": None}
    result = judge_checks({"config": {"check": {"name": "ci", "parity": False} | none | limits}}, content)
    return [(check["name"], check["outcome"]) for check in result["checks"]], result["exit_code"]


@pytest.mark.parametrize(
    ("limit", "outcome", "code"),
    [(1.0, "passed", 0), (0.9, "inconclusive", 3), (-3.0, "inconclusive", 3), (-3.1, "failed", 1)],
)
def test_a_limit_on_a_difference_is_judged_by_the_whole_interval(limit, outcome, code):
    assert judged(metrics(-3.0, 1.0), p50_delta_max=limit) == ([("p50_delta_max", outcome)], code)


def test_a_ratio_is_asked_of_each_median():
    content = metrics(-3.0, 1.0)
    content["deltas"]["ttft_ms"] = {"p50": delta(20.0, [12.0, 28.0])}
    checks, code = judged(content, ratio_to_baseline_max=1.1)

    assert checks == [
        ("ratio_to_baseline_max.e2el", "passed"),
        ("ratio_to_baseline_max.ttft", "failed"),
        ("ratio_to_baseline_max.tpot", "passed"),
    ]
    assert code == 1


def test_without_an_interval_nothing_passes():
    content = metrics()
    content["deltas"]["e2el_ms"] = {"p50": delta(-50.0, None, "too_few_blocks")}
    assert judged(content, p50_delta_max=5.0) == ([("p50_delta_max", "inconclusive")], 3)


@pytest.mark.parametrize("deltas", [{}, {"e2el_ms": {"p50": delta(None, None)}}])
def test_without_a_second_figure_the_limit_is_broken(deltas):
    assert judged(metrics(deltas=deltas), p50_delta_max=5.0) == ([("p50_delta_max", "failed")], 1)


@pytest.mark.parametrize(("limit", "outcome", "code"), [(0.2, "passed", 0), (0.1, "failed", 1)])
def test_failed_requests_are_tolerated_up_to_the_limit(limit, outcome, code):
    assert judged(metrics(failed=2), error_rate_max=limit) == ([("error_rate_max", outcome)], code)


def test_a_failed_request_is_exit_1_where_no_limit_is_set():
    assert judged(metrics(failed=1), tok_s_min=1.0) == ([("tok_s_min", "passed")], 1)


def test_an_invalid_or_unfinished_run_keeps_its_code():
    assert judged(metrics(exit_code=2), p50_delta_max=5.0)[1] == 2
    assert judged(metrics(exit_code=1, status="interrupted"), error_rate_max=1.0)[1] == 1


@pytest.mark.parametrize(("limit", "outcome"), [(100.0, "passed"), (100.1, "failed")])
def test_throughput_is_the_candidates(limit, outcome):
    assert judged(metrics(), tok_s_min=limit)[0] == [("tok_s_min", outcome)]


def test_parity_must_have_been_checked():
    assert judged(metrics(), parity=True)[0] == [("parity", "passed")]
    assert judged(metrics(parity=False), parity=True)[0] == [("parity", "failed")]
    assert judged(metrics() | {"parity": None}, parity=True) == ([("parity", "failed")], 1)


def test_nothing_is_judged_where_nothing_was_asked():
    assert judge_checks({"config": {}}, metrics()) == {"checks": [], "exit_code": 0}
    assert judge_checks({"config": {"check": {"name": "none"}}}, metrics(exit_code=1))["exit_code"] == 1


def test_the_outcome_of_a_reproduction_is_the_manifests():
    check = {"name": "outputs", "outcome": "failed", "observed": None, "limit": None, "sentence": "They differ."}
    result = judge_checks({"config": {"check": {"name": "reproduce"}}, "reproduction": [check]}, metrics())
    assert result == {"checks": [check], "exit_code": 1}


@pytest.mark.parametrize(
    ("config", "two_arms", "said"),
    [
        (CheckConfig("fast"), True, r"check\.name must be one of none, ci, reproduce, got 'fast'"),
        (CheckConfig("ci", ratio_to_baseline_max=0.0), True, r"check\.ratio_to_baseline_max must be above 0, got 0\.0"),
        (CheckConfig("ci", p50_delta_max=-100.0), True, r"check\.p50_delta_max .* must be above -100, .* got -100\.0"),
        (CheckConfig("ci", p50_delta_max=float("nan")), True, r"check\.p50_delta_max .* got nan"),
        (CheckConfig("ci", tok_s_min=float("nan")), True, r"check\.tok_s_min must be above 0, got nan"),
        (CheckConfig("ci", error_rate_max=5), True, r"check\.error_rate_max is a share from 0 to 1, got 5"),
        (CheckConfig("ci", p50_delta_max=1, parity=True), False, r"turn off check\.p50_delta_max, check\.parity"),
        (CheckConfig("none", tok_s_min=5), True, r"judged with check=ci alone"),
    ],
)
def test_limits_that_make_no_sense_are_refused(config, two_arms, said):
    with pytest.raises(UsageError, match=said):
        check_limits(config, two_arms=two_arms)


def test_one_arm_may_be_held_to_a_throughput():
    check_limits(CheckConfig("ci", tok_s_min=5, error_rate_max=0.0), two_arms=False)
