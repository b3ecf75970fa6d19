from __future__ import annotations

import itertools
import math
import random
import statistics

import pytest

from skote.eval.arrivals import (
    LOADS,
    NEEDED,
    ArrivalConfig,
    arrival_times,
    check_arrivals,
    offered_rate,
    trace_times,
    unit_times,
)
from skote.types import UsageError

S = 1_000_000_000


class Uniforms(random.Random):
    """Gives the numbers that it was told, one after the other."""

    def __init__(self, *values: float) -> None:
        self._values = iter(values)

    def random(self) -> float:
        return next(self._values)


def seconds(load: str, count: int, rng: random.Random | None = None, **options) -> list[float]:
    return [time / S for time in arrival_times(load, ArrivalConfig(**options), count, rng or Uniforms())]


def gaps(times) -> list[float]:
    return [later - earlier for earlier, later in itertools.pairwise(times)]


def test_constant_is_really_constant():
    assert arrival_times("constant", ArrivalConfig(rate=8.0), 4, Uniforms()) == (
        0,
        125_000_000,
        250_000_000,
        375_000_000,
    )


def test_poisson_gaps_are_the_exponential_quantiles_of_what_is_drawn():
    # -ln(1 - u) / rate: the median is ln 2, and 1 - 1/e gives the mean.
    times = seconds("poisson", 4, Uniforms(0.5, 1 - math.exp(-1), 0.0), rate=2.0)
    assert times == pytest.approx([0.0, math.log(2) / 2, (math.log(2) + 1) / 2, (math.log(2) + 1) / 2], abs=1e-9)


def test_gamma_gaps_are_the_quantiles_of_that_shape():
    # Medians: of the Erlang distribution of 2 steps 1.678347 steps; of half a chi-square of one degree 0.6744898^2 / 2.
    assert seconds("gamma", 2, Uniforms(0.5), rate=1.0, burstiness=2.0)[1] == pytest.approx(1.67834699 / 2, abs=1e-8)
    assert seconds("gamma", 2, Uniforms(0.5), rate=1.0, burstiness=0.5)[1] == pytest.approx(0.67448975**2, abs=1e-8)
    poisson, gamma = (seconds(load, 9, random.Random(3), rate=5.0, **more) for load, more in
                      (("poisson", {}), ("gamma", {"burstiness": 1.0})))  # fmt: skip
    assert poisson == gamma


def test_ramp_follows_the_integral_of_its_rate():
    # 1 to 3 a second while 4 come: 2 s long, t + t^2 / 2 requests by t, so t = -1 + sqrt(1 + 2 i).
    times = seconds("ramp", 4, rate=1.0, end_rate=3.0)
    assert times == pytest.approx([0.0, 0.732050808, 1.236067977, 1.645751311], abs=1e-9)
    # 3 to 1: 3 t - t^2 / 2, so t = 3 - sqrt(9 - 2 i).
    times = seconds("ramp", 4, rate=3.0, end_rate=1.0)
    assert times == pytest.approx([0.0, 0.354248689, 0.763932023, 1.267949192], abs=1e-9)
    assert seconds("ramp", 3, rate=2.0, end_rate=2.0) == [0.0, 0.5, 1.0]


def test_a_ramp_that_is_drawn_past_its_end_goes_on_at_the_last_rate():
    # Two gaps of 3 means: 3 of 3 requests after 2 s, the other 3 at 2 a second.
    times = seconds("ramp", 3, Uniforms(*[1 - math.exp(-3)] * 2), rate=1.0, end_rate=2.0, burstiness=1.0)
    assert times == pytest.approx([0.0, 2.0, 3.5], abs=1e-9)


def test_steps_come_round_and_round():
    # 2 s at 1 a second, 2 s at 2 a second: 0 1 | 2 2.5 3 3.5 | 4 5 | 6.
    assert seconds("step", 9, rates=[1.0, 2.0], step_s=2.0) == [0.0, 1.0, 2.0, 2.5, 3.0, 3.5, 4.0, 5.0, 6.0]


def test_a_step_of_rate_0_is_a_pause():
    assert seconds("step", 5, rates=[4.0, 0.0], step_s=0.5) == [0.0, 0.25, 1.0, 1.25, 2.0]


def test_a_trace_keeps_its_gaps_at_another_speed():
    assert trace_times([7 * S, 7 * S, 8 * S, 12 * S], ArrivalConfig(speed_up=4.0)) == (0, 0, S // 4, 5 * S // 4)
    assert trace_times([3, 10], ArrivalConfig()) == (0, 7)


@pytest.mark.parametrize("shape", [0.25, 1.0, 4.0])
def test_drawn_gaps_have_mean_1_and_the_spread_of_their_shape(shape):
    """The squared coefficient of variation of a gamma distribution is 1 / shape."""
    drawn = gaps(unit_times(20_001, shape, random.Random(11)))
    assert statistics.mean(drawn) == pytest.approx(1.0, rel=0.05)
    assert statistics.pvariance(drawn) / statistics.mean(drawn) ** 2 == pytest.approx(1 / shape, rel=0.1)


def test_another_rate_stretches_the_same_pattern():
    slow, fast = (seconds("poisson", 50, random.Random(1), rate=rate) for rate in (1.0, 4.0))
    assert fast == pytest.approx([time / 4 for time in slow], abs=1e-9)


@pytest.mark.parametrize("load", [load for load in NEEDED if load != "trace"])
def test_times_ascend_from_0_and_depend_on_the_seed_alone(load):
    options = {"rate": 3.0, "end_rate": 9.0, "rates": [2.0, 5.0], "step_s": 1.5, "burstiness": 0.5}
    config = ArrivalConfig(**{name: options[name] for name in NEEDED[load]})
    times, again = (arrival_times(load, config, 40, random.Random("7/arrivals/0")) for _ in range(2))
    assert times == again
    assert times[0] == 0
    assert list(times) == sorted(times)
    assert len(times) == 40


def test_the_offered_rate_counts_gaps():
    assert offered_rate((0, S // 2, S)) == 2.0
    assert offered_rate((0,)) is offered_rate((0, 0)) is None


@pytest.mark.parametrize(
    ("load", "options", "sentence"),
    [
        ("constant", {}, r"workload\.load=constant needs workload\.arrivals\.rate"),
        ("gamma", {"rate": 1.0}, r"needs workload\.arrivals\.burstiness"),
        (
            "closed",
            {"rate": 1.0},
            r"rate has no effect with workload\.load=closed: .*\(constant, poisson, gamma, ramp\)",
        ),
        ("poisson", {"rate": 1.0, "speed_up": 2.0}, r"speed_up has no effect .*\(trace\)"),
        ("poisson", {"rate": 0.0}, r"workload\.arrivals\.rate must be above 0, got 0"),
        ("trace", {"speed_up": -1.0}, r"speed_up must be above 0, got -1"),
        ("step", {"rates": [], "step_s": 1.0}, r"rates must be numbers of 0 or more"),
        ("step", {"rates": [0.0, 0.0], "step_s": 1.0}, r"one of them above 0, got \[0.0, 0.0\]"),
        ("step", {"rates": [1.0, -1.0], "step_s": 1.0}, r"rates must be numbers of 0 or more"),
    ],
)
def test_a_wrong_option_is_named(load, options, sentence):
    with pytest.raises(UsageError, match=sentence):
        check_arrivals(load, ArrivalConfig(**options))


def test_every_load_is_listed_once():
    assert LOADS == ("closed", "burst", "constant", "poisson", "gamma", "ramp", "step", "trace")
    for load in ("closed", "burst", "trace"):
        check_arrivals(load, ArrivalConfig())
