"""A pass whose requests are sent by the clock: at absolute times, however long the ones before take."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from queue import Empty, SimpleQueue

from skote.eval.measure import SIGNAL_CHECK_S
from skote.types import Completion, Dispatcher, Request

_Ended = SimpleQueue[tuple[int, Future[Completion]]]


def run_schedule(
    dispatcher: Dispatcher,
    requests: Sequence[Request],
    times_ns: Sequence[int],
    on_completion: Callable[[int, Completion], None],
) -> None:
    """Send `requests[i]` at the pass's start + `times_ns[i]`, and return when all have ended.

    `on_completion(scheduled_ns, completion)` is called for each in the calling thread, in the order in which they
    ended. `scheduled_ns` (`time.monotonic_ns`) is when the schedule wanted it, whenever it left: nothing drifts, since
    every wait is for an absolute time, and what is late is sent at once, before anything that has ended is handed over.
    A KeyboardInterrupt goes on to the caller once what had ended was handed over.
    """
    ended: _Ended = SimpleQueue()
    start_ns = time.monotonic_ns()
    open_requests = 0

    def hand_over(timeout_s: float) -> int:
        """Hand over what ends first, waiting no longer; how many that were, 1 or 0."""
        try:
            scheduled_ns, future = ended.get(timeout=timeout_s) if timeout_s > 0 else ended.get_nowait()
        except Empty:
            return 0
        on_completion(scheduled_ns, future.result())
        return 1

    try:
        for request, offset_ns in zip(requests, times_ns, strict=True):
            due_ns = start_ns + offset_ns
            while (wait_ns := due_ns - time.monotonic_ns()) > 0:
                open_requests -= hand_over(min(wait_ns / 1e9, SIGNAL_CHECK_S))
            _send(dispatcher, request, due_ns, ended)
            open_requests += 1
        while open_requests:
            open_requests -= hand_over(SIGNAL_CHECK_S)
    except KeyboardInterrupt:
        while hand_over(0):
            pass
        raise


def _send(dispatcher: Dispatcher, request: Request, due_ns: int, ended: _Ended) -> None:
    dispatcher.dispatch(request).add_done_callback(lambda future: ended.put((due_ns, future)))
