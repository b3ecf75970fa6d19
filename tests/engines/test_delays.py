"""Delays that are drawn have the mean and the spread that they are asked for."""

from __future__ import annotations

import random
import statistics
import time

import pytest

from skote.engines.delays import Delay, wait_until
from skote.types import UsageError


@pytest.mark.parametrize(
    ("delay", "mean", "sd"),
    [
        (Delay("fixed", 5.0), 5.0, 0.0),
        (Delay("exponential", 5.0), 5.0, 5.0),
        (Delay("uniform", 5.0, 2.0), 5.0, 2.0),
        (Delay("lognormal", 5.0, 2.0), 5.0, 2.0),
        (Delay("exponential", 0.0), 0.0, 0.0),
        (Delay("lognormal", 0.0, 1.0), 0.0, 0.0),
    ],
)
def test_drawn_delays_have_their_mean_and_sd(delay, mean, sd):
    rng = random.Random(0)
    drawn = [delay.draw(rng) for _ in range(20_000)]
    assert min(drawn) >= 0
    assert statistics.fmean(drawn) == pytest.approx(mean, abs=0.15)
    assert statistics.pstdev(drawn) == pytest.approx(sd, abs=0.15)


def test_a_uniform_delay_stays_within_its_bounds():
    rng = random.Random(0)
    drawn = [Delay("uniform", 5.0, 1.0).draw(rng) for _ in range(1000)]
    assert 5 - 3**0.5 <= min(drawn) < max(drawn) <= 5 + 3**0.5


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (("pareto", 1.0), "distribution=pareto is not known; choose one of fixed, uniform"),
        (("fixed", -1.0), "must be 0 ms or more, got -1"),
        (("lognormal", 1.0, -0.5), "must be 0 ms or more"),
        (("lognormal", 1.0), "distribution=lognormal needs an sd"),
        (("exponential", 1.0, 1.0), "distribution=exponential takes no sd"),
        (("uniform", 1.0, 0.6), "would reach below 0"),
    ],
)
def test_senseless_delays_are_refused(given, sentence):
    with pytest.raises(UsageError, match=sentence):
        Delay(*given)


def test_a_wait_ends_no_sooner_than_asked_for():
    deadline = time.monotonic_ns() + 3_000_000
    wait_until(deadline)
    assert time.monotonic_ns() >= deadline
    wait_until(0)
