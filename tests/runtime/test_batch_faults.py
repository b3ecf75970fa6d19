"""In-flight batching when things go wrong: a real process that is killed, a device that fails, requests that leave."""

from __future__ import annotations

import dataclasses
import os
import random
import signal
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any

import pytest

from skote.runtime.dispatch import ReplicaDispatcher
from skote.runtime.lane import ReplicaLoad
from skote.runtime.launch_rows import Part
from skote.runtime.worker_desk import Launch, WorkerDesk
from skote.types import Completion, EngineSpec, Request

NewReplica = Callable[..., Any]
WAIT_S = 60.0
ROWS = 8
ENGINE = "fake_engine.FakeBatching"


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module of the fake engine, found by processes that are started here."""
    monkeypatch.syspath_prepend(Path(__file__).parent)
    import fake_engine

    return fake_engine


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "window_ms", "slo_ms"),
    [("least_work", 0.0, None), ("prefix_aware", 0.0, 1e6), ("shortest_queue", 2.0, None)],
)
def test_of_a_thousand_requests_in_batches_none_is_lost_doubled_or_hung(
    new_replica: NewReplica, fakes: Any, policy: str, window_ms: float, slo_ms: float | None
) -> None:
    """Random lengths and priorities, shared prefixes, 5 % cancelled at any time, one replica of three killed."""
    dice = random.Random(policy)
    heads = [tuple(dice.choices(range(50), k=dice.randint(0, 90))) for _ in range(4)]
    requests = [
        Request(
            f"r{number}",
            (*dice.choice(heads), *dice.choices(range(50), k=dice.randint(1, 30))),
            dice.randint(1, 60),
            ignore_eos=dice.random() < 0.5,
            priority=dice.choice(("interactive", "batch")),
        )
        for number in range(1000)
    ]
    dropped = set(dice.sample(range(1000), 50))
    at_once = set(dice.sample(sorted(dropped), 25))
    answered = threading.Semaphore(0)
    answers: list[str] = []

    def note(done: Future[Completion]) -> None:
        answers.append(done.result().request_id)
        answered.release()

    replicas = [new_replica(EngineSpec(ENGINE, {"rows": ROWS}), index=index, device="cpu") for index in range(3)]
    try:
        for replica in replicas:
            replica.wait_ready(WAIT_S)
        with ReplicaDispatcher(
            replicas,
            policy,
            max_concurrency_per_device=ROWS,
            microbatch_window_ms=window_ms,
            max_restarts=1,
            tpot_slo_ms=slo_ms,
        ) as dispatcher:
            futures = [dispatcher.dispatch(request) for request in requests]
            for number in at_once:
                dispatcher.cancel(futures[number])
            for future in futures:
                future.add_done_callback(note)
            for number in sorted(dropped - at_once):
                assert answered.acquire(timeout=WAIT_S)
                dispatcher.cancel(futures[number])
            for _ in range(300):
                assert answered.acquire(timeout=WAIT_S)
            os.kill(replicas[1].pid, signal.SIGKILL)
            assert not wait(futures, WAIT_S).not_done
            events = [(event.replica, event.what) for event in dispatcher.events]
    finally:
        for replica in replicas:
            replica.close(0.0)

    results = [future.result() for future in futures]
    assert sorted(answers) == sorted(request.request_id for request in requests)
    for number, (request, result) in enumerate(zip(requests, results, strict=True)):
        whole = tuple(fakes.whole(request))
        assert result.request_id == request.request_id
        if result.status == "ok":
            assert result.output_ids == whole
        elif result.status == "cancelled":
            assert number in dropped
            assert result.output_ids == whole[: len(result.output_ids)]
    failed = [result for result in results if result.status == "error"]
    assert len(failed) <= ROWS  # those that the killed replica had begun
    assert {result.error for result in failed} <= {"Replica 1 (cpu) was killed by SIGKILL."}
    assert events[0] == (1, "ended")
    assert events[1:] in ([], [(1, "restarted")])


def test_a_replica_exposes_its_load(new_replica: NewReplica, fakes: Any) -> None:
    """Of a prompt of 9 tokens the two full pages before the last token's are kept, 4 tokens each."""
    with new_replica(EngineSpec(ENGINE, {"rows": ROWS}), index=0, device="cpu") as replica:
        replica.wait_ready(WAIT_S)
        with ReplicaDispatcher([replica], max_concurrency_per_device=5) as dispatcher:
            empty = ReplicaLoad(0, 0, 0, True, 0, 5, None, 0)
            assert dispatcher.loads == [empty]
            assert dispatcher.dispatch(Request("a", tuple(range(9)), 3)).result(WAIT_S).status == "ok"
            assert dispatcher.loads == [dataclasses.replace(empty, mean_prompt_tokens=9.0, kept_tokens=8)]
            os.kill(replica.pid, signal.SIGKILL)
            assert dispatcher.dispatch(Request("b", (1,), 3)).result(WAIT_S).status == "error"
            (ended,) = dispatcher.loads
            assert (ended.alive, ended.free_slots, ended.in_flight) == (False, 0, 0)


