"""One request at the router, seen from the server's event loop: text in pieces, as tokens come."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Literal, Protocol

from skote.runtime.stops import AnswerText
from skote.serve.errors import ApiError
from skote.types import Completion, FinishReason, Sampling

Outcome = Literal["stop", "length", "cancelled", "error"]
"""How a request ended: as its finish reason says, or since nobody waited for it any more, or by a failure."""


class TokenRouter(Protocol):
    """What a generation needs of a router (`skote.runtime.router.Router`)."""

    def submit_ids(
        self,
        input_ids: tuple[int, ...],
        *,
        max_new_tokens: int,
        sampling: Sampling | None = None,
        ignore_eos: bool = False,
        stop_ids: Sequence[int] = (),
        hear: Callable[[Sequence[int]], None] | None = None,
    ) -> Future[Completion]:
        """Queue a request."""

    def cancel(self, future: Future[Completion]) -> bool:
        """Drop a request."""

    def withdraw(self, future: Future[Completion]) -> bool:
        """Drop a request that waits."""


class ReaderGoneError(Exception):
    """Nobody reads the answer any more."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What a client asks. `continued` is the text that the answer goes on from: token ids of the prompt, or none."""

    input_ids: tuple[int, ...]
    max_new_tokens: int
    sampling: Sampling
    stops: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    continued: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Piece:
    """What came at one time: text may be held back, and `finish_reason` is the last piece's."""

    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None


class Generation:
    """A request that has been given to the router. `close` it in any case; it is settled once the router has answered.

    Made and used in the event loop's thread. The router's threads put tokens down and wake the loop, once for all that
    it has not seen yet: a loop that is busy gets several tokens in one piece.

    Args:
        settled: called in the loop, when the router has answered.
        queue_s: seconds after which a request that no replica has taken is given up.
    """

    def __init__(
        self,
        router: TokenRouter,
        decode: Callable[[Sequence[int]], str],
        asked: Asked,
        *,
        settled: Callable[[Generation, Completion], None],
        queue_s: float,
    ) -> None:
        self.asked = asked
        self.output_tokens = 0
        self.completion: Completion | None = None
        self._router = router
        self._settled = settled
        self._text = AnswerText(decode, asked.stops, asked.continued)
        self._gone = False
        self._broken_off: str | None = None
        self._heard: deque[Sequence[int]] = deque()
        self._woken = False
        self._wake = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._future = router.submit_ids(
            asked.input_ids,
            max_new_tokens=asked.max_new_tokens,
            sampling=asked.sampling,
            ignore_eos=asked.ignore_eos,
            stop_ids=asked.stop_ids,
            hear=self._hear,
        )
        self._patience = self._loop.call_later(queue_s, self._lose_patience, queue_s)
        self._future.add_done_callback(self._answered)

    @property
    def outcome(self) -> Outcome:
        """How it ended, once it is settled."""
        if self._text.is_stopped:
            return "stop"
        if self.completion is None or self.completion.status == "cancelled":
            return "cancelled"
        return "error" if self.completion.status == "error" else self.completion.finish_reason or "stop"

    async def pieces(self) -> AsyncIterator[Piece]:
        """What comes, until the last piece, which says why it ended.

        The last token that may come waits for that, which takes no time: so n tokens, one a step, are n pieces.

        Raises:
            ApiError: the request failed, or was broken off.
            ReaderGoneError: after `leave`.
        """
        text, token_ids = "", list[int]()
        while True:
            await self._wake.wait()
            self._wake.clear()
            self._woken = False  # before the tokens are taken: what comes from here on wakes the loop again
            if self._gone:
                raise ReaderGoneError
            completion = self.completion  # before them, too: all of its tokens are among them
            new = self._take()
            more, count = self._text.add(new) if new else ("", 0)
            text, token_ids = text + more, token_ids + new[:count]
            self.output_tokens += count
            if completion is not None and not self._text.is_stopped:
                if completion.status != "ok":
                    raise self._failure(completion)
                text += self._text.finish()
            if self._text.is_stopped:
                self.close()
                yield Piece(text, token_ids, "stop")
                return
            if completion is not None:
                yield Piece(text, token_ids, completion.finish_reason or "stop")
                return
            if token_ids and self.output_tokens < self.asked.max_new_tokens:
                yield Piece(text, token_ids)
                text, token_ids = "", []

    def leave(self) -> None:
        """The reader is gone: the replica drops the request within a step, and `pieces` ends."""
        self._gone = True
        self._wake.set()
        self.close()

    def break_off(self, sentence: str) -> None:
        """End the request with an error that says why; what has ended stays as it is."""
        self._broken_off = sentence
        self.close()

    def close(self) -> None:
        """Drop the request, where the router has not answered it."""
        self._patience.cancel()
        if self.completion is None:
            self._router.cancel(self._future)

    def _lose_patience(self, queue_s: float) -> None:
        if self._router.withdraw(self._future):
            self._broken_off = f"No replica was free for {queue_s:g} s: try again later."

    def _take(self) -> list[int]:
        token_ids: list[int] = []
        with contextlib.suppress(IndexError):
            while True:
                token_ids.extend(self._heard.popleft())
        return token_ids

    def _failure(self, completion: Completion) -> ApiError:
        sentence = self._broken_off or completion.error or f"The request was {completion.status}."
        return ApiError(503, sentence)

    def _hear(self, token_ids: Sequence[int]) -> None:
        """In the replica's thread."""
        self._heard.append(token_ids)
        if not self._woken:
            self._woken = True
            self._call(self._wake.set)

    def _answered(self, done: Future[Completion]) -> None:
        """In the thread of the router's answers."""
        self._call(lambda: self._settle(done.result()))

    def _call(self, callback: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has been closed: nobody waits for anything any more
            self._loop.call_soon_threadsafe(callback)

    def _settle(self, completion: Completion) -> None:
        self._patience.cancel()
        self.completion = completion
        self._wake.set()
        self._settled(self, completion)
