"""Tokens that are told as they come: the same as the completion's, in order, and before it, whatever becomes of it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from skote.runtime.dispatch import ReplicaDispatcher
from skote.runtime.replica import Replica
from skote.runtime.router import Router
from skote.runtime.waiting import Ticket, hearer
from skote.runtime.worker_desk import WorkerDesk
from skote.runtime.worker_progress import PROGRESS_BYTES, WorkerProgress
from skote.types import Completion, EngineSpec, Request

SIMULATED = "skote.engines.simulated.SimulatedEngine"
SKOTERGY = "skote.runtime.engine.SkotergyEngine"
WAIT_S = 30.0


class Ear:
    """Hears one request; `unheard` is what had been told when the future resolved."""

    def __init__(self) -> None:
        self.chunks: list[list[int]] = []
        self.first = threading.Event()

    def __call__(self, token_ids: Sequence[int]) -> None:
        self.chunks.append(list(token_ids))
        self.first.set()

    @property
    def ids(self) -> tuple[int, ...]:
        return tuple(token for chunk in self.chunks for token in chunk)


@pytest.fixture
def dispatcher(request: pytest.FixtureRequest, make_checkpoint: Callable[..., Path]) -> Iterator[ReplicaDispatcher]:
    """One replica: an engine, its options, and the dispatcher's."""
    target, options, dispatching = request.param
    common = {"local_dir": str(make_checkpoint()), "device": "cpu", "dtype": "fp32", "threads": 1, "random_seed": None}
    with (
        Replica(EngineSpec(target, common | options), index=0, device="cpu") as replica,
        ReplicaDispatcher([replica], **dispatching) as dispatcher,
    ):
        replica.wait_ready()
        yield dispatcher


ONE_BY_ONE = (SIMULATED, {"vocab_size": 96}, {})
IN_A_WINDOW = (SIMULATED, {"vocab_size": 96}, {"microbatch_window_ms": 50.0, "microbatch_max": 3})
IN_FLIGHT = (SKOTERGY, {"max_batch": 3, "compile": False}, {"max_concurrency_per_device": 3})
FAILING = (SIMULATED, {"fail_on": ["b"], "fail_after": 2}, {})
FAILING_AT_ONCE = (
    SIMULATED, {"fail_on": ["b"], "fail_after": 0}, {"microbatch_window_ms": 50.0, "microbatch_max": 3}
)  # fmt: skip
DYING = (SIMULATED, {"die_on": ["b"], "fail_after": 2}, {})


@pytest.mark.parametrize("dispatcher", [ONE_BY_ONE, IN_A_WINDOW, IN_FLIGHT], indirect=True)
def test_what_is_heard_is_what_is_answered(dispatcher: ReplicaDispatcher) -> None:
    ears = [Ear(), None, Ear()]
    requests = [Request(f"r{row}", (5, 6 + row), 4 + row, ignore_eos=True) for row in range(3)]
    futures = [dispatcher.dispatch(each, ear) for each, ear in zip(requests, ears, strict=True)]
    for row, (ear, future) in enumerate(zip(ears, futures, strict=True)):
        completion = future.result(WAIT_S)
        assert (completion.status, len(completion.output_ids)) == ("ok", 4 + row)
        assert ear is None or ear.ids == completion.output_ids
    assert [len(chunk) for ear in ears if ear is not None for chunk in ear.chunks] == [1] * 10


@pytest.mark.parametrize("dispatcher", [FAILING, FAILING_AT_ONCE, DYING], indirect=True)
def test_what_fails_was_heard_as_far_as_it_came(dispatcher: ReplicaDispatcher) -> None:
    ears = {name: Ear() for name in "ab"}
    futures = {name: dispatcher.dispatch(Request(name, (1, 2), 5), ear) for name, ear in ears.items()}
    completions: dict[str, Completion] = {name: future.result(WAIT_S) for name, future in futures.items()}
    assert [completions[name].status for name in "ab"] == ["ok", "error"]
    assert ears["a"].ids == completions["a"].output_ids
    if completions["b"].chunks:  # the tokens of a process that died are with nobody but who heard them
        assert ears["b"].ids == completions["b"].output_ids


@pytest.mark.parametrize("dispatcher", [(SIMULATED, {"token_ms": 20.0}, {})], indirect=True)
def test_a_request_is_withdrawn_while_it_waits_and_cancelled_while_it_runs(dispatcher: ReplicaDispatcher) -> None:
    runs, waits = Ear(), Ear()
    running = dispatcher.dispatch(Request("a", (1,), 1000), runs)
    waiting = dispatcher.dispatch(Request("b", (1,), 1000), waits)
    assert runs.first.wait(WAIT_S)
    (load,) = dispatcher.loads
    assert (load.index, load.waiting, load.running, load.alive) == (0, 1, 1, True)

    assert not dispatcher.withdraw(running)
    assert dispatcher.withdraw(waiting)
    assert waiting.result(WAIT_S).status == "cancelled"
    assert not dispatcher.withdraw(waiting)
    assert not running.done()

    assert dispatcher.cancel(running)
    completion = running.result(WAIT_S)
    assert (completion.status, waits.chunks) == ("cancelled", [])
    assert 0 < len(runs.ids) == len(completion.output_ids) < 1000
    (load,) = dispatcher.loads
    assert (load.waiting, load.running) == (0, 0)


