"""Whether two engines compute the same model: the same greedy tokens, or logits no further from an fp32 reference.

Pure functions over token ids and logits. They see nothing of the engines, so that they cannot be fooled by one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

NEAR_TIE_LOGITS = 1e-3
"""A choice that trails the best by less than this many logits may be fp32 rounding."""
ROUNDING = {"fp32": 0.0, "tf32": 2.0**-10, "fp16": 2.0**-10, "bf16": 2.0**-7}
"""The spacing of numbers in each dtype, relative to their size: how far two logits that differ by rounding may lie."""
RATIO_LIMIT = 1.05
NEGLIGIBLE_KL = 1e-6
NEGLIGIBLE_NLL = 1e-4
"""Nats a position, added to both errors of a ratio: errors this small are the rounding of fp32 itself, whose ratio
means nothing. Logits of two fp32 paths differ by some 1e-4; the likelihood follows to the first order, the divergence
to the second."""
_RESAMPLES = 2000

Ids = tuple[int, ...]
Logits = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first position at which two greedy outputs differ.

    `gap` is by how many logits the candidate's tokens trail the baseline's best, at most, from there on, with the
    candidate's own tokens fed to the baseline; None where an output merely ended early.
    """

    request_id: str
    position: int
    gap: float | None
    candidate_token: int | None
    baseline_token: int | None

    @property
    def near_tie(self) -> bool:
        """Whether rounding alone may explain it, from the first differing token to the last."""
        return self.gap is not None and self.gap < NEAR_TIE_LOGITS

    def record(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self) | {"near_tie": self.near_tie}


def find_divergences(
    candidate: Mapping[str, Ids], baseline: Mapping[str, Ids], gaps: Callable[[str, Ids], Sequence[float]]
) -> list[Divergence]:
    """Where the outputs of requests that both arms finished first differ.

    `gaps(request_id, ids)` is asked for `token_gaps` of the candidate's ids under the baseline.
    """
    divergences = []
    for request_id in baseline:
        expected, got = baseline[request_id], candidate.get(request_id)
        if got is None or got == expected:
            continue
        shared = min(len(got), len(expected))
        position = next((index for index in range(shared) if got[index] != expected[index]), shared)
        inside = position < shared
        divergences.append(
            Divergence(
                request_id=request_id,
                position=position,
                gap=float(max(gaps(request_id, got)[position:])) if inside else None,
                candidate_token=got[position] if position < len(got) else None,
                baseline_token=expected[position] if position < len(expected) else None,
            )
        )
    return divergences


def token_gaps(chosen: Logits, best: Logits) -> NDArray[np.float64]:
    """By how much each token's logit trails the best of its row, both `[tokens]`; NaN counts as infinitely."""
    gaps: NDArray[np.float64] = np.nan_to_num(best.astype(np.float64) - chosen.astype(np.float64), nan=np.inf)
    return gaps


def are_choices(chosen: Logits, best: Logits, dtype: str, errors: Logits | None = None) -> bool:
    """Whether each token is what a greedy reader of its row of logits may choose, in `dtype`; arguments `[tokens]`.

    It may trail the best by a near tie, or by two roundings of the best: the same products, summed in another order,
    may swap tokens that close. With `errors`, how far the row was off the fp32 logits at most, by twice that too: a
    library that does not give the same bits twice may have been that far off the truth when it chose, and as far when
    it was asked again.
    """
    allowed = np.maximum(NEAR_TIE_LOGITS, 2 * ROUNDING[dtype] * np.abs(best))
    if errors is not None:
        allowed = np.maximum(allowed, 2 * errors)
    return bool((token_gaps(chosen, best) < allowed).all())


