"""When a run has seen enough: whether to add blocks, decided from the interval's width and the budget alone.

Looking at a run again and again, and stopping as soon as the interval clears the threshold, would call many an equal
pair different. This rule never looks at where the interval lies. For normal log ratios their mean is independent of
every sample variance so far, so a stopping time made of widths leaves the mean what it is at a fixed number of blocks
(Chow and Robbins 1965, On the asymptotic theory of fixed-width sequential confidence intervals for the mean). What
remains is that the spread is a little underestimated where the rule stops: the interval misses the truth in up to 7 %
of the runs instead of 5 (Starr 1966, The performance of a sequential procedure for the fixed-width interval estimation
of the mean). A false FASTER or SLOWER is not an interval that misses, though, but one that lies beyond the threshold as
a whole: a mean off by the threshold and half a width, which at the width at which the rule stops is nearly impossible,
and at the budget's end as likely as in a run of that many blocks. The budget in seconds counts both arms together, so
it favours neither. `benchmarks/aa_simulation.py` counts both kinds of error.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from skote.eval.derive import METRICS, Measured
from skote.eval.stats import Effect, percentile_effect
from skote.eval.summary import PRIMARY
from skote.types import UsageError

StopReason = Literal["narrow_enough", "blocks_spent", "seconds_spent"]

STEP = 2  # blocks between two looks: one of each order, so that drift within a block cancels


@dataclass(frozen=True, slots=True)
class StopRule:
    """When to stop adding blocks.

    Attributes:
        half_width: narrow enough is an interval of ln(candidate / baseline) that reaches this far to either side;
            below 1, a factor of 2.7, which nobody means but who writes percent.
        max_blocks: the budget in blocks.
        max_seconds: the budget in seconds of measuring; a step that would not fit is not begun.
    """

    half_width: float
    max_blocks: int
    max_seconds: float

    def __post_init__(self) -> None:
        if not 0 < self.half_width < 1:
            raise UsageError(
                f"measure.stop.half_width must lie between 0 and 1, got {self.half_width}: 0.015 is about 1.5 %."
            )
        for name, value in (("max_blocks", self.max_blocks), ("max_seconds", self.max_seconds)):
            if not value > 0:
                raise UsageError(f"measure.stop.{name} must be above 0, got {value}.")


@dataclass(frozen=True, slots=True)
class Decision:
    """How many blocks to `add` before the next look; none where the run stops, and then the `reason`."""

    add: int
    reason: StopReason | None = None


def decide(effect: Effect, measured_blocks: int, seconds: float, rule: StopRule) -> Decision:
    """Whether a run goes on.

    Args:
        effect: of the run's primary figure (`primary_effect`), so far.
        measured_blocks: the blocks that ran, at least 1; more than the effect's own where some had nothing to compare.
        seconds: how long measuring them took.
        rule: the width to reach and the budget.
    """
    even = measured_blocks % STEP == 0
    if even and effect.log_half_width is not None and effect.log_half_width <= rule.half_width:
        return Decision(0, "narrow_enough")
    add = min(STEP - measured_blocks % STEP, rule.max_blocks - measured_blocks)
    if add <= 0:
        return Decision(0, "blocks_spent")
    if seconds * (measured_blocks + add) / measured_blocks > rule.max_seconds:
        return Decision(0, "seconds_spent")
    return Decision(add)


def primary_effect(measured: Measured, seed: int, blocks: Sequence[int] | None = None) -> Effect:
    """The effect that the run's verdict is about; `seed` is the run's.

    Over `blocks`, paired ones, or all that are.
    """
    name, q = PRIMARY
    metric = next(metric for metric in METRICS if metric.name == name)
    candidate, baseline = (measured.samples(arm, metric, compared=True).by_block() for arm in ("candidate", "baseline"))
    paired = measured.paired_blocks if blocks is None else blocks
    return percentile_effect(candidate, baseline, paired, float(q[1:]), seed)
