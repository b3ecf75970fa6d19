from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats as reference

from skote.eval.stats import (
    Interval,
    Verdict,
    block_effect,
    bootstrap_interval,
    detectable_effect,
    judge,
    minimum_samples,
    percentile,
    percentile_interval,
    t_interval,
)


def floats(*values):
    return np.array(values, dtype=np.float64)


def test_percentile_interpolates_linearly():
    assert percentile(floats(40, 10, 30, 20), 50) == 25
    assert percentile(floats(10, 20, 30, 40, 50), 95) == pytest.approx(48)


@pytest.mark.parametrize(
    ("values", "q", "expected"),
    [
        ((1, 2, math.inf), 50, 2),
        ((1, 2, math.inf), 25, 1.5),
        ((1, 2, math.inf), 75, math.inf),
        ((1, 2, math.inf, math.inf), 50, math.inf),
        ((math.inf, math.inf), 50, math.inf),
        ((math.inf, 3), 0, 3),
    ],
)
def test_percentile_with_failures_as_infinity(values, q, expected):
    assert percentile(floats(*values), q) == expected


@pytest.mark.parametrize(("q", "least"), [(50, 6), (95, 72), (99, 368), (5, 72)])
def test_minimum_samples_is_where_the_extreme_order_statistic_leaves_the_tail(q, least):
    share = max(q, 100 - q) / 100

    assert minimum_samples(q) == least
    assert share**least <= 0.025 < share ** (least - 1)


@pytest.mark.parametrize(("q", "n"), [(95, 71), (99, 367), (50, 5)])
def test_interval_is_refused_below_the_minimum(q, n):
    assert percentile_interval(np.arange(n, dtype=np.float64), q) is None
    assert percentile_interval(np.arange(n + 1, dtype=np.float64), q) is not None


def test_interval_of_the_median_of_twenty_is_the_sixth_to_the_fifteenth():
    """The tabulated sign-test interval."""
    assert percentile_interval(np.arange(1, 21, dtype=np.float64), 50) == Interval(6, 15)


@pytest.mark.parametrize("q", [50, 95, 99])
@pytest.mark.parametrize("n", [368, 401, 1000])
def test_interval_holds_the_confidence_and_is_the_narrowest_that_does(q, n):
    found = percentile_interval(np.arange(1, n + 1, dtype=np.float64), q)
    below = reference.binom(n, q / 100)

    assert found is not None
    low, high = found.low, found.high
    assert below.cdf(low - 1) <= 0.025 < below.cdf(low)
    assert below.sf(high - 1) <= 0.025 < below.sf(high - 2)


def test_t_interval_equals_scipy():
    values = floats(0.1, -0.2, 0.05, 0.3, -0.1, 0.0)
    expected = reference.t.interval(0.95, 5, loc=values.mean(), scale=reference.sem(values))

    assert t_interval(values) == pytest.approx(expected, rel=1e-12)


def test_t_interval_by_hand():
    """Mean 3, s = sqrt(2.5), t(4, 0.975) = 2.776445: the half width is 1.96324."""
    assert t_interval(floats(1, 2, 3, 4, 5)) == pytest.approx((1.036757, 4.963243), abs=1e-6)


def test_bootstrap_interval_agrees_with_scipy_and_repeats():
    values = np.random.default_rng(3).normal(0.02, 0.05, 25)
    expected = reference.bootstrap(
        (values,), np.mean, n_resamples=10_000, method="percentile", rng=np.random.default_rng(4)
    ).confidence_interval

    assert bootstrap_interval(values, seed=5) == pytest.approx((expected.low, expected.high), abs=1e-3)
    assert bootstrap_interval(values, seed=5) == bootstrap_interval(values, seed=5)


def test_block_effect_is_refused_below_five_blocks():
    effect = block_effect(floats(1, 1, 1, 1), floats(2, 2, 2, 2), seed=0)

    assert (effect.blocks, effect.interval, effect.center, effect.detectable) == (4, None, None, None)


def test_block_effect_of_equal_ratios_is_exact():
    baseline = floats(100, 120, 90, 110, 105)
    effect = block_effect(0.8 * baseline, baseline, seed=0)

    assert effect.method == "t"
    assert effect.center == pytest.approx(-0.2)
    assert (effect.interval.low, effect.interval.high) == pytest.approx((-0.2, -0.2))
    assert effect.detectable == pytest.approx(0.02)  # without spread anything beyond the threshold shows


@pytest.mark.parametrize(("blocks", "method"), [(19, "t"), (20, "bootstrap")])
def test_method_changes_at_twenty_blocks(blocks, method):
    rng = np.random.default_rng(1)
    effect = block_effect(rng.lognormal(0, 0.1, blocks), rng.lognormal(0, 0.1, blocks), seed=1)

    assert effect.method == method


def test_swapping_the_arms_mirrors_the_interval():
    rng = np.random.default_rng(2)
    one, other = rng.lognormal(0.1, 0.1, 8), rng.lognormal(0, 0.1, 8)
    forth, back = block_effect(one, other, seed=0), block_effect(other, one, seed=0)

    assert 1 + forth.interval.low == pytest.approx(1 / (1 + back.interval.high))


def test_one_in_twenty_intervals_misses_no_effect():
    rng = np.random.default_rng(11)
    logs = rng.normal(0, 0.05, (2000, 6))
    misses = sum(not low <= 0 <= high for low, high in map(t_interval, logs))

    assert reference.binomtest(misses, len(logs), 0.05).pvalue > 0.01


def test_detectable_effect_is_seen_with_the_stated_power():
    logs = np.random.default_rng(8).normal(0, 0.03, 12)
    standard_error = reference.sem(logs)
    shift = math.log1p(-0.02) - math.log1p(-detectable_effect(logs, 0.02))
    power = reference.nct.sf(reference.t.ppf(0.975, 11), 11, shift / standard_error)

    assert power == pytest.approx(0.8, abs=0.02)


@pytest.mark.parametrize(
    ("low", "high", "label", "reason"),
    [
        (-0.10, -0.03, "FASTER", "beyond_threshold"),
        (0.03, 0.10, "SLOWER", "beyond_threshold"),
        (-0.01, 0.015, "SAME", "within_threshold"),
        (-0.02, 0.02, "SAME", "within_threshold"),
        (-0.10, -0.02, "INCONCLUSIVE", "interval_crosses_threshold"),
        (-0.10, 0.10, "INCONCLUSIVE", "interval_crosses_threshold"),
    ],
)
def test_judge(low, high, label, reason):
    mirrored = {"FASTER": "SLOWER", "SLOWER": "FASTER"}

    assert judge(Interval(low, high)) == Verdict(label, reason)
    assert judge(Interval(low, high), higher_is_better=True) == Verdict(mirrored.get(label, label), reason)


def test_judge_without_interval():
    assert judge(None) == Verdict("INCONCLUSIVE", "too_few_blocks")
