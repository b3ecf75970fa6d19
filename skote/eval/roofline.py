"""How near an arm's decode step comes to what its device can read, and where the step's time goes."""

from __future__ import annotations

from typing import Any

import pandas as pd

from skote.eval.derive import METRICS, Measured
from skote.eval.stats import percentile

TPOT, ICL, ITL = (next(metric for metric in METRICS if metric.name == name) for name in ("tpot_ms", "icl_ms", "itl_ms"))


def mean_context(requests: pd.DataFrame) -> float | None:
    """Positions that a decode step read on average, over the tokens after the first one of every finished request.

    The step that gives token k of a request reads its prompt and k - 1 tokens of its output: over its N tokens
    `input_tokens` + N / 2 on average, for each of N - 1 steps. None without such a step.
    """
    ok = requests[requests["status"] == "ok"]
    steps = (ok["output_tokens"] - 1).clip(lower=0)
    total = int(steps.sum())
    return float((steps * (ok["input_tokens"] + ok["output_tokens"] / 2)).sum() / total) if total else None


def roofline(measured: Measured, arm: str, manifest: dict[str, Any]) -> dict[str, float | None]:
    """The roofline of `arm`, null where something that it takes was not measured.

    `weight_bytes` and `kv_bytes`: what one decode step reads, one row at a time; `mean_context`: the positions that
    `kv_bytes` stands for; `floor_ms`: the time in which the device reads both; `achieved_share`: `floor_ms` / the
    median of `tpot_ms`. `step_share`: the time in which it reads what of both exceeds all its caches / the median of
    `tpot_ms`, x tokens a chunk where the engine speculates. `prefill_floor_ms`: the median over requests of the least
    time that their prompts take, by arithmetic or by reading the weights; `prefill_share`: the median of that time /
    `ttft_ms`. `request_floor_ms` and `request_share`: the same of `request_floors` and `e2el_ms`, null where the engine
    speculates.
    """
    model, ceilings = manifest["model"], manifest.get("roofline") or {}
    weights, position = model["bytes_per_token"], model.get("kv_bytes_per_token")
    bandwidth, cache = ceilings.get("read_bandwidth_bytes_per_s"), ceilings.get("cache_bytes")
    requests = measured.requests[measured.requests["arm"] == arm]
    context = mean_context(requests)
    kv = None if context is None or position is None else context * position
    floor_ms = None if kv is None or bandwidth is None else 1000 * (weights + kv) / bandwidth
    uncached_ms = None
    if kv is not None and bandwidth is not None and cache is not None:
        uncached_ms = 1000 * max(0.0, weights + kv - cache) / bandwidth
    tpot = measured.samples(arm, TPOT).values
    drafted = speculates(manifest, arm)
    step_ms = percentile(tpot, 50) * (tokens_per_chunk(measured, arm) if drafted else 1.0) if tpot.size else None
    prefill = prefill_floors(requests, manifest)
    whole = None if drafted else request_floors(requests, manifest)
    return {
        "weight_bytes": weights,
        "mean_context": context,
        "kv_bytes": kv,
        "floor_ms": floor_ms,
        "achieved_share": floor_ms / percentile(tpot, 50) if floor_ms is not None and tpot.size else None,
        "step_share": uncached_ms / step_ms if uncached_ms is not None and step_ms is not None else None,
        "prefill_floor_ms": _median(prefill),
        "prefill_share": None if prefill is None else _median(prefill / requests["ttft_ms"]),
        "request_floor_ms": _median(whole),
        "request_share": None if whole is None else _median(whole / requests["e2el_ms"]),
    }


def speculates(manifest: dict[str, Any], arm: str) -> bool:
    """Whether an engine of `arm` declares that one reading of its weights may give several tokens."""
    replicas = manifest["arms"].get(arm, {}).get("replicas", [])
    return any(replica["info"].get("speculative") is True for replica in replicas)


