"""The latency guard in a real dispatcher, over replicas on a clock of the test's own, and in real processes."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import mode

import pytest

from skote.runtime import token_pace, tpot_guard
from skote.runtime.dispatch import ReplicaDispatcher
from skote.runtime.replica import Replica
from skote.runtime.token_pace import TokenPace
from skote.runtime.tpot_guard import TpotGuard
from skote.types import Completion, Emit, EngineSpec, Request, RowEnded

WAIT_S = 60.0
MS = 1_000_000
SECOND = 1000 * MS

Law = Callable[[int], float]
"""Milliseconds of a step by the requests that it advances."""


@dataclass(eq=False)
class Running:
    request: Request
    tokens: int = 0
    future: Future[list[Completion]] = field(default_factory=Future)


class PacedReplica:
    """An engine that batches in flight, one step a call of `step`, each as long as `law` says."""

    device, death = "test", None

    def __init__(self, law: Law, rows: int | None = 128, index: int = 0) -> None:
        self.index, self.rows, self.law = index, rows, law
        self.now = 0
        self.running: list[Running] = []
        self.steps: list[tuple[int, int, float]] = []  # when, requests, milliseconds
        self.taken: list[str] = []
        self.pace: TokenPace | None = None

    def watch_pace(self, heard: Callable[[int], None]) -> None:
        self.pace = TokenPace(heard)

    def generate(
        self, requests: Sequence[Request], hear: Emit | None = None, ended: RowEnded | None = None
    ) -> Future[list[Completion]]:
        (request,) = requests
        self.taken.append(request.request_id)
        self.running.append(Running(request))
        return self.running[-1].future

    def step(self) -> None:
        ms = self.law(len(self.running))
        self.now += round(ms * MS)
        self.steps.append((self.now, len(self.running), ms))
        for each in list(self.running):  # what joins meanwhile gets no token of this step
            each.tokens += 1
            if self.pace is not None:
                self.pace.emitted(each, 1)
        ended = [each for each in self.running if each.tokens == each.request.max_new_tokens]
        for each in ended:
            self.running.remove(each)
        for each in ended:
            each.future.set_result([Completion(each.request.request_id, 1, (), (), 0, None, 0, "ok")])

    def cancel(self, launch: Future[list[Completion]], row: int) -> None: ...

    def watch_end(self, heard: Callable[[], None]) -> None: ...

    def restart(self) -> None: ...


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., tuple[PacedReplica, ReplicaDispatcher]]]:
    """A replica on the test's clock and its dispatcher, closed after the test."""
    opened: list[tuple[PacedReplica, ReplicaDispatcher]] = []

    def start(
        law: Law, slo_ms: float | None, rows: int | None = 128, cap: int = 128
    ) -> tuple[PacedReplica, ReplicaDispatcher]:
        replica = PacedReplica(law, rows)
        monkeypatch.setattr(token_pace, "CLOCK", lambda: replica.now)
        monkeypatch.setattr(tpot_guard, "CLOCK", lambda: replica.now)
        opened.append((replica, ReplicaDispatcher([replica], max_concurrency_per_device=cap, tpot_slo_ms=slo_ms)))
        return opened[-1]

    yield start
    for replica, dispatcher in opened:
        dispatcher.close()
        while replica.running:
            replica.step()
        dispatcher.close()


def captured(n: int) -> float:
    """As wide as the smallest power of two that covers them."""
    return 4.0 + 0.08 * (1 << (n - 1).bit_length())


def in_turn(n: int) -> float:
    return 0.5 * n


def affine(n: int) -> float:
    return 3.0 + 0.1 * n


LAWS: list[tuple[Law, float, int]] = [  # with a limit, and the most requests that keep it, by hand
    (captured, 7.0, 32),
    (captured, 4.2, 2),
    (captured, 20.0, 128),
    (in_turn, 5.1, 10),
    (affine, 7.05, 40),
    (affine, 2.0, 1),
]


