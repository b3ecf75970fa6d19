"""A request in the event loop, over a router that the test is: what is told, and what becomes of it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from typing import Any

import pytest

from skote.serve.errors import ApiError
from skote.serve.generation import Asked, Generation, Piece, ReaderGoneError
from skote.types import Completion, Sampling

LONG_S = 100.0


class HandRouter:
    """Tells and answers what the test says, in a thread of its own; `cancel` is noted."""

    def __init__(self) -> None:
        self.future: Future[Completion] = Future()
        self.cancelled = 0
        self.withdrawn = 0

    def submit_ids(self, input_ids: tuple[int, ...], *, hear: Any, **options: Any) -> Future[Completion]:
        self.hear = hear
        self.options = options
        return self.future

    def cancel(self, future: Future[Completion]) -> bool:
        assert future is self.future
        self.cancelled += 1
        return True

    def withdraw(self, future: Future[Completion]) -> bool:
        assert future is self.future
        self.withdrawn += 1
        return True

    def answer(self, status: Any = "ok", error: str | None = None, reason: Any = "length") -> None:
        self.future.set_result(Completion("a", 1, (), (), 0, 0, 1, status, reason if status == "ok" else None, error))


def in_thread(*calls: Callable[[], object]) -> None:
    """Make the calls from another thread, before the loop gets its turn."""
    thread = threading.Thread(target=lambda: [call() for call in calls])
    thread.start()
    thread.join()


class Case:
    """A generation of letters, and what it settled with."""

    def __init__(self, *, stops: Sequence[str] = (), queue_s: float = LONG_S) -> None:
        self.router = HandRouter()
        self.settled: list[Completion] = []
        self.generation = Generation(
            self.router,
            lambda ids: "".join(map(chr, ids)),
            Asked((1,), 9, Sampling(), tuple(stops)),
            settled=lambda _, completion: self.settled.append(completion),
            queue_s=queue_s,
        )

    def tell(self, *texts: str) -> None:
        in_thread(*(lambda text=text: self.router.hear([ord(letter) for letter in text]) for text in texts))

    async def rest(self) -> list[Piece]:
        return [piece async for piece in self.generation.pieces()]


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 30.0))  # type: ignore[arg-type]


def test_a_loop_that_is_busy_gets_all_tokens_in_one_piece_and_is_woken_once() -> None:
    async def test() -> None:
        case = Case()
        loop = asyncio.get_running_loop()
        calls: list[object] = []
        wake, loop.call_soon_threadsafe = loop.call_soon_threadsafe, lambda *args: calls.append(wake(*args))  # type: ignore[method-assign,assignment]
        case.tell("a", "b", "cd")
        assert len(calls) == 1
        pieces = case.generation.pieces()
        assert await anext(pieces) == Piece("abcd", [97, 98, 99, 100])
        case.tell("e")
        assert len(calls) == 2
        in_thread(case.router.answer)
        assert [piece async for piece in pieces] == [Piece("e", [101], "length")]
        assert (case.generation.output_tokens, case.generation.outcome, case.router.cancelled) == (5, "length", 0)
        assert [completion.status for completion in case.settled] == ["ok"]

    run(test)


def test_the_last_token_comes_with_the_reason() -> None:
    async def test() -> None:
        case = Case()
        case.tell("abcdefgh")
        pieces = case.generation.pieces()
        assert (await anext(pieces)).text == "abcdefgh"
        case.tell("i")
        last = asyncio.ensure_future(anext(pieces))
        while case.generation.output_tokens < 9:
            await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not last.done()
        in_thread(case.router.answer)
        assert await last == Piece("i", [105], "length")

    run(test)


def test_a_stop_string_ends_it_and_frees_the_replica() -> None:
    async def test() -> None:
        case = Case(stops=["c", "xy"])
        case.tell("ab")
        pieces = case.generation.pieces()
        assert await anext(pieces) == Piece("ab", [97, 98])
        case.tell("bxcd")
        assert [piece async for piece in pieces] == [Piece("bx", [98, 120, 99], "stop")]  # d came after it
        assert case.generation.output_tokens == 5
        assert case.router.cancelled == 1
        in_thread(lambda: case.router.answer("cancelled", "The request was cancelled."))
        while not case.settled:
            await asyncio.sleep(0)
        assert case.generation.outcome == "stop"

    run(test)


def test_what_is_held_back_goes_out_at_the_end() -> None:
    async def test() -> None:
        case = Case(stops=["ab!"])
        case.tell("xab")
        in_thread(lambda: case.router.answer(reason="stop"))
        assert await case.rest() == [Piece("xab", [120, 97, 98], "stop")]

    run(test)


def test_a_failure_is_told_after_the_tokens_before_it() -> None:
    async def test() -> None:
        case = Case()
        case.tell("a")
        pieces = case.generation.pieces()
        assert await anext(pieces) == Piece("a", [97])
        in_thread(lambda: case.router.answer("error", "The replica ended."))
        with pytest.raises(ApiError, match=r"The replica ended\.") as failed:
            await anext(pieces)
        assert failed.value.status == 503
        assert case.generation.outcome == "error"

    run(test)


def test_a_reader_who_leaves_ends_it() -> None:
    async def test() -> None:
        case = Case()
        case.tell("a")
        case.generation.leave()
        with pytest.raises(ReaderGoneError):
            await case.rest()
        assert case.router.cancelled == 1

    run(test)


def test_patience_ends_for_what_still_waits() -> None:
    async def test() -> None:
        case = Case(queue_s=0.001)
        while not case.router.withdrawn:
            await asyncio.sleep(0.001)
        in_thread(lambda: case.router.answer("cancelled", "The request was cancelled before a replica took it."))
        with pytest.raises(ApiError, match=r"No replica was free for 0\.001 s: try again later\."):
            await case.rest()
        assert (case.generation.outcome, case.router.cancelled) == ("cancelled", 0)

    run(test)


def test_it_says_why_it_was_broken_off() -> None:
    async def test() -> None:
        case = Case()
        case.generation.break_off("The server ends.")
        assert case.router.cancelled == 1
        in_thread(lambda: case.router.answer("cancelled", "The request was cancelled."))
        with pytest.raises(ApiError, match=r"The server ends\."):
            await case.rest()

    run(test)


def test_an_answer_after_the_loop_has_ended_is_nobodys() -> None:
    kept: list[Case] = []

    async def test() -> None:
        kept.append(Case())

    run(test)
    in_thread(lambda: kept[0].router.hear([1]), kept[0].router.answer)
    assert kept[0].settled == []