def token_parity(compared: int, divergences: Sequence[Divergence]) -> dict[str, Any]:
    """The manifest's parity entry for fp32: every request's tokens equal, near ties named and let pass."""
    failures = [divergence for divergence in divergences if not divergence.near_tie]
    equal = compared - len(divergences)
    sentence = f"Greedy tokens are equal on {equal} of {compared} requests."
    if failures:
        first = failures[0]
        gap = "" if first.gap is None else f", where the candidate's choice trails the best by {first.gap:.4g} logits"
        sentence += f" First real difference: request {first.request_id}, token {first.position}{gap}."
    elif divergences:
        sentence += f" The others part at near ties (below {NEAR_TIE_LOGITS:g} logits)."
    return {
        "mode": "token_equal",
        "passed": not failures,
        "compared": compared,
        "checked": compared,
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
    under the reference. Logits that are not finite give errors that are not.
    """
    sums = np.zeros(4)
    for rows in zip(candidate, baseline, reference, forced_ids, strict=True):
        sums += _row_errors(*rows)
    candidate_kl, baseline_kl, candidate_nll, baseline_nll = map(float, sums)
    return ForcedErrors(
        candidate_kl=candidate_kl,
        baseline_kl=baseline_kl,
        candidate_nll=candidate_nll,
        baseline_nll=baseline_nll,
        agreeing=int((candidate.argmax(-1) == baseline.argmax(-1)).sum()),
        positions=len(forced_ids),
    )


def forced_parity(
    errors: Sequence[ForcedErrors], equal: int, inconsistent: Sequence[str], checked: int, seed: int
) -> dict[str, Any]:
    """The manifest's parity entry for bf16, fp16 and tf32.

    Passed where the candidate's KL and NLL errors are no worse than the baseline's own (the upper 95 % bound of each
    ratio, by a bootstrap over requests, is at most 1.05), and where every output is what its own arm's logits choose.

    Args:
        errors: one a request, at least one.
        equal: of these requests, those whose greedy outputs are the same in both arms.
        inconsistent: "arm request_id" of each output that its own arm's logits do not choose.
        checked: outputs of the candidate that were held against its own logits.
        seed: of the bootstrap.
    """
    positions = np.array([error.positions for error in errors])
    kl = _ratio(
        [error.candidate_kl for error in errors],
        [error.baseline_kl for error in errors],
        NEGLIGIBLE_KL * positions,
        seed,
    )
    nll = _ratio(
        [error.candidate_nll for error in errors],
        [error.baseline_nll for error in errors],
        NEGLIGIBLE_NLL * positions,
        seed,
    )
    agreement = sum(error.agreeing for error in errors) / sum(error.positions for error in errors)
    finite = kl["value"] is not None and nll["value"] is not None
    close = finite and kl["upper"] <= RATIO_LIMIT and nll["upper"] <= RATIO_LIMIT
    if finite:
        sentence = (
            f"Against the fp32 reference the candidate's error is {kl['value']:.3f} (KL) and {nll['value']:.3f} (NLL) "
            f"of the baseline's own, upper bounds {kl['upper']:.3f} and {nll['upper']:.3f}, limit {RATIO_LIMIT}; the "
            f"arms choose the same token at {agreement:.1%} of the positions."
        )
        if not close and kl["value"] <= RATIO_LIMIT and nll["value"] <= RATIO_LIMIT:
            sentence += " It may well be no worse, but these are too few tokens to show it: give more."
    else:
        sentence = "Some logits are not finite (NaN or infinity), so that there is no error to compare."
    if not inconsistent:
        sentence += f" All {checked} outputs of the candidate are what its own logits choose."
    else:
        sentence += f" {len(inconsistent)} output(s) are not what the arm's own logits choose, first {inconsistent[0]}."
    return {
        "mode": "teacher_forced",
        "passed": close and not inconsistent,
        "compared": len(errors),
        "checked": checked,
        "equal": equal,
        "agreement": agreement,
        "near_ties": 0,
        "divergences": [],
        "kl_ratio": kl,
        "nll_ratio": nll,
        "limit": RATIO_LIMIT,
        "sentence": sentence,
    }


def _ratio(
    candidate: Sequence[float], baseline: Sequence[float], floor: NDArray[np.float64], seed: int
) -> dict[str, Any]:
    """The ratio of the summed errors, `floor` added to each request's, and the upper 95 % bound of a bootstrap."""
    above, below = np.asarray(candidate) + floor, np.asarray(baseline) + floor
    if not (np.isfinite(above).all() and np.isfinite(below).all()):
        return {"value": None, "upper": None}
    draws = np.random.default_rng(seed).integers(0, len(above), (_RESAMPLES, len(above)))
    ratios = above[draws].sum(1) / below[draws].sum(1)
    return {"value": float(above.sum() / below.sum()), "upper": float(np.percentile(ratios, 95))}


def _row_errors(candidate: Logits, baseline: Logits, reference: Logits, forced_id: int) -> NDArray[np.float64]:
    """Candidate's and baseline's KL, then their NLL errors, of one position: its rows stay within the cache."""
    got, base, truth = (_log_softmax(row) for row in (candidate, baseline, reference))
    weights = np.exp(truth)
    kl = [float((weights * (truth - arm)).sum()) for arm in (got, base)]
    return np.array([*kl, *(abs(arm[forced_id] - truth[forced_id]) for arm in (got, base))])


def _log_softmax(row: Logits) -> NDArray[np.float64]:
    wide = row.astype(np.float64)
    with np.errstate(invalid="ignore"):  # inf - inf is the NaN that the caller looks for
        wide -= wide.max()
        result: NDArray[np.float64] = wide - np.log(np.exp(wide).sum())
    return result