@pytest.mark.parametrize(("law", "slo_ms", "most"), LAWS)
def test_the_limit_is_kept_and_what_keeps_it_is_used(
    start: Callable[..., tuple[PacedReplica, ReplicaDispatcher]], law: Law, slo_ms: float, most: int
) -> None:
    """Twenty seconds with a full queue: at most 5 % of the time after the first five is over the limit."""
    replica, dispatcher = start(law, slo_ms)
    draw, count = random.Random(5), 0
    while replica.now < 20 * SECOND:
        while count - len(replica.taken) < 20:
            dispatcher.dispatch(Request(str(count), (1,), draw.randint(2, 120)))
            count += 1
        replica.step()
    learnt = [(n, ms) for now, n, ms in replica.steps if now > 5 * SECOND]
    spent = sum(ms for _, ms in learnt)
    if most > 1:
        assert sum(ms for _, ms in learnt if ms > slo_ms) <= 0.05 * spent
    assert 0.85 * most <= sum(n * ms for n, ms in learnt) / spent <= 1.02 * most
    assert max(n for n, _ in learnt) <= most + 2
    assert dispatcher.counts[0].slowed > 0 or most == 128


@pytest.mark.parametrize(("law", "slo_ms", "most"), LAWS)
@pytest.mark.parametrize("seed", range(3))
def test_nothing_is_lost_or_starves_and_no_bound_is_passed(
    start: Callable[..., tuple[PacedReplica, ReplicaDispatcher]], law: Law, slo_ms: float, most: int, seed: int
) -> None:
    """Arrivals that come and go, a third of them batch, slow steps in between, 24 rows and a cap of 16."""
    del most
    draw = random.Random(seed)
    replica, dispatcher = start(lambda n: law(n) * (40 if draw.random() < 0.01 else 1), slo_ms, rows=24, cap=16)
    futures = []
    for number in range(300):
        priority = "batch" if draw.random() < 1 / 3 else "interactive"
        futures.append(dispatcher.dispatch(Request(str(number), (1,), draw.randint(1, 40), priority=priority)))
        if draw.random() < 0.2:
            for _ in range(draw.randint(1, 60)):
                if replica.running:
                    replica.step()
    while replica.running:
        assert len(replica.running) <= 16
        replica.step()
    assert [future.result(WAIT_S).status for future in futures] == ["ok"] * 300
    assert sorted(map(int, replica.taken)) == list(range(300))
    assert max(n for _, n, _ in replica.steps) <= 16


def test_batch_requests_get_every_fourth_turn_and_interactive_ones_pass_the_rest(
    start: Callable[..., tuple[PacedReplica, ReplicaDispatcher]],
) -> None:
    """One row is free at a time: the order is the dispatcher's, though the cap would let all into the engine."""
    replica, dispatcher = start(lambda _: 1.0, None, rows=2)
    for number in range(6):
        dispatcher.dispatch(Request(f"batch {number}", (1,), 2 + 3 * number, priority="batch"))
    for number in range(5):
        dispatcher.dispatch(Request(f"now {number}", (1,), 7))
    assert replica.taken == ["batch 0", "batch 1"]
    while replica.running:
        assert len(replica.running) <= 2
        replica.step()
    assert replica.taken[2:8] == ["now 0", "now 1", "now 2", "batch 2", "now 3", "now 4"]
    assert len(replica.taken) == 11


def saturate(replica: PacedReplica, dispatcher: ReplicaDispatcher, seconds: float) -> int:
    """Keep the queue full for a while; how many requests most steps of its last quarter had."""
    end = replica.now + seconds * SECOND
    while replica.now < end:
        while len(replica.taken) + 20 > dispatcher.counts[0].dispatched:
            dispatcher.dispatch(Request("r", (1,), 30))
        replica.step()
    return mode(n for now, n, _ in replica.steps if now > end - seconds * SECOND / 4)


def test_it_gives_way_to_a_load_that_slows_all_and_recovers_after_it(
    start: Callable[..., tuple[PacedReplica, ReplicaDispatcher]],
) -> None:
    replica, dispatcher = start(captured, 7.0)
    assert saturate(replica, dispatcher, 3) == 32
    replica.law = lambda n: 4 * captured(n)
    assert saturate(replica, dispatcher, 3) == 1  # even one alone is too slow now
    replica.law = lambda n: 4.0 + 0.5 * n
    assert saturate(replica, dispatcher, 5) == 6
    replica.law = captured
    assert saturate(replica, dispatcher, 10) == 32


