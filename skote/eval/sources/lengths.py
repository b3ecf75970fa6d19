"""Lengths that are drawn: fixed, uniform, normal, log-normal, or as a file has them."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import NormalDist

from skote.types import UsageError

DISTRIBUTIONS = ("fixed", "uniform", "normal", "lognormal", "empirical")
_NEEDED = {
    "fixed": ("mean",),
    "uniform": ("min", "max"),
    "normal": ("mean", "sd", "min", "max"),
    "lognormal": ("mean", "sd", "min", "max"),
    "empirical": ("path",),
}
_LEAST_UNIFORM = 2.0**-53  # the inverse of a CDF is without bound at 0


@dataclass
class LengthConfig:
    """How many tokens prompts or answers have.

    Attributes:
        distribution: one of `DISTRIBUTIONS`; null is none.
        mean: of all lengths, before `min` and `max` cut them; with "fixed", each of them.
        sd: their standard deviation.
        min, max: the least and the most; what is drawn beyond them becomes them, and "uniform" has both of them in.
        path: with "empirical", a file of rows with lengths, of any format of `workload.source`.
    """

    distribution: str | None = None
    mean: float | None = None
    sd: float | None = None
    min: int | None = None
    max: int | None = None
    path: str | None = None


def check_lengths(name: str, config: LengthConfig) -> None:
    """Check the options of the lengths called `name`.

    Raises:
        UsageError: an unknown distribution, or one whose options are missing, superfluous or out of range.
    """
    if config.distribution not in (None, *DISTRIBUTIONS):
        raise UsageError(
            f"{name}.distribution must be one of {', '.join(DISTRIBUTIONS)}, or null, got {config.distribution!r}."
        )
    needed = _NEEDED.get(config.distribution or "", ())
    given = [key for key in ("mean", "sd", "min", "max", "path") if getattr(config, key) is not None]
    for key in needed:
        if key not in given:
            raise UsageError(f"{name}.distribution={config.distribution} needs {name}.{key}.")
    for key in given:
        if key not in needed:
            raise UsageError(f"{name}.{key} has no effect with {name}.distribution={config.distribution}.")
    for key in ("mean", "min", "max"):
        value = getattr(config, key)
        if value is not None and value < 1:
            raise UsageError(f"{name}.{key} must be at least 1, got {value:g}.")
    if config.sd is not None and not config.sd > 0:
        raise UsageError(f"{name}.sd must be above 0, got {config.sd:g}.")
    if config.min is not None and config.max is not None and config.min > config.max:
        raise UsageError(f"{name}.min={config.min} is above {name}.max={config.max}.")


def drawn_lengths(config: LengthConfig, rng: random.Random, known: Sequence[int] = ()) -> Iterator[int]:
    """Lengths without end, one number of `rng` each; "empirical" draws from the `known` ones, which are sorted."""
    inverse = _inverse(config, known)
    least, most = config.min or 1, config.max or math.inf
    while True:
        yield int(min(most, max(least, inverse(max(rng.random(), _LEAST_UNIFORM)))))


def _inverse(config: LengthConfig, known: Sequence[int]) -> Callable[[float], float]:
    """The inverse of the distribution's CDF."""
    mean, sd = config.mean or 0.0, config.sd or 0.0
    match config.distribution:
        case "fixed":
            return lambda _: round(mean)
        case "uniform":
            least, most = config.min or 0, config.max or 0
            return lambda uniform: least + math.floor(uniform * (most - least + 1))
        case "normal":
            return lambda uniform: round(NormalDist(mean, sd).inv_cdf(uniform))
        case "lognormal":
            # Of the lengths themselves are mean and sd, of their logarithms these two.
            spread = math.sqrt(math.log1p((sd / mean) ** 2))
            center = math.log(mean) - spread * spread / 2
            return lambda uniform: round(math.exp(NormalDist(center, spread).inv_cdf(uniform)))
        case _:
            return lambda uniform: known[math.floor(uniform * len(known))]
