"""The dispatcher over replicas that the test answers by hand: what is launched where and when, and what fails."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from queue import SimpleQueue
from typing import Any

import pytest

from skote.runtime.dispatch import ReplicaDispatcher
from skote.types import Completion, Emit, ReplicaError, Request, RowEnded, Sampling, UsageError

HOURS_MS = 3.6e6
WAIT_S = 10.0


class HandReplica:
    """Holds every launch until the test answers it."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.device = f"test:{index}"
        self.death: str | None = None
        self.rows: int | None = None
        self.kept_tokens = 0
        self.launches: list[tuple[list[Request], Future[list[Completion]]]] = []
        self.launched = threading.Event()
        self.cancels: list[tuple[int, int]] = []
        self.revival = threading.Event()
        self.refusal = ""
        self.heard_end: Callable[[], None] = lambda: None
        self.ended: list[RowEnded | None] = []

    def generate(
        self, requests: Sequence[Request], hear: Emit | None = None, ended: RowEnded | None = None
    ) -> Future[list[Completion]]:
        future: Future[list[Completion]] = Future()
        if self.death is not None:
            future.set_result([self.completion(request, self.death) for request in requests])
        else:
            self.ended.append(ended)
            self.launches.append((list(requests), future))
            self.launched.set()
        return future

    @property
    def unanswered(self) -> int:
        return sum(not future.done() for _, future in self.launches)

    @property
    def launched_ids(self) -> list[list[str]]:
        return [[request.request_id for request in requests] for requests, _ in self.launches]

    def answer(self, launch: int, error: str | None = None) -> None:
        requests, future = self.launches[launch]
        future.set_result([self.completion(request, error) for request in requests])

    def end_row(self, launch: int, row: int) -> None:
        """Answer a row before the others of its launch."""
        ended = self.ended[launch]
        assert ended is not None
        ended(row, self.completion(self.launches[launch][0][row], None))

    def cancel(self, launch: Future[list[Completion]], row: int) -> None:
        self.cancels.append(([future for _, future in self.launches].index(launch), row))

    def watch_end(self, heard: Callable[[], None]) -> None:
        self.heard_end = heard

    def restart(self) -> None:
        """Comes back when the test says so, or not."""
        assert self.revival.wait(WAIT_S)
        if self.refusal:
            raise ReplicaError(self.refusal)
        self.death = None

    def die(self, begun: int = 10**9) -> None:
        """End; of the launches only the first `begun` were."""
        self.death = f"Replica {self.index} died."
        for number, (requests, future) in enumerate(list(self.launches)):
            if not future.done():
                lost = partial(self.completion, error=self.death, untouched=number >= begun)
                future.set_result([lost(request) for request in requests])

    def completion(self, request: Request, error: str | None, *, untouched: bool = False) -> Completion:
        return Completion(
            request.request_id, len(request.input_ids), (), (), 0, None, 0,
            "ok" if error is None else "error", error=error, replica=self.index, device=self.device,
            untouched=untouched,
        )  # fmt: skip


