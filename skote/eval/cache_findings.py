"""Findings about caches of earlier prompts: those that an engine declares, and those that nobody would see."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from skote.eval.derive import Measured
from skote.eval.finding import Finding

SHARED_PREFIX_LIMIT = 0.1  # of the prompt, in the median


def cache_findings(measured: Measured, manifest: dict[str, Any]) -> Iterator[Finding]:
    """What was, or may have been, taken from a cache of earlier prompts instead of being prefilled."""
    yield from _warm_cache(measured)
    yield from _shared_prefix(measured, manifest)


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


def _shared_prefix(measured: Measured, manifest: dict[str, Any]) -> Iterator[Finding]:
    share = manifest["workload"].get("shared_prefix_share")  # older runs have not counted
    told = measured.requests.groupby("arm")["cached_tokens"].count()
    silent = [arm for arm in measured.arms if not told[arm]]
    if share is not None and share > SHARED_PREFIX_LIMIT and silent:
        yield Finding(
            "info",
            "shared_prefix",
            round(share, 4),
            SHARED_PREFIX_LIMIT,
            f"A prompt shares {share:.0%} of its tokens with an earlier one (median), and cached tokens are not "
            f"counted in the {' and the '.join(silent)} arm: a prefix cache that is not declared would not be seen.",
        )
