"""Whether sampled tokens are draws from the distribution that a model's logits and the request's sampling make.

Engines draw with generators of their own, so that no two give the same tokens, and none need: how surprising a draw
from a known distribution is, and how much that varies, follows from the distribution alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from skote.eval.measure import Arm
from skote.eval.parity import Logits
from skote.types import Sampling

Z_LIMIT = 5.0
"""Beyond so many standard deviations the surprise of drawn tokens is no chance."""
LEAST_VARIANCE = 9.0
"""Nats squared, added to the variance of a sample's surprise: that of a few tokens, each almost certain, is not normal.
With it honest draws of 4 to 1024 tokens exceed the limit in at most 1 of 5,000 samples, whatever their entropy."""
FARTHEST = 4.0
"""A logit may be off by this many times the root mean square over the vocabulary of its row's rounding."""

Row = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Draws:
    """Of one output: how surprising its tokens were.

    Attributes:
        tokens: how many there are.
        outside: how many of them neither top-k nor top-p left, beyond what rounding explains.
        excess: sum over tokens of -log q(token) - H(q), in nats; q is the distribution, H its entropy.
        variance: sum of Var(-log q) under q, in nats squared.
        allowance: what the arm's rounding may add to `excess`, in nats.
    """

    tokens: int
    outside: int
    excess: float
    variance: float
    allowance: float


def draws(logits: Logits, ids: Sequence[int], sampling: Sampling, rounding: float) -> Draws:
    """How surprising `ids` are under `logits` [len(ids), vocab] and `sampling`, which is not greedy.

    `rounding` is the root mean square by which the logits of the arm that drew them may differ from these. It blurs q
    by a factor e^(rounding / temperature) either way, which to the first order adds nothing to the expected surprise,
    and to the second (rounding / temperature)^2 of its standard deviation.
    """
    if not np.isfinite(logits).all():
        return Draws(len(ids), 0, math.nan, math.nan, math.nan)
    temperature = max(sampling.temperature, float(np.finfo(np.float32).tiny))
    blur = rounding / temperature
    outside, excess, variance, deviation = 0, 0.0, 0.0, 0.0
    for row, token in zip(logits, ids, strict=True):  # one at a time: a row may have 200,000 columns
        # Counted from the largest, which then stays 0 however small the temperature is.
        scaled = (row.astype(np.float64) - row.max()) / temperature
        among_k, kept = _kept(scaled, sampling)
        outside += _is_outside(scaled, among_k, token, sampling, 2 * FARTHEST * blur)
        total = _log_sum(scaled[kept])
        surprise = total - scaled[kept]
        weights = np.exp(-surprise)
        entropy = float((weights * surprise).sum())
        spread = float((weights * (surprise - entropy) ** 2).sum())
        excess += total - float(scaled[token]) - entropy
        variance += spread
        deviation += math.sqrt(spread)
    return Draws(len(ids), outside, excess, variance, blur**2 * deviation)


def judge_draws(found: Sequence[Draws]) -> dict[str, Any]:
    """The verdict on the sampled outputs of one arm, JSON values; see `Draws`.

    `z` is the excess beyond the allowance in standard deviations, null where logits were not finite. Passed where it is
    at most `Z_LIMIT` either way and no token lies outside.
    """
    together = Draws(*(sum(getattr(each, field.name) for each in found) for field in fields(Draws)))
    beyond = math.copysign(max(0.0, abs(together.excess) - together.allowance), together.excess)
    z = beyond / math.sqrt(together.variance + LEAST_VARIANCE)
    finite = math.isfinite(z)
    return {
        "passed": finite and abs(z) <= Z_LIMIT and together.outside == 0,
        "requests": len(found),
        **{name: value if math.isfinite(value) else None for name, value in asdict(together).items()},
        "z": z if finite else None,
        "limit": Z_LIMIT,
    }


def sampled_parity(parity: Mapping[str, Any], found: Mapping[Arm, Sequence[Draws]]) -> dict[str, Any]:
    """The manifest's `parity` entry of the held-out prompts, with the verdict on each arm's sampled outputs."""
    judged = {arm: judge_draws(each) for arm, each in found.items()}
    sampled = {arm: each | {"sentence": _sentence(arm, each)} for arm, each in judged.items()}
    return {
        **parity,
        "passed": parity["passed"] and all(each["passed"] for each in sampled.values()),
        "sampled": sampled,
        "sentence": " ".join([parity["sentence"], *(each["sentence"] for each in sampled.values())]),
    }


def _sentence(arm: str, judged: Mapping[str, Any]) -> str:
    of = f"{judged['tokens']} sampled tokens of the {arm}"
    if judged["z"] is None:
        return f"The {of} cannot be judged: logits are not finite."
    if judged["outside"]:
        return f"Of {of} {judged['outside']} lie outside of what top-k and top-p leave."
    verb = "are as surprising as draws" if judged["passed"] else "are no draws"
    return f"The {of} {verb} from the model's distribution (z = {judged['z']:.1f}, limit {Z_LIMIT:g})."


def _kept(scaled: Row, sampling: Sampling) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Which tokens top-k leaves, and which of those top-p does: see `skote.types.Sampling`."""
    among_k = np.ones(len(scaled), dtype=np.bool_)
    if 0 < sampling.top_k < len(scaled):
        among_k = scaled >= np.partition(scaled, -sampling.top_k)[-sampling.top_k]
    if sampling.top_p >= 1.0:
        return among_k, among_k
    ordered = np.sort(scaled[among_k])[::-1]
    shares = np.exp(ordered - _log_sum(ordered))
    last = int((np.cumsum(shares) - shares < sampling.top_p).sum()) - 1
    return among_k, among_k & (scaled >= ordered[last])


def _is_outside(scaled: Row, among_k: NDArray[np.bool_], token: int, sampling: Sampling, apart: float) -> bool:
    """Whether an engine whose scaled logits differ from these by `apart` / 2 at most cannot have drawn `token`.

    What leads it by more than `apart` comes before it in any case. Top-k excludes it where those are k or more; top-p
    where their odds against all others, of which rounding takes a factor of e^-apart at most, reach p : (1 - p).
    """
    ahead = scaled > scaled[token] + apart
    if 0 < sampling.top_k <= int(ahead.sum()):
        return True
    if sampling.top_p >= 1.0 or not ahead.any():
        return False
    odds = _log_sum(scaled[among_k & ahead]) - _log_sum(scaled[among_k & ~ahead])
    return odds - apart >= math.log(sampling.top_p) - math.log1p(-sampling.top_p)


def _log_sum(scaled: Row) -> float:
    """log(sum(e^scaled))."""
    largest = float(scaled.max())
    return largest + math.log(float(np.exp(scaled - largest).sum()))
