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
    percentile_effect,
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
    """The expanded interval is scipy's percentile interval at the confidence whose z sqrt(24 / 25) is t(24, 0.975)."""
    values = np.random.default_rng(3).normal(0.02, 0.05, 25)
    z = reference.t.ppf(0.975, 24) * math.sqrt(25 / 24)
    expected = reference.bootstrap(
        (values,),
        np.mean,
        n_resamples=10_000,
        method="percentile",
        confidence_level=1 - 2 * reference.norm.sf(z),
        rng=np.random.default_rng(4),
    ).confidence_interval

    assert bootstrap_interval(values, seed=5) == pytest.approx((expected.low, expected.high), abs=1e-3)
    assert bootstrap_interval(values, seed=5) == bootstrap_interval(values, seed=5)


def test_bootstrap_interval_of_a_symmetric_sample_is_the_t_interval():
    """So the width does not jump where the method changes."""
    values = reference.norm.ppf((np.arange(20) + 0.5) / 20)

    assert bootstrap_interval(values, seed=0) == pytest.approx(t_interval(values), rel=0.04)


def test_one_in_twenty_bootstrap_intervals_misses_no_effect():
    rng = np.random.default_rng(12)
    logs = rng.normal(0, 0.05, (400, 20))
    bounds = [bootstrap_interval(values, seed) for seed, values in enumerate(logs)]
    misses = sum(not low <= 0 <= high for low, high in bounds)

    assert reference.binomtest(misses, len(logs), 0.05).pvalue > 0.05


def test_block_effect_is_refused_below_five_blocks():
    effect = block_effect(floats(1, 1, 1, 1), floats(2, 2, 2, 2), seed=0)

    assert (effect.blocks, effect.interval, effect.center, effect.detectable) == (4, None, None, None)
    assert effect.log_half_width is None
    assert effect.verdict() == Verdict("INCONCLUSIVE", "too_few_blocks")


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


def test_half_width_is_that_of_the_log_ratios_wherever_the_interval_lies():
    """Log ratios 1, 2, 3, 4, 5 hundredths: 2.776445 sqrt(2.5) / sqrt(5) hundredths, also when all are 0.7 lower."""
    logs = floats(0.01, 0.02, 0.03, 0.04, 0.05)
    for shift in (0, -0.7):
        effect = block_effect(np.exp(logs + shift), np.ones(5), seed=0)

        assert effect.log_half_width == pytest.approx(0.0196324, abs=1e-7)


def by_block(blocks, size, scale=1.0):
    rng = np.random.default_rng(size)
    return {block: scale * np.exp(rng.normal(0, 0.1, size)) for block in range(blocks)}


@pytest.mark.parametrize("q", [50, 95])
def test_percentile_effect_is_the_block_effect_of_each_blocks_percentile(q):
    candidate, baseline = by_block(6, 12, 0.9), by_block(6, 13)
    expected = block_effect(
        np.array([np.percentile(candidate[block], q) for block in range(6)]),
        np.array([np.percentile(baseline[block], q) for block in range(6)]),
        seed=0,
    )

    assert percentile_effect(candidate, baseline, range(6), q, seed=0) == expected


def test_percentile_effect_leaves_out_blocks_that_have_no_ratio():
    """Block 0 is not paired, 1 has no samples of the baseline, 2 has a percentile of zero."""
    candidate, baseline = by_block(8, 12), by_block(8, 12)
    del baseline[1]
    candidate[2] = np.zeros(12)

    assert percentile_effect(candidate, baseline, range(1, 8), 50, seed=0).blocks == 5


@pytest.mark.parametrize(("q", "least"), [(95, 72), (99, 368)])
def test_percentile_effect_is_refused_below_the_minimum_of_the_smaller_arm(q, least):
    many = {block: np.arange(1, 101, dtype=np.float64) for block in range(8)}
    enough = {block: np.arange(1, least / 8 + 1) for block in range(8)}
    short = enough | {3: enough[3][1:]}

    assert percentile_effect(many, enough, range(8), q, seed=0).interval is not None
    for arms in ((many, short), (short, many)):
        refused = percentile_effect(*arms, range(8), q, seed=0)

        assert refused.interval is None
        assert refused.verdict() == Verdict("INCONCLUSIVE", "too_few_samples")


def test_too_few_blocks_come_before_too_few_samples():
    assert percentile_effect(by_block(4, 5), by_block(4, 5), range(4), 99, seed=0).refused == "too_few_blocks"


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


def test_detectable_gain_of_a_rate_is_an_increase():
    logs = np.random.default_rng(8).normal(0, 0.03, 12)
    gain = detectable_effect(logs, 0.02, higher_is_better=True)
    shift = (math.log1p(gain) - math.log1p(0.02)) / reference.sem(logs)

    assert reference.nct.sf(reference.t.ppf(0.975, 11), 11, shift) == pytest.approx(0.8, abs=0.02)
    assert block_effect(np.exp(logs), np.ones(12), 0, higher_is_better=True).detectable == pytest.approx(gain)


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


def test_an_effect_is_judged_by_its_interval():
    baseline = floats(100, 120, 90, 110, 105)
    effect = block_effect(0.9 * baseline, baseline, seed=0)

    assert effect.verdict() == Verdict("FASTER", "beyond_threshold")
    assert effect.verdict(higher_is_better=True) == Verdict("SLOWER", "beyond_threshold")
    assert effect.verdict(threshold=0.15) == Verdict("SAME", "within_threshold")
