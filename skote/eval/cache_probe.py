"""Asks an engine the same prompt again, to see whether it keeps prompts that it does not tell of.

What an engine says of its cache is not believed. After each pass of an arm one of its replicas is asked for a prompt
that it has never seen, and then twice for the same one and for two new ones of the same length, in an order that is
drawn: the first is there so that whatever is prepared for a length once has been prepared. Each is as long as a prompt
of the pass, holds the tokens of that prompt in another order, and is asked as a timed request is, but that it is
cancelled once its first token is there. Whether the prompt that was asked again came sooner is `cache_findings`'.
"""

from __future__ import annotations

import itertools
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

PAIRS = 2
"""Of a prompt that is asked again and a new one, after each pass: ten in five blocks, which chance does not line up."""


class Asked(Protocol):
    """A replica, as `skote.runtime.replica.Replica` is one."""

    def generate(self, requests: Sequence[Request], hear: Emit | None = None) -> Future[list[Completion]]:
        """Run `requests`; `hear` is told their tokens as they come."""

    def cancel(self, launch: Future[list[Completion]], row: int) -> None:
        """Drop a row of a launch."""


@dataclass(frozen=True, slots=True)
class CacheProbe:
    """Requests of one length whose prompts nobody has seen: `first` is asked and asked again, the `others` once.

    `last` is a timed prompt once more, for one token.
    """

    first: Request
    others: tuple[Request, ...]
    last: Request


def cache_probe(block: Sequence[Request], prompts: Unmeasured, rng: random.Random) -> CacheProbe | None:
    """A probe of the longest prompt of `block`, with which a cache would save most.

    None where its tokens have no other order.
    """
    longest = max(block, key=lambda request: len(request.input_ids))
    drawn = [prompts.shuffled(longest.input_ids, rng) for _ in range(1 + PAIRS)]
    asked = [replace(longest, input_ids=ids) for ids in drawn if ids is not None]
    if len(asked) < len(drawn):
        return None
    return CacheProbe(asked[0], tuple(asked[1:]), replace(longest, max_new_tokens=1))


def run_probe(
    replica: Asked, salted: Callable[[Sequence[Request]], Sequence[Request]], probe: CacheProbe
) -> dict[str, Any] | None:
    """Ask `replica`, `salted` as one pass: `again_ms` and `other_ms`, from the dispatch to the first token, as asked.

    `cached_tokens` is the most that the engine says of the prompt that was asked again; None where it does not count.
    `told_after_ms` is how long after its stamp a first token was known here, the least of all. None for all of it where
    a request got no token, and where the whole answer came at once: it has no first token, and cannot be cut short.
    """
    first, *rest, last = salted([probe.first, *[probe.first] * len(probe.others), *probe.others, probe.last])
    random.SystemRandom().shuffle(rest)
    answers = [_first_token(replica, first)]
    if len(answers[0][0].chunks) == 1 < len(answers[0][0].output_ids):
        return None
    answers += [_first_token(replica, request) for request in rest]
    # A step after the last token may still run: an answer of one token, which has none, comes behind it.
    replica.generate([last]).result()
    if any(not completion.chunks for completion, _ in answers):
        return None
    later = [completion for completion, _ in answers[1:]]
    took_ms = [(completion.chunks[0].t_ns - completion.dispatched_ns) / 1e6 for completion in later]
    known = [request.input_ids == first.input_ids for request in rest]
    cached = [done.cached_tokens for done in itertools.compress(later, known) if done.cached_tokens is not None]
    return {
        "again_ms": list(itertools.compress(took_ms, known)),
        "other_ms": [ms for ms, again in zip(took_ms, known, strict=True) if not again],
        "cached_tokens": max(cached, default=None),
        "told_after_ms": min(told_ns - completion.chunks[0].t_ns for completion, told_ns in answers) / 1e6,
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
