"""What a worker knows of the rows of its launches while they run, and what it answers of each."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from operator import index
from typing import NamedTuple

from skote.runtime.stops import Stops
from skote.types import EngineError, FinishReason, Request

CLOCK = time.monotonic_ns  # bound before an engine's code is there to put another in its place


class Part(NamedTuple):
    """One row of a launch, for the parent; plain integers, since a pickled `Chunk` costs microseconds."""

    output_ids: tuple[int, ...]
    chunk_ns: tuple[int, ...]
    chunk_tokens: tuple[int, ...]
    admitted_ns: int | None
    finish_reason: FinishReason | None
    error: str | None
    cancelled: bool
    cached_tokens: int | None


class RowRecord:
    """A row of a launch so far. `engine` is named in its sentences, `tell` is told what it gets.

    Attributes:
        admitted_ns: when the engine took it; None before.
        cancelled: some of it was dropped, since nobody waited for it any more.
        stopped: it has ended at one of its stops; what the engine hands over after that is no part of it.
        stops: what looks for them; None where it has none, or the engine ends there by itself.
        cached_tokens: of its prompt, taken from a cache of earlier ones; None where the engine does not count them.
    """

    def __init__(self, request: Request, engine: str, tell: Callable[[Sequence[int]], None] | None = None) -> None:
        self.request = request
        self.admitted_ns: int | None = None
        self.cancelled = False
        self.stopped = False
        self.stops: Stops | None = None
        self.cached_tokens: int | None = None
        self._engine = engine
        self._tell = tell
        self._output_ids: list[int] = []
        self._chunk_ns: list[int] = []
        self._chunk_tokens: list[int] = []

    @property
    def complete(self) -> bool:
        """Whether it has all tokens that were asked for, or has stopped."""
        return self.stopped or len(self._output_ids) >= self.request.max_new_tokens

    def emit(self, token_ids: Sequence[int], *, dropped: bool) -> None:
        """Note tokens that the engine hands over now, or that they were `dropped`.

        Raises:
            EngineError: there are none.
        """
        # A token counts when the host holds its integer: whatever the engine hands over is made one before the stamp.
        held = [index(token) for token in token_ids]
        now = CLOCK()
        if not held:
            raise EngineError(f"{self._engine} emitted a chunk without tokens.")
        if self.stopped:
            return
        if dropped:
            self.cancelled = True
            return
        if self.stops is not None and (end := self.stops.end(held)) is not None:
            self.stopped, held = True, held[:end]
        self._chunk_ns.append(now)
        self._chunk_tokens.append(len(held))
        self._output_ids.extend(held)
        if self._tell is not None:
            self._tell(held)

    def part(self, reason: FinishReason | None, error: str | None) -> Part:
        """The row as it is answered: why it ended, or what failed."""
        return Part(
            tuple(self._output_ids),
            tuple(self._chunk_ns),
            tuple(self._chunk_tokens),
            self.admitted_ns,
            None if self.cancelled else "stop" if self.stopped else reason,
            error,
            self.cancelled,
            self.cached_tokens,
        )
