from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from scipy import stats as reference

from skote.eval.aa import (
    Noise,
    Outcome,
    adaptive_outcome,
    false_alarms,
    fixed_outcome,
    share_bound,
    simulate_run,
)
from skote.eval.adaptive import StopRule, primary_effect
from skote.eval.derive import Measured

README = Path(__file__).parent.parent.parent / "README.md"
QUIET = Noise(block=0, drift=0, burst_chance=0, outlier_chance=0, request=0)
BUDGET_40 = StopRule(half_width=0.015, max_blocks=40, max_seconds=math.inf)


def log_latencies(noise, seed=0, blocks=200):
    """Log latency `[blocks, arms, requests]` against the same request's of a run without noise."""

    def table(run):
        rows = run.requests.sort_values(["block", "arm", "dispatched_ns"], kind="stable")
        return np.log((rows.last_token_ns - rows.dispatched_ns).to_numpy(dtype=np.float64)).reshape(blocks, 2, 12)

    return table(simulate_run(seed, blocks, noise)) - table(simulate_run(seed, blocks, QUIET))


def with_only(**disturbances):
    settings = {"block": 0, "drift": 0, "burst_chance": 0, "outlier_chance": 0, "request": 0}
    return Noise(**settings | disturbances)


@pytest.mark.parametrize("effect", [0.0, -0.05, 0.3])
def test_without_noise_the_effect_comes_back(effect):
    found = primary_effect(Measured(simulate_run(1, 6, QUIET, effect)), seed=1)

    assert found.center == pytest.approx(effect, abs=1e-6)
    assert found.log_half_width == pytest.approx(0, abs=1e-6)


def test_both_arms_serve_the_same_requests_and_every_pair_of_blocks_has_both_orders():
    measured = Measured(simulate_run(2, 7, Noise(0.05)))
    first = measured.requests[measured.requests["round"] == 0].groupby("block")["arm"].first().tolist()

    assert measured.paired_blocks == list(range(7))
    assert all(set(first[start : start + 2]) == {"candidate", "baseline"} for start in (0, 2, 4))


def test_requests_of_a_pass_share_its_noise_and_the_arms_do_not():
    shifts = log_latencies(with_only(block=0.05))

    assert np.ptp(shifts, axis=2).max() < 1e-6
    assert shifts[:, 0, 0].std() == pytest.approx(0.05, rel=0.2)
    assert abs(reference.pearsonr(shifts[:, 0, 0], shifts[:, 1, 0]).statistic) < 0.2


def test_a_burst_slows_one_stretch_of_one_pass():
    slow = log_latencies(with_only(burst_chance=0.1, burst_factor=1.5)).reshape(400, 12) > 0.2
    edges = np.abs(np.diff(slow.astype(int), axis=1, prepend=0, append=0)).sum(axis=1)

    assert set(edges) == {0, 2}
    assert 0.05 < (edges == 2).mean() < 0.15


def test_an_outlier_is_one_request():
    slow = log_latencies(with_only(outlier_chance=0.02, outlier_factor=4.0))

    assert set(np.round(np.unique(slow), 4)) == {0.0, round(math.log(4), 4)}
    assert 0.01 < (slow > 1).mean() < 0.03


def test_drift_is_a_line_over_the_passes():
    run = simulate_run(3, 20, with_only(drift=0.005))
    quiet = simulate_run(3, 20, QUIET)
    starts = [each.requests.groupby(["block", "round"])["dispatched_ns"].min().to_numpy() for each in (run, quiet)]
    steps = np.diff(np.log(np.diff(starts[0]) / np.diff(starts[1])))

    assert np.ptp(steps) < 1e-6
    assert 0 < abs(steps[0]) < 0.005


def test_same_seed_same_outcome():
    assert fixed_outcome(5, 6, Noise(0.05)) == fixed_outcome(5, 6, Noise(0.05))


def test_adaptive_run_stops_at_once_where_the_ratios_agree_and_at_the_budget_where_they_do_not():
    rule = StopRule(half_width=0.015, max_blocks=9, max_seconds=math.inf)

    assert adaptive_outcome(0, 6, rule, QUIET) == Outcome("SAME", 6, True)
    assert adaptive_outcome(0, 6, rule, Noise(0.2)).blocks == 9


@pytest.mark.parametrize(("count", "runs"), [(0, 400), (12, 400), (399, 400)])
def test_bound_equals_scipy(count, runs):
    assert share_bound(count, runs) == pytest.approx(reference.binomtest(count, runs).proportion_ci(0.95).high)


def test_bound_by_hand():
    """None of n: 1 - 0.025^(1 / n). All of n: everything."""
    assert share_bound(0, 10) == pytest.approx(1 - 0.025**0.1)
    assert share_bound(10, 10) == 1


def test_only_faster_and_slower_are_false_alarms():
    labels = ["FASTER", "SLOWER", "SAME", "INCONCLUSIVE", "SAME"]

    assert false_alarms(Outcome(label, 6, True) for label in labels) == 2


@pytest.mark.slow
def test_at_most_one_in_twenty_equal_pairs_is_called_different():
    """The default run of six blocks at the worst noise, as the README has it.

    `benchmarks/aa_simulation.py` makes the whole table.
    """
    outcomes = [fixed_outcome(seed, 6, Noise(0.10)) for seed in range(400)]
    alarms, bound = false_alarms(outcomes), share_bound(false_alarms(outcomes), 400)
    [row] = [line for line in README.read_text(encoding="utf-8").splitlines() if line.startswith("| 6, the default |")]

    assert bound <= 0.05
    assert f"/ {alarms} of 400 |" in row
    assert f"/ {100 * bound:.1f} % |" in row


@pytest.mark.slow
def test_nine_in_ten_adaptive_runs_see_five_percent():
    outcomes = [adaptive_outcome(seed, 6, BUDGET_40, Noise(0.02), -0.05) for seed in range(100)]

    assert sum(outcome.label == "FASTER" for outcome in outcomes) >= 90
