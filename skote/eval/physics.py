"""Findings about arms that are faster than their device can be: the sign of skipped work."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from skote.eval.derive import Measured
from skote.eval.finding import Finding
from skote.eval.roofline import multi_token_share, roofline, speculates

ROOFLINE_LIMIT = 1.1  # of what the device can read; two measurements of that differ by less than the tenth
IMPOSSIBLE = {"cuda": 1.25, "cpu": 2.0}
"""From which share of a floor on a run is invalid. Both ceilings are measured, after the run.

A GPU's memory is its own: the bandwidth repeats to a few percent, products vary a little more with how warm it is, so a
quarter is beyond doubt. Cores and memory of a CPU are shared, with neighbours who may have been there while the ceiling
was measured and not before, and a reduction need not be the fastest way to read; half of the work has to be missing for
a CPU to be called impossible. Work that hides below that is what parity is for.
"""


def physics_findings(measured: Measured, manifest: dict[str, Any]) -> Iterator[Finding]:
    """Arms that decode or prefill faster than the measured ceilings of their device allow.

    A token is impossible, and not only remarkable, where even the bytes that no cache can hold would take too long. A
    request is held against the floors of all its tokens together, because an answer that is handed over at once has no
    time a token; nothing but a declared speculation, which is then named, gives several tokens for one step.
    """
    kind = (manifest.get("roofline") or {}).get("device", "").partition(":")[0]
    limit = IMPOSSIBLE.get(kind)
    for arm in measured.arms:
        found = roofline(measured, arm, manifest)
        step, prefill, achieved = found["step_share"], found["prefill_share"], found["achieved_share"]
        whole = found["request_share"]
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
        if limit is not None and prefill is not None and prefill > limit:
            yield Finding(
                "invalid",
                "prefill_faster_than_physics",
                round(prefill, 4),
                limit,
                f"The {arm} arm's first tokens come {prefill:.2f} times as fast as the device can compute their "
                "prompts: part of the prefill was skipped.",
            )
        elif limit is not None and whole is not None and whole > limit and not (step is not None and step > limit):
            yield Finding(
                "invalid",
                "request_faster_than_physics",
                round(whole, 4),
                limit,
                f"The {arm} arm's requests end {whole:.2f} times as fast as the device can compute their prompts and "
                "read the weights once a token: not all of their tokens were computed.",
            )


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
