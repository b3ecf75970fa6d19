"""Simulated runs whose truth is known, judged as real ones are: how often the verdict is wrong, and how often it sees.

A run is simulated as its rows; everything after them is the code that a real run's verdict comes from. Both arms serve
the same requests in a block, one pass after the other, and of every two blocks one begins with the candidate.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
from scipy.special import betaincinv

from skote.eval.adaptive import StopRule, decide, primary_effect
from skote.eval.derive import Measured
from skote.eval.measure import Pass, plan_passes
from skote.eval.record import Run
from skote.eval.stats import CONFIDENCE, Floats, Label

MEDIAN_MS = 1000.0
PROMPT_SPREAD = 0.15  # standard deviation of the log latency over prompts, the same in both arms


@dataclass(frozen=True, slots=True)
class Noise:
    """What disturbs a simulated run; shares and logarithms unless stated.

    Attributes:
        block: standard deviation that all requests of a pass share. Each pass draws its own, so the ratio of a block's
            two passes has sqrt(2) times as much.
        drift: the most by which a pass is slower or faster than the one before; each run draws its slope.
        burst_chance: of a pass, to have a stretch of requests of random length that takes `burst_factor` times as long.
        outlier_chance: of a request, to take `outlier_factor` times as long.
        request: standard deviation of each request for itself.
    """

    block: float
    drift: float = 0.005
    burst_chance: float = 0.03
    burst_factor: float = 1.3
    outlier_chance: float = 0.02
    outlier_factor: float = 4.0
    request: float = 0.02


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one simulated run ended; `covered` where its interval holds the true effect."""

    label: Label
    blocks: int
    covered: bool


def simulate_run(seed: int, blocks: int, noise: Noise, effect: float = 0.0, requests: int = 12) -> Run:
    """A run of `blocks` blocks of `requests` requests whose candidate takes 1 + `effect` times the baseline's time."""
    rng = np.random.default_rng(seed)
    prompts = rng.normal(0, PROMPT_SPREAD, (blocks, requests))
    slope = rng.uniform(-noise.drift, noise.drift)
    rows = []
    now = 0.0
    for position, step in enumerate(plan_passes(blocks, seed, ("candidate", "baseline"))):
        logs = prompts[step.block] + slope * position + _disturbance(rng, noise, requests)
        if step.arm == "candidate":
            logs += np.log1p(effect)
        ends = now + np.cumsum(MEDIAN_MS * np.exp(logs))
        rows.append(_rows(step, np.concatenate([[now], ends])))
        now = float(ends[-1])
    table = pd.concat(rows, ignore_index=True)
    return Run(Path(), table, _tokens(table), {"seed": seed})


def fixed_outcome(seed: int, blocks: int, noise: Noise, effect: float = 0.0) -> Outcome:
    """The verdict of a simulated run of so many blocks."""
    return _outcome(Measured(simulate_run(seed, blocks, noise, effect)), seed, blocks, effect)


def adaptive_outcome(seed: int, start: int, rule: StopRule, noise: Noise, effect: float = 0.0) -> Outcome:
    """The verdict of a simulated run that starts with `start` blocks and goes on as `rule` says.

    Simulated seconds are not counted: the budget is one of blocks.
    """
    measured = Measured(simulate_run(seed, rule.max_blocks, noise, effect))
    blocks = start
    while add := decide(primary_effect(measured, seed, range(blocks)), blocks, 0.0, rule).add:
        blocks += add
    return _outcome(measured, seed, blocks, effect)


def share_bound(count: int, runs: int, confidence: float = CONFIDENCE) -> float:
    """Upper end of the two-sided Clopper-Pearson interval of a share of which `count` in `runs` were seen.

    The (1 + confidence) / 2 quantile of Beta(count + 1, runs - count) (Clopper and Pearson 1934).
    """
    return float(betaincinv(count + 1, runs - count, (1 + confidence) / 2)) if count < runs else 1.0


def false_alarms(outcomes: Iterable[Outcome]) -> int:
    """How many runs say FASTER or SLOWER, which none may where the arms are equal."""
    return sum(outcome.label in ("FASTER", "SLOWER") for outcome in outcomes)


def _outcome(measured: Measured, seed: int, blocks: int, effect: float) -> Outcome:
    found = primary_effect(measured, seed, range(blocks))
    covered = found.interval is not None and found.interval.low <= effect <= found.interval.high
    return Outcome(found.verdict().label, blocks, covered)


def _disturbance(rng: np.random.Generator, noise: Noise, requests: int) -> Floats:
    """What one pass adds to the log latency of its requests: `[requests]`."""
    logs = rng.normal(0, noise.block) + rng.normal(0, noise.request, requests)
    logs += np.log(noise.outlier_factor) * (rng.random(requests) < noise.outlier_chance)
    first, last = np.sort(rng.integers(0, requests, 2))
    if rng.random() < noise.burst_chance:
        logs[first : last + 1] += np.log(noise.burst_factor)
    return logs


def _rows(step: Pass, bounds_ms: Floats) -> pd.DataFrame:
    """A pass's rows from the moments between its requests, one after the other: `bounds_ms [requests + 1]`."""
    bounds = (1e6 * bounds_ms).astype(np.int64)
    dispatched, last = bounds[:-1], bounds[1:]
    requests = dispatched.size
    return pd.DataFrame(
        {
            "arm": step.arm,
            "block": step.block,
            "round": step.round,
            "phase": "measure",
            "request_id": [f"{step.block}-{index}" for index in range(requests)],
            "scheduled_ns": dispatched,
            "dispatched_ns": dispatched,
            "admitted_ns": dispatched,
            "first_token_ns": dispatched + (last - dispatched) // 2,
            "last_token_ns": last,
            "input_tokens": 1,
            "output_tokens": 2,
            "first_chunk_tokens": 1,
            "status": "ok",
        }
    )


def _tokens(requests: pd.DataFrame) -> pd.DataFrame:
    """The two chunks of every request."""
    keys = requests[["arm", "block", "round", "phase", "request_id"]]
    chunks = [
        keys.assign(index=index, t_ns=requests[stamp], n_tokens=1)
        for index, stamp in enumerate(("first_token_ns", "last_token_ns"))
    ]
    return pd.concat(chunks, ignore_index=True)
