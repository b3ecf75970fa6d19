"""Verdicts of claims, rule by rule, against intervals that leave no doubt which one it has to be."""

from __future__ import annotations

from typing import Any

import pytest

from skote.eval.claims import ClaimConfig, OpenPartConfig, RuleConfig, check_claim, claim_line, judge_claim
from skote.types import UsageError

DONE = {"status": "complete", "findings": [], "exit_code": 0}


def rule(**changes: Any) -> dict[str, Any]:
    figure = "deltas.e2el_ms.p50"
    return vars(RuleConfig("p50", figure, -23.04, "%", "lower", 3.04)) | changes


def claim(*rules: dict[str, Any], open_parts: tuple[dict[str, str], ...] = ()) -> dict[str, Any]:
    return vars(ClaimConfig("E01", "Faster", "-23 %", "a page")) | {"rules": list(rules), "open": list(open_parts)}


def judge(claim: dict[str, Any], contracts: dict[str, Any] | None = None, **metrics: Any) -> dict[str, Any]:
    return judge_claim({"config": {"claim": claim}, "contracts": contracts or {}}, DONE | metrics)


def delta(value: float | None, interval: list[float] | None) -> dict[str, Any]:
    reason = None if interval else "too_few_blocks"
    return {"e2el_ms": {"p50": {"delta_pct": value, "interval_pct": interval, "reason": reason}}}


@pytest.mark.parametrize(
    ("interval", "verdict", "code"),
    [
        ([-60.0, -40.0], "HOLDS", 0),
        ([-25.0, -20.0], "HOLDS", 0),  # -23.04 + 3.04 is the edge, and counts
        ([-25.0, -19.9], "DIRECTION ONLY", 1),
        ([-9.0, -1.0], "DIRECTION ONLY", 1),
        ([-30.0, 1.0], "INCONCLUSIVE", 3),
        ([-9.0, 1.0], "NOT REPRODUCED", 1),
        ([3.0, 9.0], "NOT REPRODUCED", 1),
    ],
)
def test_a_lower_figure_is_judged_by_its_whole_interval(interval: list[float], verdict: str, code: int) -> None:
    judged = judge(claim(rule()), deltas=delta(sum(interval) / 2, interval))
    assert (judged["claim"]["verdict"], judged["exit_code"]) == (verdict, code)


@pytest.mark.parametrize(
    ("value", "verdict"), [(2.4, "HOLDS"), (2.0, "HOLDS"), (1.5, "DIRECTION ONLY"), (0.9, "NOT REPRODUCED")]
)
def test_a_higher_figure_without_an_interval_is_judged_as_it_stands(value: float, verdict: str) -> None:
    higher = rule(
        figure="contracts.tf32.speedup", claimed=2.0, direction="higher", tolerance=0.0, neutral=1.0, unit="x"
    )
    judged = judge(claim(higher), {"tf32": {"speedup": value}})["claim"]
    assert judged["verdict"] == verdict
    assert judged["rules"][0]["claimed_text"] == "at least 2 x"
    assert judged["rules"][0]["measured_text"] == f"{value:g} x"


@pytest.mark.parametrize(
    ("value", "verdict"), [(0, "HOLDS"), (2, "HOLDS"), (3, "NOT REPRODUCED"), (-3, "NOT REPRODUCED")]
)
def test_an_equal_figure_may_be_off_by_the_tolerance(value: float, verdict: str) -> None:
    equal = rule(figure="contracts.it.count", claimed=0.0, direction="equal", tolerance=2.0)
    assert judge(claim(equal), {"it": {"count": value}})["claim"]["verdict"] == verdict


@pytest.mark.parametrize(
    ("interval", "verdict", "code"),
    [
        ([-1.0, 1.5], "HOLDS", 0),
        ([-2.0, 2.0], "HOLDS", 0),
        ([1.0, 2.1], "INCONCLUSIVE", 3),
        ([-9.0, 9.0], "INCONCLUSIVE", 3),
        ([2.1, 3.0], "NOT REPRODUCED", 1),
        ([-3.0, -2.1], "NOT REPRODUCED", 1),
    ],
)
def test_an_equal_figure_is_judged_by_its_whole_interval(interval: list[float], verdict: str, code: int) -> None:
    equal = rule(claimed=0.0, direction="equal", tolerance=2.0)
    judged = judge(claim(equal), deltas=delta(sum(interval) / 2, interval))
    assert (judged["claim"]["verdict"], judged["exit_code"]) == (verdict, code)


@pytest.mark.parametrize(
    ("repeats", "interval", "verdict"),
    [
        # Of nine the median's interval runs from the second to the eighth: P(B <= 1) = 10 / 512 on either side.
        ([1.0, 2.1, 2.2, 2.3, 2.4, 2.5, 2.6, 2.7, 9.0], [2.1, 2.7], "HOLDS"),
        ([1.0, 1.9, 2.2, 2.3, 2.4, 2.5, 2.6, 2.7, 9.0], [1.9, 2.7], "DIRECTION ONLY"),
        ([0.5, 0.6, 2.2, 2.3, 2.4, 2.5, 2.6, 2.7, 9.0], [0.6, 2.7], "INCONCLUSIVE"),
        ([2.4, 2.4, 2.4, 2.4, 2.4], None, "INCONCLUSIVE"),
    ],
)
def test_a_timed_figure_of_a_check_is_judged_by_the_interval_of_its_repeats(
    repeats: list[float], interval: list[float] | None, verdict: str
) -> None:
    faster = rule(figure="contracts.tf32.speedup", claimed=2.0, direction="higher", tolerance=0.0, neutral=1.0)
    judged = judge(claim(faster), {"tf32": {"speedup": repeats, "agreement_pct": 99.5}})
    figures = judged["contracts"]["tf32"]
    assert (figures["speedup"]["value"], figures["speedup"]["interval"]) == (2.4, interval)
    assert (figures["speedup"]["n"], figures["agreement_pct"]) == (len(repeats), 99.5)
    assert judged["claim"]["verdict"] == verdict