@pytest.fixture(autouse=True)
def _nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Close what the test opened, let its replicas answer, and check that every thread has ended."""
    opened: list[tuple[ReplicaDispatcher, Sequence[Any]]] = []
    init = ReplicaDispatcher.__init__

    def note(self: ReplicaDispatcher, replicas: Sequence[Any], *arguments: Any, **options: Any) -> None:
        init(self, replicas, *arguments, **options)
        opened.append((self, replicas))

    monkeypatch.setattr(ReplicaDispatcher, "__init__", note)
    yield
    for dispatcher, replicas in opened:
        dispatcher.close()
        for replica in replicas:
            replica.revival.set()
            replica.die()
        dispatcher.close()
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("dispatch-")]


def request(name: str, prompt_tokens: int = 1, *, temperature: float = 0.0) -> Request:
    return Request(name, (1,) * prompt_tokens, 4, Sampling(temperature=temperature))


def test_requests_wait_in_their_replicas_queue_for_a_free_slot() -> None:
    replicas = [HandReplica(0), HandReplica(1)]
    dispatcher = ReplicaDispatcher(replicas, max_concurrency_per_device=2)
    futures = [dispatcher.dispatch(request(str(number))) for number in range(8)]

    assert replicas[0].launched_ids == [["0"], ["2"]]
    assert replicas[1].launched_ids == [["1"], ["3"]]
    replicas[0].answer(1)
    assert replicas[0].launched_ids == [["0"], ["2"], ["4"]]
    assert futures[2].result(WAIT_S).status == "ok"
    assert [future.done() for future in futures] == [False, False, True, False, False, False, False, False]

    for replica in replicas:
        launch = 0
        while replica.unanswered:
            if not replica.launches[launch][1].done():
                replica.answer(launch)
            launch += 1
    assert [future.result(WAIT_S).replica for future in futures] == [0, 1] * 4
    counts = dispatcher.counts
    assert [(each.dispatched, each.launches, each.in_flight_peak) for each in counts] == [(4, 4, 2), (4, 4, 2)]


def test_stamps_are_the_dispatchers() -> None:
    replica = HandReplica(0)
    dispatcher = ReplicaDispatcher([replica])
    before = time.monotonic_ns()
    future = dispatcher.dispatch(request("a"))
    handed = time.monotonic_ns()
    replica.answer(0)

    completion = future.result(WAIT_S)

    assert before <= completion.dispatched_ns <= handed <= completion.end_ns <= time.monotonic_ns()


def test_the_cap_holds_with_many_threads_dispatching() -> None:
    class Answering(HandReplica):
        """Answers from other threads, and remembers how many launches it held at most."""

        def __init__(self, index: int, pool: ThreadPoolExecutor) -> None:
            super().__init__(index)
            self.pool = pool
            self.lock = threading.Lock()
            self.held = 0
            self.peak = 0

        def generate(
            self, requests: Sequence[Request], hear: Emit | None = None, ended: RowEnded | None = None
        ) -> Future[list[Completion]]:
            with self.lock:
                self.held += 1
                self.peak = max(self.peak, self.held)
            future: Future[list[Completion]] = Future()
            self.pool.submit(self.finish, list(requests), future)
            return future

        def finish(self, requests: list[Request], future: Future[list[Completion]]) -> None:
            with self.lock:
                self.held -= 1
            future.set_result([self.completion(each, None) for each in requests])

    with ThreadPoolExecutor(4) as answers, ThreadPoolExecutor(8) as clients:
        replicas = [Answering(index, answers) for index in range(2)]
        dispatcher = ReplicaDispatcher(replicas, "shortest_queue", max_concurrency_per_device=3)
        futures = list(clients.map(lambda number: dispatcher.dispatch(request(str(number))), range(200)))
        completions = [future.result(WAIT_S) for future in futures]

    assert [completion.request_id for completion in completions] == [str(number) for number in range(200)]
    assert all(1 <= replica.peak <= 3 for replica in replicas)
    assert sum(each.dispatched for each in dispatcher.counts) == 200
    assert [each.in_flight_peak for each in dispatcher.counts] == [replica.peak for replica in replicas]


def test_a_failing_request_fails_alone() -> None:
    replica = HandReplica(0)
    dispatcher = ReplicaDispatcher([replica])
    futures = [dispatcher.dispatch(request(name)) for name in "abc"]
    replica.answer(0)
    replica.answer(1, error="Out of luck.")
    replica.answer(2)

    assert [future.result(WAIT_S).error for future in futures] == [None, "Out of luck.", None]


def test_a_dead_replica_fails_what_it_had_begun_and_the_living_take_the_rest() -> None:
    replicas = [HandReplica(0), HandReplica(1)]
    dispatcher = ReplicaDispatcher(replicas)
    futures = [dispatcher.dispatch(request(str(number))) for number in range(6)]

    replicas[0].die()

    assert futures[0].result(WAIT_S).error == "Replica 0 died."
    assert not any(future.done() for future in futures[1:])
    later = dispatcher.dispatch(request("later"))
    for launch in range(6):
        replicas[1].answer(launch)
    assert replicas[1].launched_ids == [["1"], ["3"], ["5"], ["2"], ["4"], ["later"]]
    assert [future.result(WAIT_S).status for future in (*futures[1:], later)] == ["ok"] * 6
    assert {future.result(WAIT_S).replica for future in futures[1:]} == {1}
    assert [(each.dispatched, each.in_flight_peak) for each in dispatcher.counts] == [(1, 1), (6, 1)]
    assert [(event.replica, event.what, event.sentence) for event in dispatcher.events] == [
        (0, "ended", "Replica 0 died.")
    ]


def test_a_replica_is_started_again_and_takes_what_waited_for_it() -> None:
    replica = HandReplica(0)
    dispatcher = ReplicaDispatcher([replica], max_restarts=1)
    futures = [dispatcher.dispatch(request(name)) for name in "ab"]
    replica.die()
    assert futures[0].result(WAIT_S).error == "Replica 0 died."
    futures.append(dispatcher.dispatch(request("c")))
    assert not futures[1].done()
    assert not futures[2].done()

    replica.launched.clear()
    replica.revival.set()
    assert replica.launched.wait(WAIT_S)
    replica.answer(1)
    replica.answer(2)

    assert replica.launched_ids == [["a"], ["b"], ["c"]]
    assert [future.result(WAIT_S).status for future in futures[1:]] == ["ok", "ok"]
    assert [event.what for event in dispatcher.events] == ["ended", "restarted"]


def test_a_replica_is_given_up_past_its_restarts() -> None:
    replica = HandReplica(0)
    dispatcher = ReplicaDispatcher([replica], max_restarts=1)
    replica.revival.set()
    first = dispatcher.dispatch(request("a"))
    replica.launched.clear()
    second = dispatcher.dispatch(request("b"))
    replica.die()
    assert first.result(WAIT_S).status == "error"
    assert replica.launched.wait(WAIT_S)
    replica.die()

    assert second.result(WAIT_S).error == "Replica 0 died."
    assert dispatcher.dispatch(request("c")).result(WAIT_S).error == "No replica is left: Replica 0 died."
    assert [event.what for event in dispatcher.events] == ["ended", "restarted", "ended"]


def test_a_restart_that_fails_fails_what_waited_for_it() -> None:
    replica = HandReplica(0)
    dispatcher = ReplicaDispatcher([replica], max_restarts=5)
    futures = [dispatcher.dispatch(request(name)) for name in "ab"]
    replica.refusal = "The model is gone."
    replica.die()
    replica.revival.set()

    assert [future.result(WAIT_S).error for future in futures] == ["Replica 0 died.", "Replica 0 died."]
    assert [(event.what, event.sentence) for event in dispatcher.events] == [
        ("ended", "Replica 0 died."),
        ("given up", "The model is gone."),
    ]


def test_a_full_queue_refuses_at_once_and_says_its_state() -> None:
    replicas = [HandReplica(0), HandReplica(1)]
    dispatcher = ReplicaDispatcher(replicas, max_queue=1)
    futures = [dispatcher.dispatch(request(str(number))) for number in range(5)]

    assert [future.done() for future in futures] == [False, False, False, False, True]
    refused = futures[4].result(WAIT_S)
    assert refused.status == "error"
    assert refused.error == (
        "Every queue is full (replica 0: 1 wait, 1 run; replica 1: 1 wait, 1 run; max_queue=1): try again later."
    )
    replicas[1].answer(0)
    assert not dispatcher.dispatch(request("room")).done()
    assert replicas[1].launched_ids == [["1"], ["3"]]


def test_without_a_queue_a_free_replica_still_takes_one() -> None:
    dispatcher = ReplicaDispatcher([HandReplica(0)], max_queue=0)
    first, second = (dispatcher.dispatch(request(name)) for name in "ab")
    assert not first.done()
    assert second.result(WAIT_S).status == "error"


def test_a_full_queue_is_passed_over_by_the_policy() -> None:
    replicas = [HandReplica(0), HandReplica(1)]
    dispatcher = ReplicaDispatcher(replicas, max_queue=1)
    for number in range(4):
        dispatcher.dispatch(request(str(number)))
    replicas[1].answer(0)  # round robin would go on with 0, whose queue is full
    assert not dispatcher.dispatch(request("next")).done()
    assert dispatcher.counts[1].dispatched == 3


def test_cancelling_takes_a_request_out_of_its_queue_or_out_of_its_launch() -> None:
    replica = HandReplica(0)
    dispatcher = ReplicaDispatcher([replica])
    running, waiting, last = (dispatcher.dispatch(request(name)) for name in "abc")

    assert dispatcher.cancel(waiting)
    assert waiting.result(WAIT_S).status == "cancelled"
    assert waiting.result(WAIT_S).error == "The request was cancelled before a replica took it."
    assert dispatcher.cancel(running)
    assert replica.cancels == [(0, 0)]
    replica.answer(0)
    assert not dispatcher.cancel(running)
    assert not dispatcher.cancel(waiting)
    replica.answer(1)
    assert replica.launched_ids == [["a"], ["c"]]
    assert last.result(WAIT_S).status == "ok"


def test_least_work_spreads_tokens() -> None:
    replicas = [HandReplica(0), HandReplica(1)]
    dispatcher = ReplicaDispatcher(replicas, "least_work")
    for name, size in (("long", 100), ("a", 10), ("b", 10), ("c", 10)):
        dispatcher.dispatch(request(name, size))
    assert [each.dispatched for each in dispatcher.counts] == [1, 3]


def test_with_every_replica_dead_requests_fail_at_once() -> None:
    replicas = [HandReplica(0), HandReplica(1)]
    dispatcher = ReplicaDispatcher(replicas)
    for replica in replicas:
        replica.die()

    completion = dispatcher.dispatch(request("a")).result(WAIT_S)

    assert completion.status == "error"
    assert completion.error == "No replica is left: Replica 0 died. Replica 1 died."


def test_a_death_while_the_window_is_open_is_noticed_at_its_end() -> None:
    replica = HandReplica(0)
    with ReplicaDispatcher([replica], microbatch_window_ms=50.0) as dispatcher:
        future = dispatcher.dispatch(request("a"))
        replica.die()

        assert future.result(WAIT_S).error == "Replica 0 died."


def test_close_cancels_what_is_queued_and_lets_launches_finish() -> None:
    replica = HandReplica(0)
    dispatcher = ReplicaDispatcher([replica])
    running, queued = (dispatcher.dispatch(request(name)) for name in "ab")

    dispatcher.close()
    dispatcher.close()

    assert queued.result(WAIT_S).status == "cancelled"
    assert (queued.result().replica, queued.result().device) == (0, "test:0")
    assert dispatcher.dispatch(request("c")).result(WAIT_S).status == "cancelled"
    replica.answer(0)
    assert running.result(WAIT_S).status == "ok"
    assert replica.launched_ids == [["a"]]


def test_close_cancels_an_open_window() -> None:
    dispatcher = ReplicaDispatcher([HandReplica(0)], microbatch_window_ms=HOURS_MS)
    future = dispatcher.dispatch(request("a"))

    dispatcher.close()

    assert future.result(WAIT_S).status == "cancelled"


def test_a_full_micro_batch_does_not_wait_for_its_window() -> None:
    replica = HandReplica(0)
    with ReplicaDispatcher([replica], microbatch_window_ms=HOURS_MS, microbatch_max=3) as dispatcher:
        futures = [dispatcher.dispatch(request(name)) for name in "abc"]

        assert replica.launched_ids == [["a", "b", "c"]]
        replica.answer(0)
        assert [future.result(WAIT_S).request_id for future in futures] == ["a", "b", "c"]
        assert dispatcher.counts[0].launches == 1


def test_arrivals_gather_while_the_replica_is_busy() -> None:
    replica = HandReplica(0)
    with ReplicaDispatcher([replica], microbatch_window_ms=1e-6, microbatch_max=3) as dispatcher:
        dispatcher.dispatch(request("first"))
        assert replica.launched.wait(WAIT_S)
        for name in "abcd":
            dispatcher.dispatch(request(name))
        assert replica.launched_ids == [["first"]]

        replica.answer(0)
        replica.answer(1)

        assert replica.launched_ids == [["first"], ["a", "b", "c"], ["d"]]
        replica.answer(2)


def test_a_lone_request_is_launched_when_its_window_ends() -> None:
    replica = HandReplica(0)
    with ReplicaDispatcher([replica], microbatch_window_ms=20.0) as dispatcher:
        start = time.monotonic()
        future = dispatcher.dispatch(request("a"))

        assert replica.launched.wait(WAIT_S)
        assert time.monotonic() - start >= 0.02
        replica.answer(0)
        assert future.result(WAIT_S).status == "ok"


def test_sampled_requests_go_alone() -> None:
    replica = HandReplica(0)
    with ReplicaDispatcher([replica], microbatch_window_ms=HOURS_MS, microbatch_max=2) as dispatcher:
        for name, temperature in (("a", 0.0), ("b", 0.7), ("c", 0.9), ("d", 0.0), ("e", 0.0)):
            dispatcher.dispatch(request(name, temperature=temperature))
        for launch in range(4):
            replica.answer(launch)

        assert replica.launched_ids == [["a"], ["b"], ["c"], ["d", "e"]]


def test_length_aware_keeps_lengths_together() -> None:
    replicas = [HandReplica(0), HandReplica(1)]
    dispatcher = ReplicaDispatcher(replicas, "length_aware", max_concurrency_per_device=9)
    for number, prompt_tokens in enumerate((10, 200, 12, 180, 11, 205)):
        dispatcher.dispatch(request(str(number), prompt_tokens))

    assert replicas[0].launched_ids == [["0"], ["2"], ["4"]]
    assert replicas[1].launched_ids == [["1"], ["3"], ["5"]]


def test_futures_cannot_be_cancelled_under_the_dispatcher() -> None:
    replica = HandReplica(0)
    future = ReplicaDispatcher([replica]).dispatch(request("a"))

    assert not future.cancel()
    replica.answer(0)
    assert future.result(WAIT_S).status == "ok"


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"policy": "best"}, "best"),
        ({"max_concurrency_per_device": 0}, "max_concurrency_per_device"),
        ({"microbatch_max": 0}, "microbatch_max"),
        ({"microbatch_window_ms": -1.0}, "microbatch_window_ms"),
        ({"microbatch_window_ms": float("inf")}, "microbatch_window_ms"),
        ({"microbatch_window_ms": 1e30}, "microbatch_window_ms must be a number from 0"),
        ({"microbatch_window_ms": "2"}, "microbatch_window_ms must be a number from 0 .*, got '2'"),
        ({"microbatch_window_ms": None}, "microbatch_window_ms"),
        ({"max_concurrency_per_device": "2"}, "max_concurrency_per_device must be a whole number .*, got '2'"),
        ({"max_concurrency_per_device": True}, "max_concurrency_per_device .*, got True"),
        ({"microbatch_max": 2.0}, "microbatch_max .*, got 2.0"),
        ({"max_queue": "many"}, "max_queue .*, or null for no limit, got 'many'"),
        ({"max_queue": -1}, "max_queue"),
        ({"max_restarts": None}, "max_restarts .*, got None"),
        ({"tpot_slo_ms": 0}, "tpot_slo_ms must be a number above 0, or null for no limit, got 0"),
        ({"tpot_slo_ms": float("inf")}, "tpot_slo_ms .*, got inf"),
        ({"tpot_slo_ms": "fast"}, "tpot_slo_ms .*, got 'fast'"),
        ({"policy": 5}, "policy 5 is not known; choose one of round_robin"),
        ({"policy": ["round_robin"]}, "policy .* is not known"),
    ],
)
def test_senseless_options_are_refused(options: dict[str, object], named: str) -> None:
    with pytest.raises(UsageError, match=named):
        ReplicaDispatcher([HandReplica(0)], **options)


def test_a_window_gathers_no_more_than_there_are_rows_for() -> None:
    replica = HandReplica(0)
    replica.rows = 3
    dispatcher = ReplicaDispatcher([replica], max_concurrency_per_device=4, microbatch_window_ms=HOURS_MS)
    for name in "abcde":
        dispatcher.dispatch(request(name))
    assert replica.launched_ids == [["a", "b", "c"]]
    replica.answer(0)
    assert replica.unanswered == 0  # there is room for one more to join the two
    dispatcher.dispatch(request("f"))
    assert replica.launched_ids == [["a", "b", "c"], ["d", "e", "f"]]


def test_no_replicas_or_two_of_one_index_are_refused() -> None:
    with pytest.raises(UsageError, match="at least one replica"):
        ReplicaDispatcher([])
    with pytest.raises(UsageError, match="index of its own"):
        ReplicaDispatcher([HandReplica(1), HandReplica(1)])


def test_ten_thousand_waiting_requests_do_not_slow_admission() -> None:
    """CPU time of this thread for 1,000 requests, the best of three, before and after 10,000 wait."""
    dispatcher = ReplicaDispatcher([HandReplica(0), HandReplica(1)], "least_work")

    def cost() -> float:
        requests = [request("r") for _ in range(1000)]
        started = time.thread_time()
        for each in requests:
            dispatcher.dispatch(each)
        return time.thread_time() - started

    empty = min(cost() for _ in range(3))
    for _ in range(10_000):
        dispatcher.dispatch(request("r"))
    assert min(cost() for _ in range(3)) < 2 * empty
    dispatcher.close()


def test_a_replica_that_ends_between_two_looks_loses_nothing() -> None:
    """`death` changes under the dispatcher's hands, at each of its first looks in turn."""
    for look in range(1, 12):

        class Fickle(HandReplica):
            looks = 0

            @property
            def death(self) -> str | None:
                type(self).looks += 1
                return "It died." if type(self).looks > look else None  # noqa: B023 (used within the round)

            @death.setter
            def death(self, value: str | None) -> None:
                pass

        replica = Fickle(0)
        dispatcher = ReplicaDispatcher([replica])
        futures = [dispatcher.dispatch(request(name)) for name in "abc"]
        for number, (_, launch) in enumerate(list(replica.launches)):
            if not launch.done():
                replica.answer(number, error="It died.")
        assert [future.result(WAIT_S).status for future in futures] == ["error"] * 3