def test_a_slow_moment_costs_little(start: Callable[..., tuple[PacedReplica, ReplicaDispatcher]]) -> None:
    """One step of 2 s: at once all but one row are used again, and a second later that one too."""
    replica, dispatcher = start(captured, 7.0, rows=32)
    assert saturate(replica, dispatcher, 3) == 32
    replica.law = lambda _: 2000.0
    replica.step()
    replica.law = captured
    assert saturate(replica, dispatcher, 0.4) == 31
    assert saturate(replica, dispatcher, 1.5) == 32


def test_what_is_too_much_is_tried_ever_more_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two at a time are too slow: they are tried after 1, 2, 4, ... seconds, a minute at most."""
    now = 0
    monkeypatch.setattr(tpot_guard, "CLOCK", lambda: now)
    guard = TpotGuard(5.0)
    tries = []
    for now in range(0, 500 * SECOND, 20 * MS):
        if guard.most == 2:
            tries.append(now / SECOND)
        guard.hold(guard.most)
        guard.measured((4.0 if guard.most == 1 else 6.0) * MS)
    waits = [round(later - earlier) for earlier, later in pairwise(tries)]
    assert waits[:7] == [1, 2, 4, 8, 16, 32, 60]
    assert set(waits[7:]) == {60}


@pytest.fixture(scope="module")
def real_replica(make_checkpoint: Callable[..., Path]) -> Iterator[Replica]:
    options = {"local_dir": str(make_checkpoint()), "device": "cpu", "dtype": "fp32", "compile": False, "max_batch": 4}
    with Replica(EngineSpec("skote.runtime.engine.SkotergyEngine", options), index=0, device="cpu") as replica:
        replica.wait_ready(WAIT_S)
        yield replica


@pytest.mark.parametrize(("slo_ms", "peak"), [(1e6, 4), (1e-6, 1)])
def test_a_real_process_is_given_as_many_as_keep_the_limit(real_replica: Replica, slo_ms: float, peak: int) -> None:
    with ReplicaDispatcher([real_replica], max_concurrency_per_device=16, tpot_slo_ms=slo_ms) as dispatcher:
        requests = [Request(str(each), (1, 2, 3), 40, ignore_eos=True) for each in range(20)]
        futures = [dispatcher.dispatch(request) for request in requests]
        assert {future.result(WAIT_S).status for future in futures} == {"ok"}
        (counts,) = dispatcher.counts
    assert real_replica.rows == 4
    assert counts.in_flight_peak == peak
    assert counts.slowed == 19


def test_priorities_hold_where_the_engine_batches_in_flight(real_replica: Replica) -> None:
    """Four batch requests have rows and four wait, though eight launches may be in flight: a new one goes first."""
    with ReplicaDispatcher([real_replica], max_concurrency_per_device=8) as dispatcher:
        batch = [Request(f"batch {each}", (1, 2), 55, ignore_eos=True, priority="batch") for each in range(8)]
        futures = [dispatcher.dispatch(request) for request in (*batch, Request("now", (1, 2), 55, ignore_eos=True))]
        completions = [future.result(WAIT_S) for future in futures]
        (counts,) = dispatcher.counts
    assert counts.in_flight_peak == 4
    order = sorted(completions, key=lambda each: each.admitted_ns or 0)
    assert order[4].request_id == "now"


def test_launches_that_take_their_turn_are_watched_too_also_after_a_restart() -> None:
    spec = EngineSpec("skote.engines.simulated.SimulatedEngine", {"device": "cpu", "dtype": "fp32", "token_ms": 1.0})
    with Replica(spec, index=0, device="cpu") as replica:
        replica.wait_ready(WAIT_S)
        assert replica.rows is None
        heard: list[int] = []
        replica.watch_pace(heard.append)
        replica.generate([Request("a", (1,), 60)]).result(WAIT_S)
        assert heard
        assert min(heard) >= MS / 2
        heard.clear()
        os.kill(replica.pid, signal.SIGKILL)
        assert replica.generate([Request("b", (1,), 1)]).result(WAIT_S)[0].status == "error"
        replica.restart()
        replica.generate([Request("c", (1,), 60)]).result(WAIT_S)
        assert heard
