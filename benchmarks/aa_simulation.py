"""How often a verdict is wrong, over simulated runs whose truth is known: `python benchmarks/aa_simulation.py`.

400 runs a row, through the code that a real run's verdict comes from (`skote.eval.aa`), on all cores: some minutes.
Exits with 1 where the upper 95 % bound of the share of false verdicts is above 5 %, or where fewer than 90 % of the
adaptive runs see a candidate that takes 5 % less time at 2 % block noise.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial

from skote.eval.aa import Noise, Outcome, adaptive_outcome, fixed_outcome, share_bound
from skote.eval.adaptive import StopRule

SEEDS = range(400)
BLOCK_NOISE = (0.02, 0.05, 0.10)
MAX_FALSE = 0.05
MIN_SEEN = 0.90
EFFECT = -0.05

Plan = Callable[..., Outcome]  # of seed, noise, effect


def adaptive(rule: StopRule, seed: int, noise: Noise, effect: float) -> Outcome:
    """A run that starts with the six blocks of the default workload."""
    return adaptive_outcome(seed, 6, rule, noise, effect)


def fixed(blocks: int, seed: int, noise: Noise, effect: float) -> Outcome:
    """A run of so many blocks."""
    return fixed_outcome(seed, blocks, noise, effect)


PLANS: dict[str, Plan] = {
    "5 blocks": partial(fixed, 5),
    "6 blocks": partial(fixed, 6),
    "20 blocks": partial(fixed, 20),
    "adaptive, 1.5 %, at most 40": partial(adaptive, StopRule(0.015, 40, math.inf)),
    "adaptive, 1 %, at most 60": partial(adaptive, StopRule(0.01, 60, math.inf)),
}


def main() -> None:
    """Simulate every row of the table, print it, and judge it."""
    print(
        "| blocks | block noise | true effect | FASTER | SLOWER | SAME | INCONCLUSIVE | bound | missed | mean blocks |"
    )
    print("|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|")
    rows = [(name, noise, 0.0) for name in PLANS for noise in BLOCK_NOISE]
    rows += [(name, BLOCK_NOISE[0], EFFECT) for name in PLANS]
    with ProcessPoolExecutor() as pool:
        kept = [row(pool, name, Noise(noise), effect) for name, noise, effect in rows]
    sys.exit(0 if all(kept) else 1)


def row(pool: ProcessPoolExecutor, name: str, noise: Noise, effect: float) -> bool:
    """Print one row; whether it keeps its limit."""
    outcomes = list(pool.map(partial(PLANS[name], noise=noise, effect=effect), SEEDS, chunksize=10))
    labels = Counter(outcome.label for outcome in outcomes)
    wrong = labels["SLOWER"] + (labels["FASTER"] if effect == 0 else labels["SAME"])
    bound = share_bound(wrong, len(outcomes))
    counts = " | ".join(str(labels[label]) for label in ("FASTER", "SLOWER", "SAME", "INCONCLUSIVE"))
    missed = sum(not outcome.covered for outcome in outcomes) / len(outcomes)
    blocks = sum(outcome.blocks for outcome in outcomes) / len(outcomes)
    print(
        f"| {name} | {noise.block:.0%} | {effect:+.0%} | {counts} | {bound:.2%} | {missed:.1%} | {blocks:.1f} |",
        flush=True,
    )
    sees = labels["FASTER"] >= MIN_SEEN * len(outcomes)
    return bound <= MAX_FALSE and (effect == 0 or sees or not name.startswith("adaptive"))


if __name__ == "__main__":
    main()
