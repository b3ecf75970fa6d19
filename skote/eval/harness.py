"""What the harness itself adds to a request, measured with an engine that does nothing, through the same process."""

from __future__ import annotations

import statistics
from typing import Any

from skote.eval.measure import run_pass
from skote.types import Completion, Dispatcher, Request

REQUESTS = 200
TOKENS = 65
_PROMPT = tuple(range(1, 101))


def measure_overhead(dispatcher: Dispatcher) -> dict[str, Any]:
    """The manifest's "harness" entry: medians over 200 requests of 1 token and 200 of 65, one at a time.

    `ms_per_request` is dispatch to hand-back of a request of one token; `us_per_token` is what each further token
    adds. `dispatcher` must serve a simulated engine without delays.
    """
    one = _median_ms(dispatcher, 1)
    many = _median_ms(dispatcher, TOKENS)
    return {
        "us_per_token": max(0.0, (many - one) / (TOKENS - 1) * 1e3),
        "ms_per_request": one,
        "requests": 2 * REQUESTS,
        "tokens": REQUESTS * (TOKENS + 1),
    }


def _median_ms(dispatcher: Dispatcher, tokens: int) -> float:
    requests = [Request(f"overhead-{tokens}-{index}", _PROMPT, tokens, ignore_eos=True) for index in range(REQUESTS)]
    spans: list[float] = []

    def note(_: int, completion: Completion) -> None:
        spans.append((completion.end_ns - completion.dispatched_ns) / 1e6)

    run_pass(dispatcher, requests, "closed", 1, note)
    return statistics.median(spans)
