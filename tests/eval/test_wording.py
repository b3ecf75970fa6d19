from __future__ import annotations

import pytest

from skote.eval.wording import (
    arm_labels,
    decimal_bytes,
    devices,
    interval,
    number,
    percent,
    percent_interval,
    refusal,
    share,
    size,
    stop_sentence,
    verdict_sentence,
)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (1723.4, "1,723"),
        (719.56, "719.6"),
        (39.0612, "39.06"),
        (0.13249, "0.132"),
        (0.0, "0"),
        (-2.5, "\N{MINUS SIGN}2.50"),
        ("inf", "\N{INFINITY}"),
        (None, "not available"),
    ],
)
def test_number(value, text):
    assert number(value) == text


def test_percentages_have_a_sign_and_a_real_minus():
    assert percent(-58.24) == "\N{MINUS SIGN}58.2\N{NO-BREAK SPACE}%"
    assert percent(1.25) == "+1.2\N{NO-BREAK SPACE}%"
    assert percent(None) == "not available"


def test_a_narrow_interval_keeps_its_width():
    assert percent_interval([-3.14, 0.2]) == "\N{MINUS SIGN}3.1 to +0.2\N{NO-BREAK SPACE}%"
    assert percent_interval([1.31, 1.36]) == "+1.31 to +1.36\N{NO-BREAK SPACE}%"


def test_interval_may_be_open_to_infinity():
    assert interval([10.0, "inf"]) == "10.00 to \N{INFINITY}"


def test_size():
    assert size(900 * 2**20) == "900\N{NO-BREAK SPACE}MiB"
    assert size(1.5 * 2**30) == "1.50\N{NO-BREAK SPACE}GiB"
    assert size(None) == "not available"


def test_bytes_in_powers_of_ten():
    assert decimal_bytes(538_060_032) == "538.1\N{NO-BREAK SPACE}MB"
    assert decimal_bytes(4.57e12) == "4.57\N{NO-BREAK SPACE}TB"
    assert decimal_bytes(12_300.0) == "12.30\N{NO-BREAK SPACE}kB"
    assert decimal_bytes(0) == "0\N{NO-BREAK SPACE}B"
    assert decimal_bytes(None) == "not available"


def test_share():
    assert share(0.6815) == "68.2\N{NO-BREAK SPACE}%"
    assert share(None) == "not available"


def test_devices_are_counted():
    assert devices(["cpu", "cpu"]) == "2 \N{MULTIPLICATION SIGN} cpu"
    assert devices(["cuda:0", "cuda:1"]) == "cuda:0, cuda:1"


def test_arms_of_one_engine_are_told_apart():
    assert arm_labels(
        {"config": {}, "arms": {"candidate": {"engine": "skotergy"}, "baseline": {"engine": "baseline"}}}
    ) == {
        "candidate": "skotergy",
        "baseline": "baseline",
    }
    assert arm_labels(
        {"config": {}, "arms": {"candidate": {"engine": "baseline"}, "baseline": {"engine": "baseline"}}}
    ) == {
        "candidate": "baseline (candidate)",
        "baseline": "baseline (baseline)",
    }


@pytest.mark.parametrize(
    ("reason", "text"),
    [("too_few_samples", "n too small"), ("too_few_blocks", "3 blocks are too few"), ("within_threshold", "")],
)
def test_refusal(reason, text):
    assert refusal({"reason": reason, "blocks": 3}) == text


@pytest.mark.parametrize(
    ("reason", "reached", "text"),
    [
        ("narrow_enough", 0.01234, "is known to ±1.2 %, as narrow as was asked for (±1.5 %)."),
        ("blocks_spent", 0.05, "is known to ±5 %, not to ±1.5 % as asked for, and the budget of 40 blocks is spent."),
        (
            "seconds_spent",
            None,
            "has no interval yet, not to ±1.5 % as asked for, and the budget of 600 s of measuring",
        ),
        (None, 0.02, "is known to ±2 %, and ±1.5 % is asked for: blocks are added."),
        (None, 0.2, "is known to ±20 %, and"),
        (None, 0.25, "is known to within a factor of 1.3, and"),
        ("blocks_spent", 1.1, "is known to within a factor of 3.0, not to ±1.5 % as asked for, and the budget"),
    ],
)
def test_stop_sentence(reason, reached, text):
    stop = {
        "half_width": 0.015,
        "max_blocks": 40,
        "max_seconds": 600.0,
        "reason": reason,
        "reached_half_width": reached,
    }

    assert text in stop_sentence(stop).replace("\N{NO-BREAK SPACE}", " ")


def test_a_wide_aim_is_a_factor_too():
    stop = {"half_width": 0.9, "max_blocks": 40, "max_seconds": 600.0, "reason": "narrow_enough"}

    assert stop_sentence(stop | {"reached_half_width": 0.75}) == (
        "The difference of the median is known to within a factor of 2.1, as narrow as was asked for (within a factor "
        "of 2.5)."
    )


def test_a_fixed_number_of_blocks_says_so():
    assert stop_sentence(None) == "The number of blocks was fixed before the run."


def test_a_run_that_did_not_come_to_its_end_has_no_verdict():
    delta = {"delta_pct": -3.0, "reason": "beyond_threshold", "blocks": 5, "detectable_pct": None}
    metrics = {
        "arms": {"candidate": {}},
        "deltas": {"e2el_ms": {"p50": delta}},
        "threshold_pct": 2.0,
        "verdict": {"reason": "run_incomplete"},
    }

    assert verdict_sentence(metrics, {"candidate": "a", "baseline": "b"}).endswith("judged: there is no verdict.")