def test_a_yes_counts_as_one() -> None:
    passed = rule(figure="parity.passed", claimed=1.0, direction="equal", tolerance=0.0, unit="")
    assert judge(claim(passed), parity={"passed": True})["claim"]["verdict"] == "HOLDS"
    assert judge(claim(passed), parity={"passed": False})["claim"]["verdict"] == "NOT REPRODUCED"


def test_the_worst_rule_decides() -> None:
    good, bad = rule(), rule(figure="contracts.it.count", claimed=0.0, direction="equal")
    judged = judge(claim(good, bad), {"it": {"count": 9.0}}, deltas=delta(-50.0, [-60.0, -40.0]))["claim"]
    assert [each["verdict"] for each in judged["rules"]] == ["HOLDS", "NOT REPRODUCED"]
    assert judged["verdict"] == "NOT REPRODUCED"


@pytest.mark.parametrize("deltas", [delta(-50.0, None), delta(None, None), {}])
def test_a_figure_without_its_interval_says_nothing(deltas: dict[str, Any]) -> None:
    assert judge(claim(rule()), deltas=deltas)["claim"]["verdict"] == "INCONCLUSIVE"


def test_the_speed_of_a_wrong_output_is_not_reproduced() -> None:
    finding = {"severity": "invalid", "code": "parity_failed", "sentence": "Parity failed: tokens differ."}
    judged = judge(claim(rule()), deltas=delta(-50.0, [-60.0, -40.0]), findings=[finding], exit_code=2)
    assert judged["claim"]["verdict"] == "NOT REPRODUCED"
    assert judged["claim"]["reason"].endswith("Parity failed: tokens differ.")
    assert judged["exit_code"] == 2


@pytest.mark.parametrize(
    "changes",
    [
        {"status": "interrupted"},
        {"findings": [{"severity": "invalid", "code": "idle_arm_busy", "sentence": "It computed."}]},
    ],
)
def test_a_run_that_is_no_evidence_is_inconclusive(changes: dict[str, Any]) -> None:
    judged = judge(claim(rule()), deltas=delta(-50.0, [-60.0, -40.0]), **changes)
    assert judged["claim"]["verdict"] == "INCONCLUSIVE"


@pytest.mark.parametrize(
    ("verdicts", "verdict"),
    [(["PENDING", "NOT TESTABLE HERE"], "PENDING"), (["NOT TESTABLE HERE"], "NOT TESTABLE HERE")],
)
def test_a_claim_without_rules_is_what_its_parts_are(verdicts: list[str], verdict: str) -> None:
    parts = tuple(vars(OpenPartConfig("two GPUs", each, "a host with two")) for each in verdicts)
    judged = judge(claim(open_parts=parts))
    assert (judged["claim"]["verdict"], judged["exit_code"]) == (verdict, 3)
    assert judged["claim"]["reason"].startswith("Two GPUs: a host with two.")


def test_the_line_of_a_claim_without_rules_says_its_verdict_once() -> None:
    pending, untestable = (vars(OpenPartConfig("one part", each, "code")) for each in ("PENDING", "NOT TESTABLE HERE"))
    alone = judge(claim(open_parts=(untestable,)))["claim"]
    assert claim_line(alone) == "E01, Skotergy 2: NOT TESTABLE HERE. One part: code."
    mixed = judge(claim(open_parts=(pending, untestable)))["claim"]
    assert claim_line(mixed) == "E01, Skotergy 2: PENDING. One part: code. NOT TESTABLE HERE: one part: code."


def test_no_claim_adds_nothing() -> None:
    assert judge_claim({"config": {"claim": vars(ClaimConfig())}}, DONE) == {}
    assert judge_claim({"config": {}}, DONE) == {}


def test_the_line_has_claimed_beside_measured() -> None:
    judged = judge(claim(rule()), deltas=delta(-50.0, [-60.0, -40.0]))["claim"]
    assert claim_line(judged) == ("E01, Skotergy 2: HOLDS. p50: claimed at most -23.04 %, measured -50 (-60 to -40) %.")


@pytest.mark.parametrize(
    ("bad", "sentence"),
    [
        (ClaimConfig("E01"), "neither rules nor open parts"),
        (ClaimConfig("E01", rules=[RuleConfig("p50", "deltas", direction="down")]), "direction 'down'"),
        (ClaimConfig("E01", rules=[RuleConfig("p50", "deltas", tolerance=-1.0)]), "tolerance below 0"),
        (ClaimConfig("E01", open=[OpenPartConfig("it", "LATER")]), "got 'LATER'"),
    ],
)
def test_claims_that_cannot_be_judged_are_refused(bad: ClaimConfig, sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        check_claim(bad)


def test_arms_run_unless_every_rule_is_a_contract() -> None:
    assert ClaimConfig().measures
    assert ClaimConfig("E01", rules=[RuleConfig("p50", "deltas.e2el_ms.p50")]).measures
    assert not ClaimConfig("E10", rules=[RuleConfig("rows", "contracts.pad_token.rows_added_within")]).measures
    assert not ClaimConfig("E12", open=[OpenPartConfig("it")]).measures
