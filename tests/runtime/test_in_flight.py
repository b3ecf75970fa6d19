"""In-flight batching on a CPU: the real engine by itself, and in real processes behind a dispatcher."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch

from skote.runtime.dispatch import ReplicaDispatcher
from skote.runtime.engine import SkotergyEngine
from skote.runtime.replica import Replica
from skote.types import BatchingEngine, Completion, EngineSpec, FinishReason, Request, Sampling, SkoteError

WAIT_S = 60.0
TARGET = "skote.runtime.engine.SkotergyEngine"

Make = Callable[..., Path]
Run = Callable[..., tuple[list[list[int]], list[FinishReason]]]


def prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    ids = torch.randint(3, 96, (length,), generator=torch.Generator().manual_seed(100 * length + seed))
    return tuple(ids.tolist())


def build(directory: Path, **options: Any) -> SkotergyEngine:
    return SkotergyEngine(**{"local_dir": str(directory), "device": "cpu", "dtype": "fp32", "compile": False} | options)


REQUESTS = [
    Request(
        f"r{index}",
        prompt(1 + 5 * index % 23, index),
        1 + 7 * index % 19,
        (Sampling(), Sampling(1.2, seed=index), Sampling(0.8, top_k=10, top_p=0.9, seed=index))[index % 3],
        ignore_eos=True,
    )
    for index in range(16)
]


class Desk:
    """A request comes each third turn; `leave` maps keys to how many tokens they have when they are cancelled."""

    def __init__(self, requests: Sequence[Request], leave: dict[int, int]) -> None:
        self.tokens: dict[int, list[int]] = {}
        self.ends: dict[int, FinishReason | str | None] = {}
        self._requests, self._leave = requests, leave
        self._turn = 0

    def arrivals(self) -> list[tuple[int, Request]]:
        self._turn += 1
        key = len(self.tokens)
        if key == len(self._requests) or self._turn % 3 != 1:
            return []
        self.tokens[key] = []
        return [(key, self._requests[key])]

    def is_cancelled(self, key: int) -> bool:
        return len(self.tokens[key]) >= self._leave.get(key, 10**9)

    def admit(self, key: int) -> None:
        pass

    def keeps(self, tokens: int) -> None:
        pass

    def cached(self, key: int, tokens: int) -> None:
        pass

    def emit(self, key: int, token_ids: Sequence[int]) -> None:
        self.tokens[key].extend(token_ids)

    def end(self, key: int, reason: FinishReason | None) -> None:
        self.ends[key] = reason

    def fail(self, key: int, error: SkoteError) -> None:
        self.ends[key] = str(error)

    def served_by(self, engine: SkotergyEngine) -> None:
        """An engine that has nothing left to do returns, though there may be more to come."""
        while len(self.ends) < len(self._requests):
            engine.serve(self)


@pytest.mark.parametrize("rows", [2, 5, 16])
def test_requests_that_join_and_leave_get_the_tokens_of_a_run_alone(make_checkpoint: Make, run: Run, rows: int) -> None:
    alone = build(make_checkpoint())
    assert alone.rows == 1
    engine = build(make_checkpoint(), max_batch=rows)
    assert isinstance(engine, BatchingEngine)
    desk = Desk([*REQUESTS, Request("long", prompt(60), 6), Request("odd", (99,), 1)], {3: 2, 7: 1})

    desk.served_by(engine)

    for key, request in enumerate(REQUESTS):
        expected = run(alone, request)[0][0]
        cut = {3: 2, 7: 1}.get(key, len(expected))
        assert desk.tokens[key] == expected[:cut]
        assert desk.ends[key] == (None if cut < len(expected) else "length")
    assert str(desk.ends[16]).startswith("Request 'long' needs 65 positions")
    assert str(desk.ends[17]).startswith("Request 'odd' has a token id outside")
    assert engine.describe()["max_batch"] == rows


def test_rows_of_a_transformers_module_take_turns_too(module_directory: Path, run: Run) -> None:
    alone, engine = build(module_directory), build(module_directory, max_batch=3)
    assert engine.rows == 3
    requests = [Request(each.request_id, each.input_ids, each.max_new_tokens, each.sampling) for each in REQUESTS[:8]]
    desk = Desk(requests, {})
    desk.served_by(engine)
    for key, request in enumerate(requests):
        (expected,), (reason,) = run(alone, request)
        assert (desk.tokens[key], desk.ends[key]) == (expected, reason)


@pytest.mark.slow
def test_rows_of_a_compiled_step_take_turns(make_checkpoint: Make, run: Run) -> None:
    torch._dynamo.reset()
    engine = build(make_checkpoint(), max_batch=3, compile=True)
    desk = Desk(REQUESTS[:6], {})
    desk.served_by(engine)
    assert engine.describe()["compile_s"]
    for key, request in enumerate(REQUESTS[:6]):
        assert desk.tokens[key] == run(engine, request)[0][0]
    torch._dynamo.reset()


@pytest.fixture(scope="module")
def replica(make_checkpoint: Make) -> Iterator[Replica]:
    """A process with four rows."""
    options = {"local_dir": str(make_checkpoint()), "device": "cpu", "dtype": "fp32", "compile": False, "max_batch": 4}
    with Replica(EngineSpec(TARGET, options), index=0, device="cpu") as started:
        started.wait_ready(WAIT_S)
        yield started


def test_a_process_answers_each_launch_as_it_ends(replica: Replica, make_checkpoint: Make, run: Run) -> None:
    alone = build(make_checkpoint())
    order: list[str] = []
    long, short = (Request(name, prompt(4), n, ignore_eos=True) for name, n in (("long", 60), ("short", 2)))
    futures = [replica.generate([long]), replica.generate([short, short])]
    for future in futures:
        future.add_done_callback(lambda done: order.append(done.result()[0].request_id))
    late, *early = (future.result(WAIT_S) for future in futures)
    assert order == ["short", "long"]
    for request, completion in zip((long, short, short), (*late, *early[0]), strict=True):
        assert completion.status == "ok"
        assert list(completion.output_ids) == run(alone, request)[0][0]
        assert completion.admitted_ns is not None
        stamps = [completion.dispatched_ns, completion.admitted_ns, *(chunk.t_ns for chunk in completion.chunks)]
        assert stamps == sorted(stamps)


def test_one_that_does_not_fit_fails_alone(replica: Replica) -> None:
    futures = [replica.generate([Request(name, prompt(4), n)]) for name, n in (("a", 40), ("long", 90), ("b", 40))]
    a, long, b = (future.result(WAIT_S)[0] for future in futures)
    assert (a.status, b.status) == ("ok", "ok")
    assert (long.status, long.output_ids, long.admitted_ns) == ("error", (), None)
    assert str(long.error).startswith("Request 'long' needs 93 positions")


def test_a_running_request_is_cancelled_and_the_others_go_on(replica: Replica) -> None:
    with ReplicaDispatcher([replica], max_concurrency_per_device=8) as dispatcher:
        requests = [Request(str(index), prompt(4), 55, ignore_eos=True) for index in range(8)]
        futures = [dispatcher.dispatch(request) for request in requests]
        assert dispatcher.cancel(futures[0])
        assert dispatcher.cancel(futures[7])
        first, *others, last = (future.result(WAIT_S) for future in futures)
    assert (first.status, last.status) == ("cancelled", "cancelled")
    assert len(first.output_ids) < 55
    assert {other.status for other in others} == {"ok"}
    assert first.output_ids == others[0].output_ids[: len(first.output_ids)]


def test_other_calls_wait_for_what_runs_and_launches_behind_them_for_both(replica: Replica) -> None:
    before = replica.generate([Request("a", prompt(4), 30)])
    described = replica.call("describe")
    behind = replica.generate([Request("b", prompt(4), 3)])
    assert described.result(WAIT_S)["max_batch"] == 4
    assert before.done()
    assert behind.result(WAIT_S)[0].status == "ok"


def test_a_hundred_requests_through_four_rows(replica: Replica, make_checkpoint: Make, run: Run) -> None:
    alone, draw = build(make_checkpoint()), random.Random(3)
    requests = [
        Request(str(index), prompt(draw.randint(1, 20), index), draw.randint(1, 12), ignore_eos=True)
        for index in range(100)
    ]
    with ReplicaDispatcher([replica], max_concurrency_per_device=10) as dispatcher:
        futures: list[Future[Completion]] = [dispatcher.dispatch(request) for request in requests]
        completions = [future.result(WAIT_S) for future in futures]
    assert [completion.request_id for completion in completions] == [request.request_id for request in requests]
    for request, completion in zip(requests, completions, strict=True):
        assert list(completion.output_ids) == run(alone, request)[0][0]
        assert completion.finish_reason == "length"


BROKEN = """
from skote.types import EngineError