class Inbox:
    """Launches that come, and rows that are cancelled, at random turns of the loop; now and then another call holds
    up what comes after it."""

    def __init__(self, dice: random.Random, launches: Sequence[Sequence[Request]]) -> None:
        self.cancelled: set[tuple[int, int]] = set()
        self.forgotten: list[int] = []
        self.left = [(call_id, requests, call_id % 2 == 0) for call_id, requests in enumerate(launches)]
        self.turns = 0
        self._dice = dice
        self._rows = [(call_id, row) for call_id, requests, _ in self.left for row in range(len(requests))]
        self._came = 0
        self._held = False

    def receive(self) -> Launch:
        self._held = False
        return self._next()

    def next_launch(self) -> Launch | None:
        self.turns += 1
        assert self.turns < 50_000, "the loop goes on for ever"
        self._held |= self._dice.random() < 0.02
        if self._dice.random() < 0.08:
            self.cancelled.add(self._dice.choice(self._rows[max(0, self._came - 12) : self._came + 3]))
        return self._next() if self.left and not self._held and self._dice.random() < 0.4 else None

    def _next(self) -> Launch:
        self._came += len(self.left[0][1])
        return self.left.pop(0)

    def is_cancelled(self, call_id: int, row: int) -> bool:
        return (call_id, row) in self.cancelled

    def forget(self, call_id: int) -> None:
        self.forgotten.append(call_id)


def kinds(dice: random.Random, heads: Sequence[tuple[int, ...]], number: int) -> Request:
    return Request(
        str(number),
        (*dice.choice(heads), *dice.choices(range(50), k=dice.randint(1, 90 if dice.random() < 0.03 else 8))),
        dice.choice((1, dice.randint(1, 18))),
        ignore_eos=dice.random() < 0.5,
        cache_salt=dice.choice(("", "", "salt")),
    )


@pytest.mark.parametrize("seed", range(40))
def test_desk_loop_scheduler_and_pages_together_answer_each_row_once_as_if_it_were_alone(seed: int, fakes: Any) -> None:
    dice = random.Random(seed)
    heads = [tuple(dice.choices(range(50), k=dice.randint(0, 15))) for _ in range(3)]
    launches = [
        [kinds(dice, heads, 10 * call + row) for row in range(dice.choice((1, 1, 1, 2, 4)))] for call in range(60)
    ]
    pages = dice.randint(12, 30)
    engine = fakes.FakeBatching(rows=dice.randint(1, 9), pages=pages, fails=lambda: dice.random() < 0.001)
    inbox = Inbox(dice, launches)
    answers: dict[tuple[int, int], Part] = {}
    told: dict[tuple[int, int], list[int]] = {}

    def tell(call_id: int, row: int, token_ids: Sequence[int]) -> None:
        assert (call_id, row) not in answers
        told.setdefault((call_id, row), []).extend(token_ids)

    def answer(call_id: int, row: int, part: Part) -> None:
        assert (call_id, row) not in answers
        answers[call_id, row] = part

    while inbox.left:
        desk = WorkerDesk("Fake", inbox.receive(), inbox, answer, tell, fakes.Idle())
        try:
            engine.serve(desk)
        except fakes.DeviceLostError:
            desk.fail_all("The device was lost.")
        assert len(inbox.forgotten) + len(inbox.left) == len(launches)

    assert sorted(inbox.forgotten) == list(range(len(launches)))
    assert len(answers) == sum(map(len, launches))
    for call_id, requests in enumerate(launches):
        for row, request in enumerate(requests):
            part = answers[call_id, row]
            whole = tuple(fakes.whole(request))
            assert tuple(told.get((call_id, row), ())) == (part.output_ids if call_id % 2 == 0 else ())
            if part.cancelled:
                assert (call_id, row) in inbox.cancelled
                assert part.output_ids == whole[: len(part.output_ids)]
            elif part.error == "The device was lost.":
                assert part.output_ids == whole[: len(part.output_ids)]
            elif part.error is not None:
                assert part.error.startswith(f"Request {request.request_id!r} needs ")
                assert len(request.input_ids) + request.max_new_tokens - 1 > pages * fakes.PAGE
            else:
                assert part.output_ids == whole
                stopped = whole[-1] == fakes.EOS and not request.ignore_eos
                assert part.finish_reason == ("stop" if stopped else "length")
                assert part.cached_tokens in range(0, len(request.input_ids), fakes.PAGE)
