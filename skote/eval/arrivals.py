"""Load models: when the requests of a block are sent, in nanoseconds from its start. Made before any timing.

A load by the clock is a profile of rates and a way to space requests under it. Requests are spaced in units of their
mean gap first (evenly, or by gaps drawn from a gamma distribution of mean 1), and the profile then says at what second
so many requests are due: t with integral of rate(s) ds from 0 to t = units. So another rate stretches the same
pattern, and two loads of one seed differ in nothing but what is asked for. The first request comes at 0.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

from scipy.special import gammaincinv

from skote.types import UsageError

S = 1_000_000_000
Times = tuple[int, ...]


@dataclass
class ArrivalConfig:
    """When requests are sent, for the loads that send by the clock; null is not given.

    Attributes:
        rate: requests a second (constant, poisson, gamma), or those that a ramp begins with.
        end_rate: requests a second that a ramp ends with, after the block's last request.
        rates: requests a second, one after the other for `step_s` seconds each, and again from the first; 0 is a pause.
        burstiness: shape of the gamma distribution of gaps: 1 is Poisson, below 1 burstier, above 1 more even. A ramp
            and steps are even without it.
        speed_up: of a trace's own times; 10 sends an hour's requests in six minutes.
    """

    rate: float | None = None
    end_rate: float | None = None
    rates: list[float] | None = None
    step_s: float | None = None
    burstiness: float | None = None
    speed_up: float | None = None


NEEDED = {
    "constant": ("rate",),
    "poisson": ("rate",),
    "gamma": ("rate", "burstiness"),
    "ramp": ("rate", "end_rate"),
    "step": ("rates", "step_s"),
    "trace": (),
}
"""The loads that send by the clock, and the options that each needs."""
_ALLOWED = {"ramp": ("burstiness",), "step": ("burstiness",), "trace": ("speed_up",)}
LOADS = ("closed", "burst", *NEEDED)


def check_arrivals(load: str, config: ArrivalConfig) -> None:
    """Check `workload.arrivals` for a load.

    Raises:
        UsageError: an option is missing, out of its range, or has no effect with this load.
    """
    given = {field.name: getattr(config, field.name) for field in fields(config)}
    given = {name: value for name, value in given.items() if value is not None}
    needed = NEEDED.get(load, ())
    missing = [name for name in needed if name not in given]
    if missing:
        raise UsageError(f"workload.load={load} needs workload.arrivals.{missing[0]}=NUMBER.")
    idle = [name for name in given if name not in _taken(load)]
    if idle:
        fitting = ", ".join(each for each in NEEDED if idle[0] in _taken(each))
        raise UsageError(
            f"workload.arrivals.{idle[0]} has no effect with workload.load={load}: set it to null, or choose a load "
            f"that takes it ({fitting})."
        )
    for name, value in given.items():
        if name == "rates":
            if not value or min(value) < 0 or not any(value):
                raise UsageError(
                    f"workload.arrivals.rates must be numbers of 0 or more, one of them above 0, got {list(value)}."
                )
        elif not value > 0:
            raise UsageError(f"workload.arrivals.{name} must be above 0, got {value:g}.")


def _taken(load: str) -> tuple[str, ...]:
    """The options that a load takes."""
    return (*NEEDED.get(load, ()), *_ALLOWED.get(load, ()))


def arrival_times(load: str, config: ArrivalConfig, count: int, rng: random.Random) -> Times:
    """The send times `[count]` of a block, in nanoseconds from its start, ascending from 0.

    `rng` is drawn from once a gap where gaps are drawn.
    """
    shape = 1.0 if load == "poisson" else config.burstiness
    profile = _profile(load, config, count)
    return tuple(round(S * profile(units)) for units in unit_times(count, shape, rng))


def trace_times(stamps: Sequence[int], config: ArrivalConfig) -> Times:
    """The send times of a block that repeats `stamps` (ns, ascending), from 0 and so many times as fast."""
    speed_up = config.speed_up or 1.0
    return tuple(round((stamp - stamps[0]) / speed_up) for stamp in stamps)


def unit_times(count: int, shape: float | None, rng: random.Random) -> list[float]:
    """Times `[count]` from 0 whose gaps have mean 1: all equal, or gamma of this `shape` by the inverse of its CDF."""
    if shape is None:
        return [float(index) for index in range(count)]
    gaps = [_gamma_gap(rng.random(), shape) for _ in range(count - 1)]
    return list(itertools.accumulate(gaps, initial=0.0))


def offered_rate(times: Sequence[int]) -> float | None:
    """Requests a second over a block's send times, its gaps over its length; None where it has no length."""
    return (len(times) - 1) * S / times[-1] if len(times) > 1 and times[-1] else None


def _gamma_gap(uniform: float, shape: float) -> float:
    return -math.log1p(-uniform) if shape == 1.0 else float(gammaincinv(shape, uniform)) / shape


def _profile(load: str, config: ArrivalConfig, count: int) -> Callable[[float], float]:
    """From requests to the second at which so many are due."""
    if load == "ramp":
        return _ramp(config.rate or 0.0, config.end_rate or 0.0, count)
    if load == "step":
        return _steps(config.rates or [], config.step_s or 0.0)
    rate = config.rate or 0.0
    return lambda units: units / rate


def _ramp(first: float, last: float, count: int) -> Callable[[float], float]:
    """From `first` to `last` requests a second, linearly while `count` requests come, and then `last`."""
    length = 2 * count / (first + last)
    slope = (last - first) / length

    def due(units: float) -> float:
        if units > count:
            return length + (units - count) / last
        return 2 * units / (first + math.sqrt(first * first + 2 * slope * units))

    return due


def _steps(rates: Sequence[float], seconds: float) -> Callable[[float], float]:
    """Each of `rates` for so many `seconds`, round and round."""
    cycle = sum(rates) * seconds

    def due(units: float) -> float:
        turns, left = divmod(units, cycle)
        for step, rate in enumerate(rates):
            if left < rate * seconds:
                return (turns * len(rates) + step) * seconds + left / rate
            left -= rate * seconds
        return (turns + 1) * len(rates) * seconds  # by rounding alone

    return due
