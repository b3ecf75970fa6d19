"""Delays of engines without a model: drawn by distribution, or waited for until their moment has come."""

from __future__ import annotations

import math
import random
import time
from dataclasses import dataclass

from skote.types import UsageError

DISTRIBUTIONS = ("fixed", "uniform", "exponential", "lognormal")
_SPIN_NS = 1_000_000  # a sleep may come back this late


@dataclass(frozen=True, slots=True)
class Delay:
    """A delay in ms of that mean and standard deviation; "fixed" has none, that of "exponential" is its mean.

    Raises:
        UsageError: an unknown distribution, a mean or sd below 0, or an sd too few or too many.
    """

    distribution: str
    mean_ms: float
    sd_ms: float | None = None

    def __post_init__(self) -> None:
        if self.distribution not in DISTRIBUTIONS:
            raise UsageError(
                f"distribution={self.distribution} is not known; choose one of {', '.join(DISTRIBUTIONS)}."
            )
        if self.mean_ms < 0 or (self.sd_ms is not None and self.sd_ms < 0):
            raise UsageError(f"A delay and its sd must be 0 ms or more, got {self.mean_ms:g} and {self.sd_ms}.")
        spread = self.distribution in ("uniform", "lognormal")
        if spread != (self.sd_ms is not None):
            needs = "needs an sd (prefill_sd_ms, token_sd_ms)" if spread else "takes no sd"
            raise UsageError(f"distribution={self.distribution} {needs}.")
        if self.distribution == "uniform" and self._half_ms > self.mean_ms:
            raise UsageError(
                f"distribution=uniform of mean {self.mean_ms:g} ms and sd {self.sd_ms:g} ms would reach below 0: the "
                "sd may be 0.577 of the mean at most."
            )

    def draw(self, rng: random.Random) -> float:
        """A delay in ms."""
        match self.distribution:
            case "uniform":
                return self.mean_ms + rng.uniform(-self._half_ms, self._half_ms)
            case "exponential":
                return rng.expovariate(1 / self.mean_ms) if self.mean_ms else 0.0
            case "lognormal":
                if not self.mean_ms:
                    return 0.0
                # Of the delays themselves are mean and sd, of their logarithms these two.
                sigma = math.sqrt(math.log1p(((self.sd_ms or 0.0) / self.mean_ms) ** 2))
                return rng.lognormvariate(math.log(self.mean_ms) - sigma * sigma / 2, sigma)
            case _:
                return self.mean_ms

    @property
    def _half_ms(self) -> float:
        return math.sqrt(3) * (self.sd_ms or 0.0)


def wait_until(deadline_ns: int) -> None:
    """Return at `deadline_ns` (`time.monotonic_ns`): sleep for most of it, spin for the rest: a sleep overshoots."""
    nap_ns = deadline_ns - time.monotonic_ns() - _SPIN_NS
    if nap_ns > 0:
        time.sleep(nap_ns / 1e9)
    while time.monotonic_ns() < deadline_ns:
        pass
