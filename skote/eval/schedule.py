"""A pass whose requests are sent by the clock: at absolute times, however long the ones before take."""

from __future__ import annotations

import gc
import heapq
import itertools
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from typing import Any, Protocol

from skote.eval.measure import SIGNAL_CHECK_S
from skote.types import Completion, Dispatcher, Request

GIVEN_UP = "It was not sent: so many requests had missed the limits that slo.attainment was out of reach."
TURN_FAILED = "It was not sent: the turn before it failed."
SIGNAL_CHECK_NS = round(SIGNAL_CHECK_S * 1e9)
Follow = Callable[[Request, Completion], Iterable[tuple[int | None, Request]]]
"""What comes after an answer: (ns from its end, request), None for a request that can never be sent."""


class Cancelling(Dispatcher, Protocol):
    """A dispatcher that also drops requests."""

    def cancel(self, future: Future[Any]) -> bool:
        """Drop the request of a future that `dispatch` gave, which resolves all the same."""


def run_schedule(
    dispatcher: Cancelling,
    requests: Sequence[Request],
    times_ns: Sequence[int],
    on_completion: Callable[[int, Completion], None],
    give_up: Callable[[], bool] = lambda: False,
    follow: Follow = lambda *_: (),
) -> None:
    """Send `requests[i]` at the pass's start + `times_ns[i]`, and return when all have ended.

    `on_completion(scheduled_ns, completion)` is called for each in the calling thread, in the order in which they
    ended. `scheduled_ns` (`time.monotonic_ns`) is when the schedule wanted it, whenever it left: nothing drifts, since
    every wait is for an absolute time, and what is late is sent at once, before anything that has ended is handed over.
    What `follow` names after an answer is due so long after that answer's end. Once `give_up` says so, no more are sent
    and those on their way are cancelled; the unsent ones are handed over as cancelled ones. A KeyboardInterrupt goes on
    to the caller once what had ended was handed over.
    """
    gc.collect()
    gc.freeze()  # a collection that goes through all that the process has imported would hold up what is due meanwhile
    sending = _Sending(dispatcher, on_completion, follow)
    try:
        sending.schedule(requests, times_ns)
        sending.run(give_up)
    except KeyboardInterrupt:
        while sending.hand_over(0):
            pass
        raise
    finally:
        gc.unfreeze()


class _Sending:
    """A pass in progress: what is due, in the order of time, and what is on its way."""

    def __init__(
        self, dispatcher: Cancelling, on_completion: Callable[[int, Completion], None], follow: Follow
    ) -> None:
        self._dispatcher, self._on_completion, self._follow = dispatcher, on_completion, follow
        self._due: list[tuple[int, int, Request]] = []
        self._order = itertools.count()  # of what is due at the same moment
        self._sent: dict[Future[Completion], Request] = {}
        self._ended: SimpleQueue[tuple[int, Future[Completion]]] = SimpleQueue()

    def schedule(self, requests: Sequence[Request], times_ns: Sequence[int]) -> None:
        """Let each of `requests` be due so long after now."""
        start_ns = time.monotonic_ns()
        for request, at_ns in zip(requests, times_ns, strict=True):
            self._add(start_ns + at_ns, request)

    def run(self, give_up: Callable[[], bool]) -> None:
        """Send what is due, and hand over what ends, until nothing is left."""
        given_up = False
        while self._due or self._sent:
            if not given_up and give_up():
                given_up = True
                for future in tuple(self._sent):
                    self._dispatcher.cancel(future)
            wait_ns = self._due[0][0] - time.monotonic_ns() if self._due else SIGNAL_CHECK_NS
            if not self._due or (wait_ns > 0 and not given_up):
                self.hand_over(min(wait_ns, SIGNAL_CHECK_NS) / 1e9)
                continue
            due_ns, _, request = heapq.heappop(self._due)
            if given_up:
                self._finish(due_ns, request, _unsent(request, GIVEN_UP))
            else:
                self._send(due_ns, request)

    def hand_over(self, timeout_s: float) -> bool:
        """Hand over what ends first, waiting no longer; whether there was one."""
        try:
            due_ns, future = self._ended.get(timeout=timeout_s) if timeout_s > 0 else self._ended.get_nowait()
        except Empty:
            return False
        self._finish(due_ns, self._sent.pop(future), future.result())
        return True

    def _add(self, due_ns: int, request: Request) -> None:
        heapq.heappush(self._due, (due_ns, next(self._order), request))

    def _send(self, due_ns: int, request: Request) -> None:
        future = self._dispatcher.dispatch(request)
        self._sent[future] = request
        future.add_done_callback(lambda done: self._ended.put((due_ns, done)))

    def _finish(self, due_ns: int, request: Request, completion: Completion) -> None:
        for delay_ns, following in self._follow(request, completion):
            if delay_ns is None:
                self._on_completion(completion.end_ns, _unsent(following, TURN_FAILED))
            else:
                self._add(completion.end_ns + delay_ns, following)
        self._on_completion(due_ns, completion)


def _unsent(request: Request, sentence: str) -> Completion:
    """What becomes of a request that is not sent any more."""
    now = time.monotonic_ns()
    return Completion(
        request.request_id, len(request.input_ids), (), (), now, None, now, "cancelled", error=sentence, replica=-1,
        device="none",
    )  # fmt: skip
