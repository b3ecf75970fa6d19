"""Findings about caches of earlier prompts: those that an engine declares, and those that it does not."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from skote.eval.derive import Measured
from skote.eval.finding import Finding
from skote.eval.stats import MIN_BLOCKS, t_interval

SHARED_PREFIX_LIMIT = 0.1  # of the prompt, in the median
SOONER_LIMIT = 0.1  # of the time to the first token: how much sooner that of a prompt that was asked before comes
SOONER_MS = 0.3  # below it the difference is one of waking up
SURE = 0.999  # of the interval by which that is judged: on a busy machine one in a hundred would come by chance


def cache_findings(measured: Measured, manifest: dict[str, Any]) -> Iterator[Finding]:
    """What was, or may have been, taken from a cache of earlier prompts instead of being prefilled."""
    share = manifest["workload"].get("shared_prefix_share")  # older runs have not counted
    shares = share is not None and share > SHARED_PREFIX_LIMIT
    yield from _warm_cache(measured)
    unseen = []
    for arm in measured.arms:
        probes = [each["cache_probe"] for each in manifest["passes"] if each["arm"] == arm and each.get("cache_probe")]
        told = bool(measured.requests.loc[measured.requests["arm"] == arm, "cached_tokens"].notna().any())
        # A server tells its cached tokens with the end of an answer, which a probe is not given the time for.
        if len(probes) >= MIN_BLOCKS and not (told and all(each["cached_tokens"] is None for each in probes)):
            yield from _hidden_cache(arm, probes, shares=shares)
        elif not told:
            unseen.append(arm)
    if shares and unseen:
        yield Finding(
            "info",
            "shared_prefix",
            round(share, 4),
            SHARED_PREFIX_LIMIT,
            f"A prompt shares {share:.0%} of its tokens with an earlier one (median), and cached tokens are not "
            f"counted in the {' and the '.join(unseen)} arm: a prefix cache that is not declared would not be seen.",
        )


def _warm_cache(measured: Measured) -> Iterator[Finding]:
    for arm in measured.arms:
        rows = measured.requests[measured.requests["arm"] == arm]
        share = float(rows["cached_tokens"].fillna(0).sum() / rows["input_tokens"].sum())
        if share > 0:
            yield Finding(
                "warning",
                "warm_cache",
                round(share, 4),
                0,
                f"The {arm} arm took {share:.0%} of its input tokens from a cache of earlier prompts: its times "
                "to first token are those of warm prompts.",
            )


def _hidden_cache(arm: str, probes: list[dict[str, Any]], *, shares: bool) -> Iterator[Finding]:
    """Whether a prompt that was asked before is answered sooner than a new one, by an engine that tells of no cache.

    Over all pairs of a run: the whole interval of the ratio lies beyond the limit. It is invalid where the engine says
    that it took no token from a cache, and where the timed prompts share enough to profit from it.
    """
    if any(each["cached_tokens"] for each in probes):
        return  # declared: `warm_cache` counts it
    again, other = (np.array([ms for each in probes for ms in each[key]]) for key in ("again_ms", "other_ms"))
    ratios = np.log(again / other)
    _, high = t_interval(ratios, SURE)
    if math.expm1(high) >= -SOONER_LIMIT or np.median(other - again) < SOONER_MS:
        return
    sooner = -math.expm1(float(ratios.mean()))
    denied = all(each["cached_tokens"] == 0 for each in probes)
    yield Finding(
        "invalid" if shares or denied else "warning",
        "hidden_cache",
        round(sooner, 4),
        SOONER_LIMIT,
        f"The {arm} arm gives the first token of a prompt that it was asked before {sooner:.0%} sooner than that of a "
        f"new one of the same length ({len(ratios)} pairs), and {'denies' if denied else 'does not tell'} that it "
        "keeps prompts: where one begins as an earlier one does, its time to first token is not that of a prefill.",
    )
