"""A pass: the same requests sent once through one arm, and the order in which the passes of a run come."""

from __future__ import annotations

import contextlib
import random
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Literal

from skote.types import Completion, Dispatcher, Request

Arm = Literal["candidate", "baseline"]
Order = Literal["AB", "BA"]

SIGNAL_CHECK_S = 0.25


@dataclass(frozen=True, slots=True)
class Pass:
    """One block's requests through one arm; `round` is the pass's position in its block."""

    block: int
    round: int
    arm: Arm


def pass_order(blocks: int, seed: int) -> list[Order]:
    """Which arm goes first in each block: seeded, and of every two blocks from the first on, one of each order.

    So any even number of blocks is balanced, and the order of more blocks begins with that of fewer.
    """
    rng = random.Random(f"{seed}/order")  # noqa: S311 - a reproducible shuffle; a string seed goes through SHA-512
    order: list[Order] = []
    while len(order) < blocks:
        pair: list[Order] = ["AB", "BA"]
        rng.shuffle(pair)
        order += pair
    return order[:blocks]


def plan_passes(blocks: int, seed: int, arms: tuple[Arm] | tuple[Arm, Arm], first: int = 0) -> list[Pass]:
    """The passes of the blocks from `first` up to `blocks`, in order.

    Two a block where there are two arms (`arms[0]` is A), else one a block.
    """
    if len(arms) == 1:
        return [Pass(block, 0, arms[0]) for block in range(first, blocks)]
    return [
        Pass(block, position, arms["AB".index(letter)])
        for block, order in enumerate(pass_order(blocks, seed))
        if block >= first
        for position, letter in enumerate(order)
    ]


def run_pass(
    dispatcher: Dispatcher,
    requests: Sequence[Request],
    load: str,
    concurrency: int,
    on_completion: Callable[[int, Completion], None],
) -> None:
    """Send `requests` and return when all have ended, having called `on_completion(scheduled_ns, completion)` for each.

    A `load` "burst" is a burst, any other a closed loop.

    Closed loop: exactly `concurrency` requests in flight until they run out; one that ends frees its slot for the
    next, whose `scheduled_ns` is that moment (`time.monotonic_ns`), and the pass's start for the first ones. Burst: all
    are scheduled at the pass's start, and `concurrency` plays no part. Completions are handed over in the calling
    thread, in the order in which they ended, and after the freed slot was filled again. A KeyboardInterrupt goes on to
    the caller once what had ended was handed over.
    """
    ended: SimpleQueue[tuple[int, int, Future[Completion]]] = SimpleQueue()
    held: deque[tuple[int, Future[Completion]]] = deque()
    waiting = deque(requests)

    def dispatch_next(scheduled_ns: int) -> None:
        def note_end(future: Future[Completion]) -> None:
            ended.put((scheduled_ns, time.monotonic_ns(), future))

        dispatcher.dispatch(waiting.popleft()).add_done_callback(note_end)

    def next_end() -> tuple[int, int, Future[Completion]]:
        # A signal that comes just before the wait begins does not end it: look again now and then, or Ctrl-C is lost.
        while True:
            with contextlib.suppress(Empty):
                return ended.get(timeout=SIGNAL_CHECK_S)

    def hand_over() -> None:
        while held:
            scheduled_ns, future = held.popleft()
            on_completion(scheduled_ns, future.result())

    try:
        start_ns = time.monotonic_ns()
        for _ in range(len(requests) if load == "burst" else min(concurrency, len(requests))):
            dispatch_next(start_ns)
        for _ in requests:
            scheduled_ns, freed_ns, future = next_end()
            held.append((scheduled_ns, future))
            if waiting:
                dispatch_next(freed_ns)
            hand_over()
    except KeyboardInterrupt:
        while not ended.empty():
            scheduled_ns, _, future = ended.get()
            held.append((scheduled_ns, future))
        hand_over()
        raise
