from __future__ import annotations

import itertools
import signal
import threading
import time
from concurrent.futures import Future

import pytest

from skote.eval.schedule import run_schedule
from skote.types import Completion, Request

MS = 1_000_000


def requests(count: int) -> list[Request]:
    return [Request(str(index), (1, 2), max_new_tokens=1) for index in range(count)]


def completion(request: Request) -> Completion:
    now = time.monotonic_ns()
    return Completion(request.request_id, 2, (7,), (), now, now, now, "ok", "length")


class Dispatcher:
    """Answers what it is told to, each time after `busy_ms`; the rest waits until `release`d ones have been sent."""

    def __init__(self, busy_ms: float = 0.0, release: int = 0) -> None:
        self.sent_ns: dict[str, int] = {}
        self._busy_ns, self._release = busy_ms * MS, release
        self._held: list[tuple[Future[Completion], Request]] = []

    def dispatch(self, request: Request) -> Future[Completion]:
        now = self.sent_ns[request.request_id] = time.monotonic_ns()
        while time.monotonic_ns() < now + self._busy_ns:
            pass
        future: Future[Completion] = Future()
        self._held.append((future, request))
        if len(self.sent_ns) >= self._release:
            for held, its in self._held:
                held.set_result(completion(its))
            self._held.clear()
        return future


def run(dispatcher: Dispatcher, times_ms: list[float]) -> dict[str, int]:
    """The scheduled moment of each request."""
    scheduled: dict[str, int] = {}
    times = [round(time * MS) for time in times_ms]
    run_schedule(dispatcher, requests(len(times)), times, lambda ns, done: scheduled.update({done.request_id: ns}))
    return scheduled


def test_requests_leave_at_their_moment_or_later_and_never_before():
    dispatcher = Dispatcher()
    before = time.monotonic_ns()
    scheduled = run(dispatcher, [0, 2, 2, 7])
    assert [scheduled[str(index)] - scheduled["0"] for index in range(4)] == [0, 2 * MS, 2 * MS, 7 * MS]
    assert before <= scheduled["0"]
    assert all(dispatcher.sent_ns[name] >= moment for name, moment in scheduled.items())


def test_what_delays_one_request_moves_no_other():
    """Each dispatch takes 4 ms and is due after 1 ms: all leave as soon as they can, and their schedule stays."""
    dispatcher = Dispatcher(busy_ms=4)
    scheduled = run(dispatcher, [0, 1, 2, 3])
    assert [scheduled[str(index)] - scheduled["0"] for index in range(4)] == [0, MS, 2 * MS, 3 * MS]
    lags = [dispatcher.sent_ns[str(index)] - scheduled[str(index)] for index in range(4)]
    assert all(later - earlier >= 3 * MS for earlier, later in itertools.pairwise(lags))


def test_late_requests_go_before_answers_are_handed_over():
    order: list[str] = []

    class Noting(Dispatcher):
        def dispatch(self, request: Request) -> Future[Completion]:
            order.append(f"sent {request.request_id}")
            return super().dispatch(request)

    run_schedule(Noting(), requests(3), [0, 0, 0], lambda _, done: order.append(f"done {done.request_id}"))
    assert order == ["sent 0", "sent 1", "sent 2", "done 0", "done 1", "done 2"]


def test_no_answer_is_waited_for_before_the_next_request_leaves():
    dispatcher = Dispatcher(release=5)
    assert set(run(dispatcher, [0, 1, 1, 2, 3])) == set("01234")


def test_answers_are_handed_over_while_others_are_still_due():
    dispatcher, seen = Dispatcher(), []

    def note(_: int, done: Completion) -> None:
        seen.append((done.request_id, len(dispatcher.sent_ns), threading.get_ident()))

    run_schedule(dispatcher, requests(2), [0, 20 * MS], note)
    assert seen == [("0", 1, threading.get_ident()), ("1", 2, threading.get_ident())]


def test_an_interrupt_hands_over_what_had_ended():
    ended: list[str] = []

    class Interrupting(Dispatcher):
        def dispatch(self, request: Request) -> Future[Completion]:
            future = super().dispatch(request)
            if request.request_id == "1":
                signal.raise_signal(signal.SIGINT)
            return future

    with pytest.raises(KeyboardInterrupt):
        run_schedule(Interrupting(), requests(3), [0, 0, 0], lambda _, done: ended.append(done.request_id))
    assert ended == ["0"]


class Cancelling(Dispatcher):
    """Answers nothing by itself; a cancel resolves a request."""

    def __init__(self) -> None:
        super().__init__(release=10**9)

    def cancel(self, future: Future[Completion]) -> bool:
        held = next(each for each in self._held if each[0] is future)
        self._held.remove(held)
        now = time.monotonic_ns()
        future.set_result(Completion(held[1].request_id, 2, (), (), now, None, now, "cancelled"))
        return True


def test_what_is_given_up_is_not_sent_and_what_is_on_its_way_is_cancelled():
    dispatcher = Cancelling()
    ended: dict[str, tuple[int, str, str | None]] = {}

    def note(scheduled_ns: int, done: Completion) -> None:
        ended[done.request_id] = (scheduled_ns, done.status, done.error)

    times = [0, 1 * MS, 60_000 * MS, 90_000 * MS]
    run_schedule(dispatcher, requests(4), times, note, lambda: len(dispatcher.sent_ns) == 2)
    assert list(dispatcher.sent_ns) == ["0", "1"]
    assert {status for _, status, _ in ended.values()} == {"cancelled"}
    assert ended["3"][0] - ended["0"][0] == 90_000 * MS
    assert "was not sent" in (ended["3"][2] or "")
    assert ended["1"][2] is None


def test_a_queue_that_cannot_keep_up_any_more_is_cancelled_after_the_last_was_sent():
    dispatcher = Cancelling()
    ended: list[str] = []
    run_schedule(
        dispatcher, requests(3), [0, 0, 0], lambda _, done: ended.append(done.request_id),
        lambda: len(dispatcher.sent_ns) == 3,
    )  # fmt: skip
    assert sorted(ended) == ["0", "1", "2"]
