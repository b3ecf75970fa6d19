"""E07 and E08: what a persistent KV cache saves, and that left padding changes nothing."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from skote.contracts.check import REPEATS, Figures, Subject, differing, greedy, prompts

SHORT, LONG = 64, 384
STEPS = 16


def kv_cache(subject: Subject) -> Figures:
    """The engine, which keeps its cache, against the Transformers module, which computes the whole prompt each token.

    `rows_differing`: of two prompts, whose tokens are not those of the module without a cache. `slope_ratio`: how much
    longer a token takes at a context of 384 than at 64, with the cache / without; 0 is a flat cost. Each repeat times
    all four anew.
    """
    import torch

    from skote.model.causal_lm import load_module
    from skote.runtime.engine import SkotergyEngine

    engine = SkotergyEngine(**subject.options(max_model_len=LONG + STEPS))
    short, long = prompts(engine.facts.vocab, (SHORT, LONG))
    module = load_module(
        Path(subject.model["local_dir"]),
        dtype=torch.float32,
        device=torch.device(subject.device),
        random_seed=subject.model["random_seed"],
        layers=subject.model["layers"],
    )
    uncached = [_without_cache(module, prompt, 4) for prompt in (short, long)]
    cached = [greedy(engine, [prompt], 4)[0] for prompt in (short, long)]
    ratios = []
    for _ in range(REPEATS):
        with_cache = _token_s(engine, long) - _token_s(engine, short)
        ratios.append(with_cache / (_forward_s(module, long) - _forward_s(module, short)))
    return {"rows_differing": differing(cached, uncached), "slope_ratio": ratios}


def padding(subject: Subject) -> Figures:
    """A ragged batch of four against the same prompts one at a time, in the engine and in Transformers' `generate`.

    `rows_differing` and `rows_differing_baseline` count rows whose greedy tokens are not equal.
    """
    from skote.engines.transformers import TransformersEngine
    from skote.runtime.engine import SkotergyEngine

    engine = SkotergyEngine(**subject.options(max_model_len=64))
    baseline = TransformersEngine(**subject.options())
    ragged = prompts(engine.facts.vocab, (3, 9, 17, 30))
    counts = []
    for each in (engine, baseline):
        alone = [greedy(each, [prompt], 12)[0] for prompt in ragged]
        counts.append(differing(greedy(each, ragged, 12), alone))
    return {"rows_differing": counts[0], "rows_differing_baseline": counts[1]}


def _without_cache(module: Any, prompt: Sequence[int], tokens: int) -> list[int]:  # noqa: ANN401 (untyped Transformers)
    import torch

    ids = list(prompt)
    with torch.no_grad():
        for _ in range(tokens):
            logits = module(torch.tensor([ids], device=module.device), use_cache=False).logits
            ids.append(int(logits[0, -1].argmax()))
    return ids[len(prompt) :]


def _token_s(engine: Any, prompt: Sequence[int]) -> float:  # noqa: ANN401
    """Median seconds of a token after `prompt`, the first one left out."""
    from skote.types import Request

    stamps: list[float] = []
    request = Request("timed", tuple(prompt), STEPS, ignore_eos=True)
    engine.generate([request], lambda *_: stamps.append(time.perf_counter()))
    return statistics.median(after - before for before, after in itertools.pairwise(stamps))


def _forward_s(module: Any, prompt: Sequence[int]) -> float:  # noqa: ANN401
    """Seconds of a token where nothing is kept: a forward pass over the whole prompt, and the host holds the token."""
    started = time.perf_counter()
    _without_cache(module, prompt, 1)
    return time.perf_counter() - started
