"""Futures whose callbacks end no thread, and the thread that resolves them."""

from __future__ import annotations

import logging
import sys
import threading
import time
from concurrent.futures import Future
from queue import SimpleQueue

import pytest

from skote.runtime.answers import Answer, Answers
from skote.runtime.waiting import Ticket
from skote.types import Completion, ReplicaError, Request

WAIT_S = 10.0


def ticket(name: str, dispatched_ns: int = 0) -> Ticket:
    return Ticket(Request(name, (1,), 1), dispatched_ns, Answer())


def completion(name: str) -> Completion:
    return Completion(name, 1, (7,), (), 0, None, 0, "ok")


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), GeneratorExit(), ValueError("no")])
def test_whatever_a_callback_raises_the_next_ones_run_and_the_thread_lives(
    error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(_: Future[Completion]) -> None:
        raise error

    answers, seen = Answers(), SimpleQueue[str]()
    first, second = ticket("first"), ticket("second")
    first.future.add_done_callback(fail)
    for each in (first, second):
        each.future.add_done_callback(lambda done: seen.put(done.result().request_id))

    with caplog.at_level(logging.ERROR, "concurrent.futures"):
        answers.put([(first, completion("first"))])
        answers.put([(second, completion("second"))])
        assert [seen.get(timeout=WAIT_S) for _ in range(2)] == ["first", "second"]
        answers.end()
        answers.join()

    assert [record.exc_info[1] for record in caplog.records if record.exc_info] == [error]


def test_the_main_thread_may_end_in_a_callback_of_its_own() -> None:
    """Of a future that is done already: it runs at once, in the thread that gave it."""
    future: Answer[int] = Answer()
    future.set_result(1)

    with pytest.raises(SystemExit):
        future.add_done_callback(lambda _: sys.exit(3))


def test_a_future_cannot_be_cancelled_by_itself() -> None:
    future: Answer[int] = Answer()

    assert not future.cancel()
    future.set_result(1)
    assert future.result() == 1


def test_stamps_are_the_dispatch_and_the_end() -> None:
    answers, asked = Answers(), ticket("a", dispatched_ns=5)
    before = time.monotonic_ns()

    answers.put([(asked, completion("a"))])

    ended = asked.future.result(WAIT_S)
    assert (ended.output_ids, ended.dispatched_ns) == ((7,), 5)
    assert before <= ended.end_ns <= time.monotonic_ns()
    answers.end()
    answers.join()


def test_a_callback_knows_where_it_is_and_does_not_wait_for_its_own_thread() -> None:
    answers, asked, seen = Answers(), ticket("a"), SimpleQueue[bool]()

    def end(_: Future[Completion]) -> None:
        seen.put(answers.in_callback)
        answers.end()
        answers.join()

    asked.future.add_done_callback(end)
    answers.put([(asked, completion("a"))])

    assert seen.get(timeout=WAIT_S)
    assert not answers.in_callback
    answers.join()
    assert not [thread for thread in threading.enumerate() if thread.name == "dispatch-answers"]


def test_without_a_thread_there_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)

    with pytest.raises(ReplicaError, match=r"^The thread dispatch-answers cannot be started: can't start"):
        Answers()