def test_a_sampled_request_waits_for_no_window() -> None:
    replica = HandReplica(0)
    with ReplicaDispatcher([replica], microbatch_window_ms=HOURS_MS) as dispatcher:
        dispatcher.dispatch(request("hot", temperature=1.0))
        assert replica.launched_ids == [["hot"]]


def test_a_replica_that_is_back_takes_what_waits_for_another() -> None:
    replicas = [HandReplica(0), HandReplica(1)]
    dispatcher = ReplicaDispatcher(replicas, max_restarts=1)
    futures = [dispatcher.dispatch(request(name)) for name in "abcd"]
    for replica in replicas:
        replica.launched.clear()
        replica.die()
    replicas[1].revival.set()
    assert replicas[1].launched.wait(WAIT_S)
    for launch in (1, 2):
        replicas[1].answer(launch)
    assert [future.result(WAIT_S).status for future in futures] == ["error", "error", "ok", "ok"]
    replicas[0].revival.set()


class Falling(HandReplica):
    """Ends between the dispatcher's look and its launch: every launch is answered at once, in the caller's thread."""

    def generate(
        self, requests: Sequence[Request], hear: Emit | None = None, ended: RowEnded | None = None
    ) -> Future[list[Completion]]:
        future: Future[list[Completion]] = Future()
        future.set_result([self.completion(request, "It fell.") for request in requests])
        return future


