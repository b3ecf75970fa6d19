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
import time
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

    `cached_tokens` is what the engine says of the prompt that was asked again; None where it does not count.
    `told_after_ms` is how long after its stamp a first token was known here, the least of the three. None for all of it
    where one of them got no token.
    """
    first, again, other = salted([probe.first, probe.first, probe.other])
    later = [("again", again), ("other", other)]
    random.SystemRandom().shuffle(later)
    asked = {name: _first_token(replica, request) for name, request in [("first", first), *later]}
    if any(not completion.chunks for completion, _ in asked.values()):
        return None
    (again_done, _), (other_done, _) = asked["again"], asked["other"]
    return {
        "again_ms": (again_done.chunks[0].t_ns - again_done.dispatched_ns) / 1e6,
        "other_ms": (other_done.chunks[0].t_ns - other_done.dispatched_ns) / 1e6,
        "cached_tokens": again_done.cached_tokens,
        "told_after_ms": min(told_ns - done.chunks[0].t_ns for done, told_ns in asked.values()) / 1e6,
    }


def _first_token(replica: Asked, request: Request) -> tuple[Completion, int]:
    """What is there of the answer to `request` when it is cancelled after its first token, or has failed.

    And when that token was known here, by `time.monotonic_ns`.
    """
    heard = threading.Event()
    told_ns: list[int] = []

    def hear(_row: int, _ids: Sequence[int]) -> None:
        told_ns.append(time.monotonic_ns())
        heard.set()

    launch = replica.generate([request], hear)
    launch.add_done_callback(lambda _: heard.set())
    while not heard.wait(SIGNAL_CHECK_S):  # a signal that comes just before a wait does not end it
        pass
    replica.cancel(launch, 0)
    [completion] = launch.result()
    return completion, told_ns[0] if told_ns else completion.end_ns