class Broken:
    rows = 4

    def generate(self, requests, emit): ...
    def score(self, request, forced_ids): ...
    def describe(self): return {}

    def serve(self, desk):
        for key, request in desk.arrivals():
            desk.admit(key)
            desk.emit(key, (5,))
            if request.request_id == "count":
                desk.cached(key, 128)
            if request.request_id == "raise":
                raise RuntimeError("device lost")
            if request.request_id != "forget":
                desk.end(key, "length")
"""


def test_what_an_engine_breaks_or_forgets_fails_with_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_engine.py").write_text(BROKEN, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    with Replica(EngineSpec("broken_engine.Broken"), index=0, device="cpu", log=tmp_path / "log") as replica:
        replica.wait_ready(WAIT_S)
        outcomes = [
            replica.generate([Request(name, (1,), 1)]).result(WAIT_S)[0] for name in ("raise", "good", "forget", "good")
        ]
        assert replica.generate([Request("count", (1,), 1)]).result(WAIT_S)[0].cached_tokens == 128
    assert [each.error for each in outcomes] == [
        "Broken.serve failed with RuntimeError: device lost",
        None,
        "Broken.serve ended and had not answered the request.",
        None,
    ]
    assert {each.output_ids for each in outcomes} == {(5,)}
    assert {each.cached_tokens for each in outcomes} == {None}
