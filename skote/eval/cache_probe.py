"""Asks an engine the same prompt again, to see whether it keeps prompts that it does not tell of.

What an engine says of its cache is not believed. After each pass of an arm one of its replicas is asked for a prompt
that it has never seen, and then for the same one and for another new one of the same length, in an order that is drawn:
the first of the three is there so that whatever is prepared for a length once has been prepared. Each is as long as a
prompt of the pass, holds the tokens of that prompt in another order, and is asked as a timed request is, but that it is
cancelled once its first token is there. Whether the prompt that was asked again came sooner is `cache_findings`'.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, Protocol

from skote.eval.measure import SIGNAL_CHECK_S
from skote.eval.warmup import Unmeasured
from skote.types import Completion, Emit, Request


class Asked(Protocol):
    """A replica, as `skote.runtime.replica.Replica` is one."""

    def generate(self, requests: Sequence[Request], hear: Emit | None = None) -> Future[list[Completion]]:
        """Run `requests`; `hear` is told their tokens as they come."""

    def cancel(self, launch: Future[list[Completion]], row: int) -> None:
        """Drop a row of a launch."""


@dataclass(frozen=True, slots=True)
class CacheProbe:
    """Two requests of one length whose prompts nobody has seen: `first` is asked twice, `other` once."""

    first: Request
    other: Request


def cache_probe(block: Sequence[Request], prompts: Unmeasured, rng: random.Random) -> CacheProbe | None:
    """A probe of the longest prompt of `block`, with which a cache would save most.

    None where its tokens have no other order.
    """
    longest = max(block, key=lambda request: len(request.input_ids))
    first, other = (prompts.shuffled(longest.input_ids, rng) for _ in range(2))
    if first is None or other is None:
        return None
    return CacheProbe(replace(longest, input_ids=first), replace(longest, input_ids=other))


def run_probe(
    replica: Asked, salted: Callable[[Sequence[Request]], Sequence[Request]], probe: CacheProbe
) -> dict[str, Any] | None:
    """Ask `replica`, `salted` as one pass: `again_ms` and `other_ms`, from the dispatch to the first token.

    `cached_tokens` is what the engine says of the prompt that was asked again; None where it does not count. None for
    all of it where one of the three got no token.
    """
    first, again, other = salted([probe.first, probe.first, probe.other])
    later = [("again", again), ("other", other)]
    random.SystemRandom().shuffle(later)
    asked = {name: _first_token(replica, request) for name, request in [("first", first), *later]}
    if any(not completion.chunks for completion in asked.values()):
        return None
    return {
        "again_ms": _ttft_ms(asked["again"]),
        "other_ms": _ttft_ms(asked["other"]),
        "cached_tokens": asked["again"].cached_tokens,
    }


def _first_token(replica: Asked, request: Request) -> Completion:
    """What is there of the answer to `request` when it is cancelled after its first token, or has failed."""
    heard = threading.Event()
    launch = replica.generate([request], lambda _row, _ids: heard.set())
    launch.add_done_callback(lambda _: heard.set())
    while not heard.wait(SIGNAL_CHECK_S):  # a signal that comes just before a wait does not end it
        pass
    replica.cancel(launch, 0)
    [completion] = launch.result()
    return completion


def _ttft_ms(completion: Completion) -> float:
    return (completion.chunks[0].t_ns - completion.dispatched_ns) / 1e6