def test_a_replica_of_either_kind_tells_all_before_it_answers(new_replica: Callable[..., Any]) -> None:
    heard: list[tuple[int, tuple[int, ...]]] = []
    told: list[list[tuple[int, tuple[int, ...]]]] = []
    requests = [Request("a", (1, 2), 3), Request("b", (3, 4), 2)]
    with new_replica(EngineSpec(SIMULATED), index=0, device="cpu") as replica:
        replica.wait_ready()
        future = replica.generate(requests, lambda row, ids: heard.append((row, tuple(ids))))
        future.add_done_callback(lambda _: told.append(list(heard)))
        completions = future.result(WAIT_S)
    for row, completion in enumerate(completions):
        ids = tuple(token for each, chunk in told[0] if each == row for token in chunk)
        assert ids == completion.output_ids
        assert len(ids) == requests[row].max_new_tokens


@pytest.mark.parametrize("dispatcher", [ONE_BY_ONE], indirect=True)
@pytest.mark.parametrize("error", [ValueError("odd"), SystemExit(3)])
def test_what_a_listener_raises_ends_nothing(
    dispatcher: ReplicaDispatcher, error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(_: Sequence[int]) -> None:
        raise error

    assert len(dispatcher.dispatch(Request("a", (1,), 3), refuse).result(WAIT_S).output_ids) == 3
    assert dispatcher.dispatch(Request("b", (1,), 3)).result(WAIT_S).status == "ok"
    assert [record.exc_info[1] for record in caplog.records if record.exc_info] == [error] * 3


def test_rows_are_told_apart() -> None:
    a, b = Ear(), Ear()
    tickets = [Ticket(Request(name, (1,), 3), 0, Future(), ear) for name, ear in (("a", a), ("x", None), ("b", b))]
    hear = hearer(tickets)
    assert hear is not None
    hear(2, [7])
    hear(1, [8])
    hear(0, [9, 10])
    hear(2, [11])
    assert (a.chunks, b.chunks) == ([[9, 10]], [[7], [11]])
    assert hearer(tickets[1:2]) is None


class NoInbox:
    """No further launches, and row 1 of call 4 cancelled."""

    def next_launch(self) -> None:
        return None

    def is_cancelled(self, call_id: int, row: int) -> bool:
        return (call_id, row) == (4, 1)

    def forget(self, call_id: int) -> None:
        raise AssertionError("nothing ends")


@pytest.mark.parametrize("told", [True, False])
def test_a_desk_tells_of_what_it_does_not_drop(told: bool, tmp_path: Path) -> None:
    heard: list[Any] = []
    requests = [Request("a", (1,), 3), Request("b", (1,), 3)]
    shared = tmp_path / "progress"
    shared.write_bytes(bytes(PROGRESS_BYTES))
    with shared.open("r+b") as file:
        progress = WorkerProgress(file.fileno())
    desk = WorkerDesk(
        "E",
        (4, requests, told),
        NoInbox(),
        lambda *_: None,
        lambda *what: heard.append(what),
        progress,
    )
    keys = [key for key, _ in desk.arrivals()]
    desk.emit(keys[1], [5])
    desk.emit(keys[0], [6, 7])
    assert heard == ([(4, 0, [6, 7])] if told else [])
    assert progress.ticks == 2


def test_a_router_tells_of_tokens_and_describes_its_engines(make_checkpoint: Callable[..., Path]) -> None:
    class Codec:
        pad_id, has_chat_template = 0, False

        def encode(self, text: str) -> tuple[int, ...]:
            return tuple(map(ord, text))

        encode_chat = encode

        def decode(self, ids: Sequence[int]) -> str:
            return " ".join(map(str, ids))

    engine = EngineSpec(SIMULATED, {"token_ms": 0.5})
    with Router("nowhere", ["cpu", "cpu"], engine=engine, codec=Codec()) as router:
        ear = Ear()
        future = router.submit_ids((1, 2), max_new_tokens=5, ignore_eos=True, hear=ear)
        assert future.result(WAIT_S).output_ids == ear.ids
        assert not router.withdraw(future)
        assert [each["token_ms"] for each in router.describe()] == [0.5, 0.5]
        assert [(each.index, each.alive) for each in router.loads] == [(0, True), (1, True)]