def test_a_callback_that_blocks_holds_up_no_window() -> None:
    falling, other = Falling(0), HandReplica(1)
    blocked, release = threading.Event(), threading.Event()

    def block(_: Future[Completion]) -> None:
        blocked.set()
        assert release.wait(WAIT_S)

    with ReplicaDispatcher([falling, other], microbatch_window_ms=20.0) as dispatcher:
        dispatcher.dispatch(request("a")).add_done_callback(block)
        assert blocked.wait(WAIT_S)
        dispatcher.dispatch(request("b"))

        assert other.launched.wait(WAIT_S / 2)
        release.set()


def test_a_callback_that_exits_ends_no_window_and_loses_no_other_row() -> None:
    falling, other = Falling(0), HandReplica(1)
    with ReplicaDispatcher([falling, other], microbatch_window_ms=20.0) as dispatcher:
        first, _, second = (dispatcher.dispatch(request(name)) for name in "abc")
        first.add_done_callback(lambda _: sys.exit(3))

        assert second.result(WAIT_S).error == "It fell."
        other.launched.clear()
        other.answer(0)
        later = [dispatcher.dispatch(request(name)) for name in "de"]
        assert other.launched.wait(WAIT_S)
        other.answer(1)
        wait(later, WAIT_S)
        assert [each.result(WAIT_S).error for each in later] in ([None, "It fell."], ["It fell.", None])


