"""The desk that a worker's engine serves: launches from the pipe, each row of them answered as soon as it has ended."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from operator import index
from typing import Protocol

from skote.runtime.launch_rows import CLOCK, Part, RowRecord
from skote.runtime.stops import Stopping
from skote.runtime.token_pace import TokenPace
from skote.types import FinishReason, Request, SkoteError

Launch = tuple[int, Sequence[Request], bool]
"""A call's id, its requests, and whether their tokens are told as they come."""
Tell = Callable[[int, int, Sequence[int]], None]
"""`tell(call_id, row, token_ids)`: new tokens of a row of a launch."""


class Progress(Protocol):
    """What a desk tells of the engine's work (`skote.runtime.worker_progress`)."""

    def tick(self) -> None:
        """Something was done."""

    def begin(self, call_id: int) -> None:
        """The engine takes up a request of a launch."""

    def keep(self, tokens: int) -> None:
        """The engine has so many tokens of prompts in store."""


class Launches(Protocol):
    """What a desk asks of the worker's inbox."""

    def next_launch(self) -> Launch | None:
        """The next call, where it is a launch; it does not wait."""

    def on_arrival(self, wake: Callable[[], None] | None) -> None:
        """Have `wake` called, in another thread, whenever something has come; None ends that."""

    def is_cancelled(self, call_id: int, row: int) -> bool:
        """Whether a row of a call has been cancelled by now."""

    def forget(self, call_id: int) -> None:
        """The call is answered."""


@dataclass(slots=True)
class _Open:
    """A launch that is not answered yet."""

    call_id: int
    rows_left: int


class WorkerDesk:
    """As `skote.types.Desk`, over `first` and the launches that come while it is served.

    Args:
        engine: its name, for sentences.
        answer: called with a launch's id, a row of it and what became of that.
        tell: called with new tokens of a launch that wants to be told of them.
        progress: told of what the engine does.
        stopping: makes what looks for requests' stops; None where the engine ends there by itself.
        pace: told of tokens, where the parent wants to know how fast tokens come.
    """

    def __init__(
        self,
        engine: str,
        first: Launch,
        inbox: Launches,
        answer: Callable[[int, int, Part], None],
        tell: Tell,
        progress: Progress,
        stopping: Stopping | None = None,
        pace: TokenPace | None = None,
    ) -> None:
        self._engine = engine
        self._first: Launch | None = first
        self._inbox = inbox
        self._answer = answer
        self._tell = tell
        self._progress = progress
        self._stopping = stopping
        self._pace = pace
        self._keys = itertools.count()
        self._rows: dict[int, tuple[_Open, int, RowRecord]] = {}

    def arrivals(self) -> list[tuple[int, Request]]:
        """As `Desk.arrivals`. A call of another kind has to wait until nothing runs, and what comes after it too."""
        taken = self._open_first()
        while (launch := self._inbox.next_launch()) is not None:
            taken.extend(self._open(launch))
        return taken

    def on_arrival(self, wake: Callable[[], None] | None) -> None:
        """As `Desk.on_arrival`."""
        self._inbox.on_arrival(wake)

    def is_cancelled(self, key: int) -> bool:
        """As `Desk.is_cancelled`; nobody waits for what comes after a stop either."""
        opened, row, record = self._rows[key]
        return record.stopped or self._inbox.is_cancelled(opened.call_id, row)

    def admit(self, key: int) -> None:
        """As `Desk.admit`."""
        opened, _, record = self._rows[key]
        self._progress.begin(opened.call_id)
        record.admitted_ns = CLOCK()

    def cached(self, key: int, tokens: int) -> None:
        """As `Desk.cached`."""
        self._rows[key][2].cached_tokens = index(tokens)

    def keeps(self, tokens: int) -> None:
        """As `Desk.keeps`."""
        self._progress.keep(tokens)

    def emit(self, key: int, token_ids: Sequence[int]) -> None:
        """As `Desk.emit`; what comes after a cancel or a stop is dropped."""
        opened, row, record = self._rows[key]
        record.emit(token_ids, dropped=self._inbox.is_cancelled(opened.call_id, row))
        self._progress.tick()
        if self._pace is not None:
            self._pace.emitted(record, len(token_ids))

    def end(self, key: int, reason: FinishReason | None) -> None:
        """As `Desk.end`."""
        record = self._rows[key][2]
        record.cancelled |= reason is None and not record.stopped
        self._close(key, reason, None)

    def fail(self, key: int, error: SkoteError) -> None:
        """As `Desk.fail`."""
        self._close(key, None, str(error))

    def fail_all(self, sentence: str) -> None:
        """Answer what was taken and is not answered, with an error."""
        self._open_first()
        for key in list(self._rows):
            self._close(key, None, sentence)

    def _open_first(self) -> list[tuple[int, Request]]:
        launch, self._first = self._first, None
        return [] if launch is None else self._open(launch)

    def _open(self, launch: Launch) -> list[tuple[int, Request]]:
        call_id, requests, told = launch
        opened = _Open(call_id, len(requests))
        keyed = [(next(self._keys), request) for request in requests]
        for row, (key, request) in enumerate(keyed):
            tell = partial(self._tell, call_id, row) if told else None
            self._rows[key] = opened, row, RowRecord(request, self._engine, tell)
        return [(key, request) for key, request in keyed if self._watch(key, request)]

    def _watch(self, key: int, request: Request) -> bool:
        """Look for the request's stops from now on; where that cannot be it fails, and no other one."""
        if self._stopping is None:
            return True
        try:
            self._rows[key][2].stops = self._stopping.watch(request)
        except SkoteError as error:
            self.fail(key, error)
            return False
        return True

    def _close(self, key: int, reason: FinishReason | None, error: str | None) -> None:
        opened, row, record = self._rows.pop(key)
        opened.rows_left -= 1
        if not opened.rows_left:
            self._inbox.forget(opened.call_id)
        self._answer(opened.call_id, row, record.part(reason, error))
