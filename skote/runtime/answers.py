"""How answers reach whoever waits for them: futures whose callbacks end no thread, and a thread that resolves them."""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue
from typing import TypeVar

from skote.runtime.threads import start_thread
from skote.runtime.waiting import Ticket
from skote.types import Completion

CALLBACKS_S = 10.0
"""How long `Answers.join` waits for callbacks that do not return."""

_T = TypeVar("_T")
_LOG = logging.getLogger("concurrent.futures")  # where a future's own class says that a callback failed


class Answer(Future[_T]):
    """A future that its own `cancel` leaves alone, and whose callbacks cannot end the thread that resolves it.

    Whatever a callback raises, SystemExit included, goes to the log of concurrent.futures, and the next callback runs.
    """

    def __init__(self) -> None:
        super().__init__()
        self.set_running_or_notify_cancel()  # a cancelled future could not take the answer

    def add_done_callback(self, fn: Callable[[Future[_T]], object]) -> None:
        """As `Future.add_done_callback`."""
        super().add_done_callback(partial(_contain, fn))


def _contain(callback: Callable[[Future[_T]], object], future: Future[_T]) -> None:
    try:
        callback(future)
    except BaseException as error:  # sys.exit in a callback would end a thread that serves all others
        if isinstance(error, Exception) or threading.current_thread() is threading.main_thread():
            raise  # the future logs an Exception by itself; the main thread resolves nothing and may end as it likes
        _LOG.exception("exception calling callback for %r", future)


def contained(hear: Callable[[Sequence[int]], object]) -> Callable[[Sequence[int]], None]:
    """As `hear`, but what it raises goes to the log of concurrent.futures: its thread reads everybody's tokens."""

    def call(token_ids: Sequence[int]) -> None:
        try:
            hear(token_ids)
        except BaseException:  # noqa: BLE001 - sys.exit in a caller's function would end the replica's reader
            _LOG.exception("exception telling %r of tokens", hear)

    return call


class Answers:
    """A thread that resolves futures in the order in which they were put, so that callbacks hold up nothing but others.

    Raises:
        ReplicaError: the system has no thread left.
    """

    def __init__(self) -> None:
        self._queue: SimpleQueue[Sequence[tuple[Ticket, Completion]] | None] = SimpleQueue()
        self._thread = start_thread("dispatch-answers", self._resolve)

    @property
    def in_callback(self) -> bool:
        """Whether the calling thread is the one that runs the callbacks."""
        return threading.current_thread() is self._thread

    def put(self, answers: Sequence[tuple[Ticket, Completion]]) -> None:
        """Resolve each ticket's future with its completion, dispatched at its stamp and ended now; returns at once."""
        self._queue.put(answers)

    def end(self) -> None:
        """End the thread once it has resolved what was put; nothing may be put after."""
        self._queue.put(None)

    def join(self) -> None:
        """Wait for the end, at most `CALLBACKS_S` seconds, and not at all in a callback."""
        if not self.in_callback:
            self._thread.join(CALLBACKS_S)

    def _resolve(self) -> None:
        while (answers := self._queue.get()) is not None:
            for ticket, completion in answers:
                ticket.future.set_result(
                    dataclasses.replace(completion, dispatched_ns=ticket.dispatched_ns, end_ns=time.monotonic_ns())
                )
