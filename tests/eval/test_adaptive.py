from __future__ import annotations

import math

import numpy as np
import pytest

from skote.eval.adaptive import Decision, StopRule, decide, primary_effect
from skote.eval.derive import Measured
from skote.eval.record import read_run
from skote.eval.stats import Effect, Interval, block_effect
from skote.eval.summary import summarize
from skote.types import UsageError

RULE = StopRule(half_width=0.015, max_blocks=20, max_seconds=600)


def effect(half_width, center=0.0, blocks=6):
    low, high = math.expm1(center - half_width), math.expm1(center + half_width)
    return Effect(blocks, math.expm1(center), Interval(low, high), "t", 0.1)


@pytest.mark.parametrize(
    ("half_width", "blocks", "seconds", "expected"),
    [
        (0.0149, 6, 60, Decision(0, "narrow_enough")),
        (0.0151, 6, 60, Decision(2)),
        (0.0149, 5, 60, Decision(1)),  # one order of the two is missing
        (0.0151, 19, 60, Decision(1)),
        (0.0151, 20, 60, Decision(0, "blocks_spent")),
        (0.0149, 20, 6000, Decision(0, "narrow_enough")),
        (0.0151, 24, 60, Decision(0, "blocks_spent")),  # a workload of more blocks than the budget
        (0.0151, 6, 450, Decision(2)),  # 75 s a block: eight take 600 s
        (0.0151, 6, 451, Decision(0, "seconds_spent")),
    ],
)
def test_decision(half_width, blocks, seconds, expected):
    assert decide(effect(half_width, blocks=blocks), blocks, seconds, RULE) == expected


def test_an_odd_budget_is_spent_to_its_end():
    rule = StopRule(half_width=0.015, max_blocks=7, max_seconds=600)

    assert decide(effect(0.1), 6, 60, rule) == Decision(1)
    assert decide(effect(0.1, blocks=7), 7, 60, rule) == Decision(0, "blocks_spent")


def test_goes_on_while_there_is_no_interval():
    refused = Effect(2, None, None, None, None, "too_few_blocks")

    assert decide(refused, 2, 10, RULE) == Decision(2)


@pytest.mark.parametrize("blocks", [6, 24])
def test_where_the_effect_lies_plays_no_part(blocks):
    """Twice as fast, twice as slow or equal: the same spread of the ratios gives the same decision."""
    logs = np.random.default_rng(4).normal(0, 0.03, blocks)
    rule = StopRule(half_width=0.03, max_blocks=100, max_seconds=600)
    found = [block_effect(np.exp(logs + shift), np.ones(blocks), seed=0) for shift in (-math.log(2), 0, math.log(2))]

    assert len({round(each.log_half_width, 12) for each in found}) == 1
    assert len({decide(each, blocks, 10, rule) for each in found}) == 1


@pytest.mark.parametrize("half_width", [0.0, -1.0, 1.0, 1.5, math.nan, math.inf])
def test_a_width_is_no_percentage(half_width):
    with pytest.raises(UsageError, match=r"^measure\.stop\.half_width must lie between 0 and 1, got"):
        StopRule(half_width, 10, 60.0)


@pytest.mark.parametrize("name", ["max_blocks", "max_seconds"])
def test_rule_without_a_budget_is_refused(name):
    with pytest.raises(UsageError, match=rf"^measure\.stop\.{name} must be above 0, got 0"):
        StopRule(**{"half_width": 0.01, "max_blocks": 10, "max_seconds": 60.0} | {name: 0})


def test_primary_effect_is_what_the_run_is_judged_by(synthetic):
    run = read_run(synthetic(seed=3, blocks=7).write())
    found = primary_effect(Measured(run), seed=3)
    delta = summarize(run)["deltas"]["e2el_ms"]["p50"]

    assert delta["interval_pct"] == pytest.approx([100 * found.interval.low, 100 * found.interval.high], rel=1e-11)
    assert delta["detectable_pct"] == pytest.approx(100 * found.detectable, rel=1e-11)
    assert (delta["verdict"], delta["reason"]) == (found.verdict().label, found.verdict().reason)


def test_primary_effect_of_some_blocks_is_that_of_a_run_that_ended_there(synthetic):
    directory = synthetic(seed=5, blocks=8).write()
    run = read_run(directory)
    first = run.requests["block"] < 6
    ended = Measured(type(run)(directory, run.requests[first], run.tokens[run.tokens["block"] < 6], run.manifest))

    assert primary_effect(Measured(run), 5, range(6)) == primary_effect(ended, 5)
