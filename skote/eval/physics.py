"""Findings about arms that are faster than their device can be: the sign of skipped work."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pandas as pd

from skote.eval.derive import Measured
from skote.eval.finding import Finding, requests
from skote.eval.roofline import multi_token_share, prefill_floors, request_floors, roofline, speculates

ROOFLINE_LIMIT = 1.1  # of what the device can read; two measurements of that differ by less than the tenth
IMPOSSIBLE = {"cuda": 1.25, "cpu": 2.0}
"""From which share of a floor on a run is invalid. Both ceilings are measured, after the run.

A GPU's memory is its own: the bandwidth repeats to a few percent, products vary a little more with how warm it is, so a
quarter is beyond doubt. Cores and memory of a CPU are shared, with neighbours who may have been there while the ceiling
was measured and not before, and a reduction need not be the fastest way to read; half of the work has to be missing for
a CPU to be called impossible. Work that hides below that is what parity is for.
"""
FEW = 0.1
"""Of an arm's requests, so many may be beyond that share: a moment of the machine is not its median."""
ONCE = 2.0
"""Times that share, which no request may be beyond: nothing makes a device twice as fast for a moment."""


def physics_findings(measured: Measured, manifest: dict[str, Any]) -> Iterator[Finding]:
    """Arms that decode or prefill faster than the measured ceilings of their device allow.

    A token is impossible, and not only remarkable, where even the bytes that no cache can hold would take too long. A
    request is held against the floors of all its tokens together, because an answer that is handed over at once has no
    time a token; nothing but a declared speculation, which is then named, gives several tokens for one step.

    First tokens and whole requests are judged one by one, so that work that was skipped on some of them does not hide
    behind the median of all. What may happen to a stamp on a busy machine, being taken late, makes both of them longer;
    the time a token of a single request it could make shorter, so that this one is judged in the median.
    """
    kind = (manifest.get("roofline") or {}).get("device", "").partition(":")[0]
    limit = IMPOSSIBLE.get(kind)
    for arm in measured.arms:
        found = roofline(measured, arm, manifest)
        step, achieved = found["step_share"], found["achieved_share"]
        yield from _chunks(measured, manifest, arm)
        if limit is not None and step is not None and step > limit:
            yield Finding(
                "invalid",
                "decode_faster_than_physics",
                round(step, 4),
                limit,
                f"The {arm} arm's steps come {step:.2f} times as fast as the device can read what of the weights and "
                "the KV cache does not fit its caches: not all of them are read.",
            )
        elif achieved is not None and achieved > ROOFLINE_LIMIT:
            yield Finding(
                "warning",
                "beyond_roofline",
                round(achieved, 4),
                ROOFLINE_LIMIT,
                f"The {arm} arm's tokens come {achieved:.2f} times as fast as the device can read weights and KV "
                "cache: they lie in a nearer cache, or not all of them are read.",
            )
        if limit is None:
            continue
        rows = measured.requests[measured.requests["arm"] == arm]
        prefill = _impossible(prefill_floors(rows, manifest), rows["ttft_ms"], limit)
        if prefill is not None:
            count, most = prefill
            yield Finding(
                "invalid",
                "prefill_faster_than_physics",
                round(most, 4),
                limit,
                f"{requests(count)} of the {arm} arm's {len(rows)} got the first token more than {limit:g} times as "
                f"fast as the device can compute the prompt, at most {most:.3g} times: part of the prefill was "
                "skipped.",
            )
            continue
        decodes = speculates(manifest, arm) or (step is not None and step > limit)
        whole = None if decodes else _impossible(request_floors(rows, manifest), rows["e2el_ms"], limit)
        if whole is not None:
            count, most = whole
            yield Finding(
                "invalid",
                "request_faster_than_physics",
                round(most, 4),
                limit,
                f"{requests(count)} of the {arm} arm's {len(rows)} ended more than {limit:g} times as fast as the "
                f"device can compute the prompt and read the weights once a token, at most {most:.3g} times: not all "
                "of the tokens were computed.",
            )


def _impossible(floors: pd.Series[float] | None, took: pd.Series[float], limit: float) -> tuple[int, float] | None:
    """Of requests with these `floors` that `took` so many ms: how many are beyond `limit`, and how far the fastest is.

    None where no more than `FEW` of them were, and none was `ONCE` times as fast as that; or no floor is known.
    """
    if floors is None:
        return None
    times = (floors / took).dropna()  # of those that finished
    beyond = int((times > limit).sum())
    if beyond <= FEW * len(times) and not (times > ONCE * limit).any():
        return None
    return beyond, float(times.max())


def _chunks(measured: Measured, manifest: dict[str, Any], arm: str) -> Iterator[Finding]:
    share = multi_token_share(measured, arm)
    if speculates(manifest, arm):
        yield Finding(
            "info",
            "speculation_declared",
            round(share, 4),
            None,
            f"The engine of the {arm} arm says that it speculates: {share:.0%} of its chunks after a request's first "
            "hold several tokens, and a chunk, not a token, is held against the time of a step.",
        )
    elif share > 0:
        yield Finding(
            "warning",
            "multi_token_chunks",
            round(share, 4),
            0,
            f"{share:.0%} of the {arm} arm's chunks after a request's first hold several tokens, though its engine "
            "does not say that it speculates: its tokens were held back, or were not computed one by one.",
        )