def test_a_callback_may_close_and_dispatch() -> None:
    replica, closed = HandReplica(0), threading.Event()
    dispatcher = ReplicaDispatcher([replica], microbatch_window_ms=HOURS_MS, microbatch_max=1)

    def close(_: Future[Completion]) -> None:
        dispatcher.close()
        assert dispatcher.dispatch(request("late")).result(WAIT_S).status == "cancelled"
        closed.set()

    dispatcher.dispatch(request("a")).add_done_callback(close)
    replica.answer(0)

    assert closed.wait(WAIT_S)


def test_close_returns_when_the_callbacks_of_what_it_cancelled_have() -> None:
    replica, names = HandReplica(0), []
    dispatcher = ReplicaDispatcher([replica], microbatch_window_ms=HOURS_MS)
    for name in "abc":
        dispatcher.dispatch(request(name)).add_done_callback(lambda done: names.append(done.result().request_id))

    dispatcher.close()

    assert names == ["a", "b", "c"]


def test_a_restart_without_a_thread_fails_what_waited_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    replica = HandReplica(0)
    dispatcher = ReplicaDispatcher([replica], max_restarts=1)
    futures = [dispatcher.dispatch(request(name)) for name in "ab"]

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    replica.die()

    assert [future.result(WAIT_S).error for future in futures] == ["Replica 0 died.", "Replica 0 died."]
    assert dispatcher.dispatch(request("c")).result(WAIT_S).error == "No replica is left: Replica 0 died."
    assert [(event.what, event.sentence) for event in dispatcher.events] == [
        ("ended", "Replica 0 died."),
        ("given up", "The thread revive-0 cannot be started: can't start new thread."),
    ]


