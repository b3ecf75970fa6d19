"""A pass whose requests are sent by the clock: at absolute times, however long the ones before take."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from typing import Any, Protocol

from skote.eval.measure import SIGNAL_CHECK_S
from skote.types import Completion, Dispatcher, Request

_Ended = SimpleQueue[tuple[int, Future[Completion]]]


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
) -> None:
    """Send `requests[i]` at the pass's start + `times_ns[i]`, and return when all have ended.

    `on_completion(scheduled_ns, completion)` is called for each in the calling thread, in the order in which they
    ended. `scheduled_ns` (`time.monotonic_ns`) is when the schedule wanted it, whenever it left: nothing drifts, since
    every wait is for an absolute time, and what is late is sent at once, before anything that has ended is handed over.
    Once `give_up` says so, which is asked between two requests and after each answer, no more are sent and those on
    their way are cancelled; the unsent ones are handed over as cancelled ones. A KeyboardInterrupt goes on to the
    caller once what had ended was handed over.
    """
    ended: _Ended = SimpleQueue()
    sent: set[Future[Completion]] = set()
    given_up = False
    gc.collect()
    gc.freeze()  # a collection that goes through all that the process has imported would hold up what is due meanwhile
    start_ns = time.monotonic_ns()

    def hand_over(timeout_s: float) -> bool:
        """Hand over what ends first, waiting no longer; whether there was one."""
        try:
            scheduled_ns, future = ended.get(timeout=timeout_s) if timeout_s > 0 else ended.get_nowait()
        except Empty:
            return False
        sent.remove(future)
        on_completion(scheduled_ns, future.result())
        return True

    try:
        for request, offset_ns in zip(requests, times_ns, strict=True):
            due_ns = start_ns + offset_ns
            while not given_up and (wait_ns := due_ns - time.monotonic_ns()) > 0:
                hand_over(min(wait_ns / 1e9, SIGNAL_CHECK_S))
                given_up = give_up()
            if given_up:
                on_completion(due_ns, _unsent(request))
            else:
                sent.add(_send(dispatcher, request, due_ns, ended))
        cancelled = False
        while sent:
            if not cancelled and (given_up := given_up or give_up()):
                cancelled = True
                for future in tuple(sent):
                    dispatcher.cancel(future)
            hand_over(SIGNAL_CHECK_S)
    except KeyboardInterrupt:
        while hand_over(0):
            pass
        raise
    finally:
        gc.unfreeze()


def _send(dispatcher: Dispatcher, request: Request, due_ns: int, ended: _Ended) -> Future[Completion]:
    future = dispatcher.dispatch(request)
    future.add_done_callback(lambda done: ended.put((due_ns, done)))
    return future


def _unsent(request: Request) -> Completion:
    """What becomes of a request that is not sent any more."""
    now = time.monotonic_ns()
    sentence = "It was not sent: so many requests had missed the limits that slo.attainment was out of reach."
    return Completion(
        request.request_id, len(request.input_ids), (), (), now, None, now, "cancelled", error=sentence, replica=-1,
        device="none",
    )  # fmt: skip
