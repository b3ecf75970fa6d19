from __future__ import annotations

import signal
import threading
import time
from collections import Counter
from concurrent.futures import Future

import pytest

from skote.eval.measure import Pass, pass_order, plan_passes, run_pass
from skote.types import Completion, Request


def requests(count: int) -> list[Request]:
    return [Request(str(index), (1, 2), max_new_tokens=1) for index in range(count)]


def complete(future: Future[Completion], request: Request) -> None:
    now = time.monotonic_ns()
    future.set_result(Completion(request.request_id, 2, (7,), (), now, now, now, "ok", "length"))


class AtOnce:
    """Answers within `dispatch`, as the fastest engine that there can be."""

    def __init__(self) -> None:
        self.dispatched: list[str] = []

    def dispatch(self, request: Request) -> Future[Completion]:
        self.dispatched.append(request.request_id)
        future: Future[Completion] = Future()
        complete(future, request)
        return future


class Scripted:
    """Waits until `in_flight` requests (or the last ones) are there, then ends the one that `choose` names."""

    def __init__(self, total: int, in_flight: int, choose) -> None:
        self.dispatched: list[str] = []
        self.in_flight_seen: list[int] = []
        self.dispatched_ns: dict[str, int] = {}
        self._open: dict[str, tuple[Future[Completion], Request]] = {}
        self._total = total
        self._in_flight = in_flight
        self._choose = choose
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def dispatch(self, request: Request) -> Future[Completion]:
        future: Future[Completion] = Future()
        with self._changed:
            self.dispatched.append(request.request_id)
            self.dispatched_ns[request.request_id] = time.monotonic_ns()
            self._open[request.request_id] = (future, request)
            self._changed.notify()
        return future

    def _serve(self) -> None:
        for ended in range(self._total):
            wanted = min(self._in_flight, self._total - ended)
            with self._changed:
                assert self._changed.wait_for(lambda wanted=wanted: len(self._open) >= wanted, timeout=10)
                self.in_flight_seen.append(len(self._open))
                future, request = self._open.pop(self._choose(list(self._open)))
            complete(future, request)

    def join(self) -> None:
        self._thread.join(timeout=10)
        assert not self._thread.is_alive()


@pytest.mark.parametrize("load", ["closed", "burst"])
def test_every_request_is_handed_over_once_in_the_calling_thread(load):
    seen = []
    run_pass(AtOnce(), requests(7), load, 3, lambda _, done: seen.append((done.request_id, threading.get_ident())))
    assert sorted(seen) == [(str(index), threading.get_ident()) for index in range(7)]


@pytest.mark.parametrize("concurrency", [1, 2, 4])
def test_closed_loop_keeps_exactly_that_many_in_flight(concurrency):
    dispatcher = Scripted(10, concurrency, choose=lambda ids: ids[0])
    run_pass(dispatcher, requests(10), "closed", concurrency, lambda *_: None)
    dispatcher.join()
    assert dispatcher.dispatched == [str(index) for index in range(10)]
    tail = list(range(concurrency - 1, 0, -1))
    assert dispatcher.in_flight_seen == [concurrency] * (10 - len(tail)) + tail


def test_slow_request_does_not_hold_up_the_other_slots():
    order: list[str] = []
    dispatcher = Scripted(8, 2, choose=lambda ids: ids[-1])  # request 0 stays until nothing else is left
    run_pass(dispatcher, requests(8), "closed", 2, lambda _, done: order.append(done.request_id))
    dispatcher.join()
    assert order == ["1", "2", "3", "4", "5", "6", "7", "0"]


def test_burst_dispatches_everything_before_anything_ends():
    dispatcher = Scripted(6, 6, choose=lambda ids: ids[-1])
    scheduled = set()
    order: list[str] = []

    def note(scheduled_ns: int, done: Completion) -> None:
        scheduled.add(scheduled_ns)
        order.append(done.request_id)

    before = time.monotonic_ns()
    run_pass(dispatcher, requests(6), "burst", 1, note)
    dispatcher.join()
    assert dispatcher.in_flight_seen[0] == 6
    assert order == ["5", "4", "3", "2", "1", "0"]
    assert len(scheduled) == 1
    assert before <= scheduled.pop() <= min(dispatcher.dispatched_ns.values())


