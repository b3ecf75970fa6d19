"""Engines each of whose requests is a coroutine: servers, and libraries that batch in threads of their own.

They hand over tokens and no logits, so that the parity gate judges them by an fp32 reference.
"""

from __future__ import annotations

import asyncio
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from skote.types import Desk, Emit, EngineError, FinishReason, Request, SkoteError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

EmitRow = Callable[[Sequence[int]], None]
"""Called with new tokens of a request."""


@dataclass(frozen=True, slots=True)
class Answered:
    """How an answer ended; `cached_tokens` of its prompt came from earlier ones, None where nobody says."""

    reason: FinishReason
    cached_tokens: int | None = None


class StreamingEngine(ABC):
    """`BatchingEngine` over `answer_one`, in one event loop that turns while requests are under way.

    `close` undoes what was put on `_closing`, the last first, and then the loop; so does the engine's end.
    """

    def __init__(self) -> None:
        self._runner = asyncio.Runner()
        self._closing = ExitStack()
        self._closing.callback(self._runner.close)
        self.close = weakref.finalize(self, self._closing.close)

    @abstractmethod
    async def answer_one(self, request: Request, emit: EmitRow) -> Answered:
        """Answer `request`, calling `emit` as tokens come; it is cancelled when nobody waits any more.

        Raises:
            SkoteError: the request failed.
        """

    def serve(self, desk: Desk) -> None:
        """As `BatchingEngine.serve`: each request from when it comes."""
        self._runner.run(self._serve(desk))

    def generate(self, requests: Sequence[Request], emit: Emit) -> list[FinishReason]:
        """As `Engine.generate`: all of `requests` at once.

        Raises:
            SkoteError: one of them failed.
        """
        return self._runner.run(self._generate(requests, emit))

    def score(self, request: Request, forced_ids: Sequence[int]) -> NDArray[np.float32]:
        """Not to be had.

        Raises:
            EngineError: always: no logits are handed over.
        """
        del request, forced_ids
        raise EngineError(f"{type(self).__name__} hands over tokens and no logits: nothing can be scored there.")

    async def _serve(self, desk: Desk) -> None:
        loop, came = asyncio.get_running_loop(), asyncio.Event()
        tasks: dict[int, asyncio.Task[None]] = {}

        def wake() -> None:
            loop.call_soon_threadsafe(came.set)

        desk.on_arrival(wake)
        try:
            while True:
                came.clear()  # before the desk is looked at: what comes from here on sets it again
                for key, request in desk.arrivals():
                    tasks[key] = asyncio.ensure_future(self._serve_one(desk, key, request))
                    tasks[key].add_done_callback(lambda _: came.set())
                for key in [key for key, task in tasks.items() if task.done()]:
                    tasks.pop(key).result()
                for key, task in tasks.items():
                    if desk.is_cancelled(key):
                        task.cancel()
                if not tasks:
                    return
                await came.wait()
        finally:
            desk.on_arrival(None)
            for task in tasks.values():
                task.cancel()

    async def _serve_one(self, desk: Desk, key: int, request: Request) -> None:
        await asyncio.sleep(0)  # as in `_generate`
        desk.admit(key)
        try:
            answered = await self.answer_one(request, partial(desk.emit, key))
        except SkoteError as error:
            desk.fail(key, error)
        except asyncio.CancelledError:
            if not desk.is_cancelled(key):
                raise
            desk.end(key, None)
        else:
            if answered.cached_tokens is not None:
                desk.cached(key, answered.cached_tokens)
            desk.end(key, answered.reason)

    async def _generate(self, requests: Sequence[Request], emit: Emit) -> list[FinishReason]:
        await asyncio.sleep(0)  # what servers closed while nothing ran here is seen before a connection is chosen
        tasks = [
            asyncio.ensure_future(self.answer_one(request, partial(emit, row))) for row, request in enumerate(requests)
        ]
        try:
            return [answered.reason for answered in await asyncio.gather(*tasks)]
        finally:
            for task in tasks:
                task.cancel()