def tokens_per_chunk(measured: Measured, arm: str) -> float:
    """Tokens that come at once after a request's first chunk, on average.

    A step that reads the weights once hands over one chunk, of several tokens where it verified a draft: so a chunk,
    not a token, is what cannot come faster than the weights are read.
    """
    chunks = measured.samples(arm, ICL).values.size
    return measured.samples(arm, ITL).values.size / chunks if chunks else 1.0


def multi_token_share(measured: Measured, arm: str) -> float:
    """Of the chunks after the first of a request, those of more than one token; 0 without such chunks."""
    sizes = measured.gaps["n_tokens"].to_numpy()[measured.of_arm(arm)]
    return float((sizes > 1).mean()) if sizes.size else 0.0


def prefill_floors(requests: pd.DataFrame, manifest: dict[str, Any]) -> pd.Series[float] | None:
    """The least ms from a prompt to its first token, of each of `requests`; None where a ceiling was not measured.

    The larger of operations / measured peak, over the tokens that did not come from a cache of earlier prompts, and of
    the weights, less what caches hold, / measured bandwidth. Operations: `skote.model.flops`.
    """
    model, ceilings = manifest["model"], manifest.get("roofline") or {}
    flops, peak = model.get("prefill_flops"), ceilings.get("matmul_peak_flops_per_s")
    bandwidth, cache = ceilings.get("read_bandwidth_bytes_per_s"), ceilings.get("cache_bytes")
    if flops is None or peak is None or bandwidth is None:
        return None
    tokens = requests["input_tokens"].astype("float64")
    cached = requests["cached_tokens"].astype("float64").fillna(0.0)
    pairs = tokens * (tokens + 1) / 2 - cached * (cached + 1) / 2
    operations = flops["fixed"] + flops["per_token"] * (tokens - cached) + flops["per_pair"] * pairs
    unheld = 0.0 if cache is None else max(0.0, model["bytes_per_token"] - cache)
    floors: pd.Series[float] = (1000 * operations / peak).clip(lower=1000 * unheld / bandwidth)
    return floors


def request_floors(requests: pd.DataFrame, manifest: dict[str, Any]) -> pd.Series[float] | None:
    """The least ms from dispatch to the last token, of each of `requests`; None where a ceiling was not measured.

    The floor of the prefill, and for each token after the first the time in which the device reads what of the weights
    and the KV cache, at the step's mean position, its caches cannot hold. However its tokens are handed over, a request
    takes as long, alone or beside others. Where the operations of a prefill are not known it reads the weights once.
    """
    model, ceilings = manifest["model"], manifest.get("roofline") or {}
    bandwidth, cache = ceilings.get("read_bandwidth_bytes_per_s"), ceilings.get("cache_bytes")
    position = model.get("kv_bytes_per_token")
    if bandwidth is None or cache is None or position is None:
        return None
    unheld = model["bytes_per_token"] - cache
    prefill = prefill_floors(requests, manifest)
    if prefill is None:
        prefill = pd.Series(1000 * max(0.0, unheld) / bandwidth, index=requests.index)
    outputs = requests["output_tokens"].astype("float64")
    read = (unheld + position * (requests["input_tokens"] + outputs / 2)).clip(lower=0)
    floors: pd.Series[float] = prefill + (outputs - 1).clip(lower=0) * 1000 * read / bandwidth
    return floors


def step_kernels(manifest: dict[str, Any], arm: str) -> list[dict[str, Any]]:
    """The kernels of a decode step of the arm's first replica, the longest first, each with its `share` of their sum.

    Shares are of own times (`skote.runtime.profile.aggregate`), in a run without them of durations. Empty where the
    engine could not tell.
    """
    replicas = manifest["arms"].get(arm, {}).get("replicas", [])
    kernels = replicas[0]["info"].get("step_kernels", []) if replicas else []
    spent = [float(kernel.get("own_us", kernel["us"])) for kernel in kernels]
    shared = [kernel | {"share": us / sum(spent)} for kernel, us in zip(kernels, spent, strict=True)]
    return sorted(shared, key=lambda kernel: -float(kernel["share"]))


def _median(values: pd.Series[float] | None) -> float | None:
    known = values.dropna() if values is not None else None
    return None if known is None or known.empty else float(known.median())