def test_closed_loop_schedules_a_request_when_its_slot_became_free():
    scheduled: dict[str, int] = {}
    ended: dict[str, int] = {}

    def note(scheduled_ns: int, done: Completion) -> None:
        scheduled[done.request_id] = scheduled_ns
        ended[done.request_id] = done.end_ns

    dispatcher = Scripted(6, 2, choose=lambda ids: ids[-1])
    run_pass(dispatcher, requests(6), "closed", 2, note)
    dispatcher.join()
    assert scheduled["0"] == scheduled["1"]
    for earlier, later in [("1", "2"), ("2", "3"), ("3", "4"), ("4", "5")]:
        assert ended[earlier] <= scheduled[later] <= dispatcher.dispatched_ns[later]


def test_freed_slot_is_filled_before_the_completion_is_handed_over():
    dispatcher = AtOnce()
    dispatched_at_handover = []
    run_pass(dispatcher, requests(3), "closed", 1, lambda *_: dispatched_at_handover.append(len(dispatcher.dispatched)))
    assert dispatched_at_handover == [2, 3, 3]


def test_failed_request_is_a_completion_and_the_pass_goes_on():
    class Failing(AtOnce):
        def dispatch(self, request: Request) -> Future[Completion]:
            if request.request_id != "1":
                return super().dispatch(request)
            future: Future[Completion] = Future()
            future.set_result(Completion("1", 2, (), (), 0, None, 0, "error", error="It broke."))
            return future

    statuses = Counter[str]()
    run_pass(Failing(), requests(4), "closed", 1, lambda _, done: statuses.update([done.status]))
    assert statuses == {"ok": 3, "error": 1}


def test_interrupt_goes_on_after_what_had_ended_was_handed_over():
    class Interrupted(AtOnce):
        def dispatch(self, request: Request) -> Future[Completion]:
            if request.request_id == "3":
                raise KeyboardInterrupt
            return super().dispatch(request)

    seen: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        run_pass(Interrupted(), requests(6), "closed", 2, lambda _, done: seen.append(done.request_id))
    assert seen == ["0", "1", "2"]


def test_signal_ends_the_wait_for_a_request_that_hangs():
    both_seen = threading.Event()
    seen: list[str] = []

    def interrupt() -> None:
        assert both_seen.wait(timeout=10)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    class Hanging(AtOnce):
        def dispatch(self, request: Request) -> Future[Completion]:
            return super().dispatch(request) if request.request_id in "01" else Future()

    def note(_: int, done: Completion) -> None:
        seen.append(done.request_id)
        if len(seen) == 2:
            both_seen.set()

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        run_pass(Hanging(), requests(6), "closed", 2, note)
    thread.join()
    assert seen == ["0", "1"]


def test_no_requests_is_an_empty_pass():
    run_pass(AtOnce(), [], "closed", 1, lambda *_: pytest.fail("nothing was sent"))


@pytest.mark.parametrize("blocks", [1, 2, 5, 6, 20])
def test_every_two_blocks_have_both_orders(blocks):
    for seed in range(20):
        order = pass_order(blocks, seed)
        assert len(order) == blocks
        assert all(set(order[start : start + 2]) == {"AB", "BA"} for start in range(0, blocks - 1, 2))


def test_the_order_of_more_blocks_begins_with_that_of_fewer():
    for seed in range(20):
        longest = pass_order(60, seed)
        assert all(pass_order(blocks, seed) == longest[:blocks] for blocks in range(60))


def test_order_follows_the_seed_alone():
    assert pass_order(6, 4) == pass_order(6, 4)
    assert len({tuple(pass_order(6, seed)) for seed in range(200)}) == 8  # 2 a pair of blocks
    assert {pass_order(1, seed)[0] for seed in range(20)} == {"AB", "BA"}


def test_plan_has_both_arms_in_every_block_in_that_order():
    plan = plan_passes(6, 11, ("candidate", "baseline"))
    letters = {"candidate": "A", "baseline": "B"}
    assert [(step.block, step.round) for step in plan] == [(block, turn) for block in range(6) for turn in (0, 1)]
    orders = ["".join(letters[step.arm] for step in plan if step.block == block) for block in range(6)]
    assert orders == pass_order(6, 11)


def test_plan_of_one_arm_is_one_pass_a_block():
    assert plan_passes(2, 0, ("candidate",)) == [Pass(0, 0, "candidate"), Pass(1, 0, "candidate")]


@pytest.mark.parametrize("arms", [("candidate",), ("candidate", "baseline")])
def test_a_plan_goes_on_where_a_shorter_one_ended(arms):
    assert plan_passes(5, 3, arms) + plan_passes(8, 3, arms, first=5) == plan_passes(8, 3, arms)