def test_a_restart_that_is_broken_off_fails_what_waited_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(HandReplica):
        def restart(self) -> None:
            raise MemoryError

    traces: SimpleQueue[threading.ExceptHookArgs] = SimpleQueue()
    monkeypatch.setattr(threading, "excepthook", traces.put)
    replica = Broken(0)
    dispatcher = ReplicaDispatcher([replica], max_restarts=1)
    futures = [dispatcher.dispatch(request(name)) for name in "ab"]

    replica.die()

    assert [future.result(WAIT_S).error for future in futures] == ["Replica 0 died.", "Replica 0 died."]
    assert [event.sentence for event in dispatcher.events][1:] == [
        "Replica 0 could not be started again: its restart was broken off."
    ]
    assert traces.get(timeout=WAIT_S).exc_type is MemoryError


def test_cancelling_does_not_slow_with_what_waits() -> None:
    """CPU time of this thread for 200 cancels from the middle of the queue, the best of three, by what waits."""

    def cost(waiting: int) -> float:
        dispatcher = ReplicaDispatcher([HandReplica(0)])
        futures = [dispatcher.dispatch(request("r")) for _ in range(waiting)]
        costs = []
        for first in range(waiting // 2 - 300, waiting // 2 + 300, 200):
            started = time.thread_time()
            assert all(map(dispatcher.cancel, futures[first : first + 200]))
            costs.append(time.thread_time() - started)
        return min(costs)

    assert cost(20_000) < 5 * cost(1_000)


def test_what_a_replica_had_not_begun_goes_to_another_and_before_what_came_later() -> None:
    replicas = [HandReplica(0), HandReplica(1)]
    dispatcher = ReplicaDispatcher(replicas, max_concurrency_per_device=2)
    futures = [dispatcher.dispatch(request(str(number))) for number in range(8)]
    assert replicas[0].launched_ids == [["0"], ["2"]]

    replicas[0].die(begun=1)
    for launch in range(7):
        replicas[1].answer(launch)

    assert futures[0].result(WAIT_S).error == "Replica 0 died."
    assert [(each.result(WAIT_S).status, each.result().replica) for each in futures[1:]] == [("ok", 1)] * 7
    assert replicas[1].launched_ids == [["1"], ["3"], ["2"], ["5"], ["7"], ["4"], ["6"]]
    assert [(each.dispatched, each.launches) for each in dispatcher.counts] == [(1, 2), (7, 7)]
    assert [(each.waiting, each.running) for each in dispatcher.loads] == [(0, 0), (0, 0)]
    assert len(dispatcher.events) == 1


def test_what_was_not_begun_waits_for_its_replica_where_there_is_no_other() -> None:
    replica = HandReplica(0)
    dispatcher = ReplicaDispatcher([replica], max_concurrency_per_device=3, max_restarts=1)
    futures = [dispatcher.dispatch(request(name)) for name in "abcd"]
    replica.die(begun=1)
    assert not any(each.done() for each in futures[1:])
    revival = next(thread for thread in threading.enumerate() if thread.name == "revive-0")
    replica.revival.set()
    revival.join(WAIT_S)
    for launch in range(3, 6):
        replica.answer(launch)

    assert replica.launched_ids[3:] == [["b"], ["c"], ["d"]]
    assert [each.result(WAIT_S).status for each in futures] == ["error", "ok", "ok", "ok"]


def test_what_was_not_begun_fails_with_the_reason_where_no_replica_is_left() -> None:
    replica = HandReplica(0)
    dispatcher = ReplicaDispatcher([replica], max_concurrency_per_device=2)
    futures = [dispatcher.dispatch(request(name)) for name in "ab"]
    replica.die(begun=0)
    assert [each.result(WAIT_S).error for each in futures] == ["Replica 0 died.", "Replica 0 died."]


def test_what_was_cancelled_before_it_was_begun_goes_nowhere() -> None:
    replicas = [HandReplica(0), HandReplica(1)]
    dispatcher = ReplicaDispatcher(replicas, max_concurrency_per_device=2)
    futures = [dispatcher.dispatch(request(str(number))) for number in range(3)]
    assert dispatcher.cancel(futures[2])
    replicas[0].die(begun=1)
    dropped = futures[2].result(WAIT_S)
    assert (dropped.status, dropped.error) == ("cancelled", "The request was cancelled before a replica took it.")
    assert replicas[1].launched_ids == [["1"]]


def test_a_request_that_went_to_another_replica_is_cancelled_there() -> None:
    replicas = [HandReplica(0), HandReplica(1)]
    dispatcher = ReplicaDispatcher(replicas, max_concurrency_per_device=2)
    futures = [dispatcher.dispatch(request(str(number))) for number in range(3)]
    replicas[0].die(begun=1)
    assert dispatcher.cancel(futures[2])
    assert replicas[0].cancels == []
    assert replicas[1].cancels == [(1, 0)]


def test_after_close_nothing_goes_to_another_replica() -> None:
    replicas = [HandReplica(0), HandReplica(1)]
    dispatcher = ReplicaDispatcher(replicas, max_concurrency_per_device=2)
    futures = [dispatcher.dispatch(request(str(number))) for number in range(3)]
    dispatcher.close()
    replicas[0].die(begun=1)
    assert futures[2].result(WAIT_S).error == "Replica 0 died."
    assert replicas[1].launched_ids == [["1"]]


def test_a_replica_that_ends_while_it_is_idle_is_started_again_at_once() -> None:
    replica = HandReplica(0)
    dispatcher = ReplicaDispatcher([replica], max_restarts=1)
    back = threading.Event()
    restart = replica.restart

    def note() -> None:
        restart()
        back.set()

    replica.restart = note  # type: ignore[method-assign]
    replica.revival.set()
    replica.die()
    replica.heard_end()

    assert back.wait(WAIT_S)
    assert dispatcher.events[0].what == "ended"


def test_a_row_that_ends_before_its_launch_is_answered_and_makes_room() -> None:
    replica = HandReplica(0)
    replica.rows = 3
    dispatcher = ReplicaDispatcher([replica], max_concurrency_per_device=2, microbatch_window_ms=HOURS_MS)
    a, b, c, d = (dispatcher.dispatch(request(name)) for name in "abcd")
    assert replica.launched_ids == [["a", "b", "c"]]

    replica.end_row(0, 1)

    assert b.result(WAIT_S).status == "ok"
    assert replica.launched_ids == [["a", "b", "c"], ["d"]]
    assert not dispatcher.cancel(b)
    (load,) = dispatcher.loads
    assert (load.running, load.in_flight, load.free_slots) == (3, 2, 0)
    replica.answer(1)
    replica.die()
    assert [each.result(WAIT_S).status for each in (a, b, c, d)] == ["error", "ok", "error", "ok"]
    (load,) = dispatcher.loads
    assert (load.running, load.in_flight) == (0, 0)
    assert replica.ended[1] is None  # a launch of one row has none that ends before it
