"""Whether two engines compute the same model: the same greedy tokens, or logits no further from an fp32 reference.

Pure functions over token ids and logits. They see nothing of the engines, so that they cannot be fooled by one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

NEAR_TIE_LOGITS = 1e-3
"""Below this gap between the two best logits, fp32 rounding alone may choose."""
RATIO_LIMIT = 1.05
NEGLIGIBLE_NATS = 1e-6
"""Added to both errors of a ratio: errors this small are rounding of fp32 itself, and their ratio means nothing."""
_RESAMPLES = 2000

Ids = tuple[int, ...]
Logits = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first position at which two greedy outputs differ, and how close the baseline's choice was there."""

    request_id: str
    position: int
    margin: float | None  # logits between the baseline's best and second best; None where an output merely ended early
    candidate_token: int | None
    baseline_token: int | None

    @property
    def near_tie(self) -> bool:
        """Whether rounding alone may explain it."""
        return self.margin is not None and self.margin < NEAR_TIE_LOGITS

    def record(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "request_id": self.request_id,
            "position": self.position,
            "margin": self.margin,
            "candidate_token": self.candidate_token,
            "baseline_token": self.baseline_token,
            "near_tie": self.near_tie,
        }


def find_divergences(
    candidate: Mapping[str, Ids], baseline: Mapping[str, Ids], margin: Callable[[str, int], float]
) -> list[Divergence]:
    """Where the outputs of requests that both hold first differ.

    `margin(request_id, position)` is asked for the baseline's gap between its two best logits, for differing tokens.
    """
    divergences = []
    for request_id, expected in baseline.items():
        got = candidate.get(request_id, ())
        if got == expected:
            continue
        shared = min(len(got), len(expected))
        position = next((index for index in range(shared) if got[index] != expected[index]), shared)
        inside = position < shared
        divergences.append(
            Divergence(
                request_id=request_id,
                position=position,
                margin=margin(request_id, position) if inside else None,
                candidate_token=got[position] if position < len(got) else None,
                baseline_token=expected[position] if position < len(expected) else None,
            )
        )
    return divergences


def top_two_margin(logits: Logits) -> float:
    """The gap between the two largest of `logits` [vocab]."""
    second, first = np.partition(logits, -2)[-2:]
    return float(first - second)


def token_parity(compared: int, divergences: Sequence[Divergence]) -> dict[str, Any]:
    """The manifest's parity entry for fp32: every request's tokens equal, near ties named and let pass."""
    failures = [divergence for divergence in divergences if not divergence.near_tie]
    equal = compared - len(divergences)
    sentence = f"Greedy tokens are equal on {equal} of {compared} requests."
    if failures:
        first = failures[0]
        gap = "" if first.margin is None else f", where the baseline's best token leads by {first.margin:.4g} logits"
        sentence += f" First real difference: request {first.request_id}, token {first.position}{gap}."
    elif divergences:
        sentence += f" The others part at near ties (below {NEAR_TIE_LOGITS:g} logits)."
    return {
        "mode": "token_equal",
        "passed": not failures,
        "compared": compared,
        "equal": equal,
        "agreement": None,
        "near_ties": len(divergences) - len(failures),
        "divergences": [divergence.record() for divergence in divergences],
        "kl_ratio": None,
        "nll_ratio": None,
        "limit": None,
        "sentence": sentence,
    }


@dataclass(frozen=True, slots=True)
class ForcedErrors:
    """Of one request: each arm's summed error against the reference, and how often the arms' best tokens agree."""

    candidate_kl: float
    baseline_kl: float
    candidate_nll: float
    baseline_nll: float
    agreeing: int
    positions: int


def forced_errors(candidate: Logits, baseline: Logits, reference: Logits, forced_ids: Sequence[int]) -> ForcedErrors:
    """Errors in nats, summed over positions, of logits `[positions, vocab]` each.

    The KL error is KL(reference || arm); the NLL error is the distance between the forced token's NLL under the arm and
    under the reference.
    """
    truth, got, base = (_log_softmax(logits) for logits in (reference, candidate, baseline))
    weights = np.exp(truth)
    rows = np.arange(len(forced_ids))
    ids = np.asarray(forced_ids)

    def nll_error(arm: NDArray[np.float64]) -> float:
        return float(np.abs(arm[rows, ids] - truth[rows, ids]).sum())

    return ForcedErrors(
        candidate_kl=float((weights * (truth - got)).sum()),
        baseline_kl=float((weights * (truth - base)).sum()),
        candidate_nll=nll_error(got),
        baseline_nll=nll_error(base),
        agreeing=int((candidate.argmax(-1) == baseline.argmax(-1)).sum()),
        positions=len(forced_ids),
    )


def forced_parity(errors: Sequence[ForcedErrors], equal: int, seed: int) -> dict[str, Any]:
    """The manifest's parity entry for bf16, fp16 and tf32.

    Passed where the candidate's KL and NLL errors are no worse than the baseline's own: the upper 95 % bound of each
    ratio, by a bootstrap over requests, is at most 1.05. `equal` is how many free-running greedy outputs were the same.
    """
    kl = _ratio([error.candidate_kl for error in errors], [error.baseline_kl for error in errors], errors, seed)
    nll = _ratio([error.candidate_nll for error in errors], [error.baseline_nll for error in errors], errors, seed)
    agreement = sum(error.agreeing for error in errors) / sum(error.positions for error in errors)
    passed = kl["upper"] <= RATIO_LIMIT and nll["upper"] <= RATIO_LIMIT
    unproven = not passed and kl["value"] <= RATIO_LIMIT and nll["value"] <= RATIO_LIMIT
    remedy = " It may well be no worse, but these are too few tokens to show it: give more." if unproven else ""
    return {
        "mode": "teacher_forced",
        "passed": passed,
        "compared": len(errors),
        "equal": equal,
        "agreement": agreement,
        "near_ties": 0,
        "divergences": [],
        "kl_ratio": kl,
        "nll_ratio": nll,
        "limit": RATIO_LIMIT,
        "sentence": f"Against the fp32 reference the candidate's error is {kl['value']:.3f} (KL) and "
        f"{nll['value']:.3f} (NLL) of the baseline's own, upper bounds {kl['upper']:.3f} and {nll['upper']:.3f}, "
        f"limit {RATIO_LIMIT}; the arms choose the same token at {agreement:.1%} of the positions.{remedy}",
    }


def _ratio(
    candidate: Sequence[float], baseline: Sequence[float], errors: Sequence[ForcedErrors], seed: int
) -> dict[str, float]:
    floor = NEGLIGIBLE_NATS * np.array([error.positions for error in errors])
    above, below = np.asarray(candidate) + floor, np.asarray(baseline) + floor
    draws = np.random.default_rng(seed).integers(0, len(errors), (_RESAMPLES, len(errors)))
    ratios = above[draws].sum(1) / below[draws].sum(1)
    return {"value": float(above.sum() / below.sum()), "upper": float(np.percentile(ratios, 95))}


def _log_softmax(logits: Logits) -> NDArray[np.float64]:
    wide = logits.astype(np.float64)
    wide -= wide.max(-1, keepdims=True)
    result: NDArray[np.float64] = wide - np.log(np.exp(wide).sum(-1, keepdims=True))
    return result
