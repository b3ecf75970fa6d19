"""Replicas, processes or Ray actors, that are killed, that hang, and whose requests are cancelled: nothing is lost."""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any

import pytest

from skote.engines.simulated import DIE_CODE, SimulatedEngine
from skote.runtime.dispatch import ReplicaDispatcher
from skote.runtime.replica import Replica
from skote.types import Completion, EngineSpec, ReplicaError, Request, UsageError

NewReplica = Callable[..., Any]

SIMULATED = "skote.engines.simulated.SimulatedEngine"
WAIT_S = 60.0


@pytest.fixture
def slow_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """An engine that hangs on a request called hang, and otherwise gives a token a millisecond."""
    (tmp_path / "slow_engine.py").write_text(
        "import threading, time\n"
        "class Slow:\n"
        "    def generate(self, requests, emit):\n"
        "        if requests[0].request_id == 'hang':\n"
        "            threading.Event().wait()\n"
        "        for n in range(requests[0].max_new_tokens):\n"
        "            time.sleep(0.001)\n"
        "            for row in range(len(requests)):\n"
        "                emit(row, (n,))\n"
        "        return ['length'] * len(requests)\n",
        encoding="utf-8",
    )
    monkeypatch.syspath_prepend(tmp_path)
    return "slow_engine.Slow"


def test_a_cancelled_request_is_left_within_a_step_and_keeps_its_tokens(
    new_replica: NewReplica, slow_engine: str
) -> None:
    with new_replica(EngineSpec(slow_engine), index=0, device="cpu") as replica:
        replica.wait_ready(WAIT_S)
        endless = replica.generate([Request("endless", (1,), 10**9)])
        following = replica.generate([Request("following", (1,), 3)])
        replica.cancel(endless, 0)
        (dropped,) = endless.result(WAIT_S)
        assert dropped.status == "cancelled"
        assert dropped.error == "The request was cancelled."
        assert dropped.finish_reason is None
        assert dropped.output_ids == tuple(range(len(dropped.output_ids)))
        assert following.result(WAIT_S)[0].output_ids == (0, 1, 2)
        replica.cancel(endless, 0)  # too late, and no matter


def test_a_row_of_a_batch_is_cancelled_alone(new_replica: NewReplica, slow_engine: str) -> None:
    with new_replica(EngineSpec(slow_engine), index=0, device="cpu") as replica:
        replica.wait_ready(WAIT_S)
        batch = replica.generate([Request("kept", (1,), 300), Request("dropped", (1,), 300)])
        replica.cancel(batch, 1)
        kept, dropped = batch.result(WAIT_S)
        assert (kept.status, len(kept.output_ids), kept.finish_reason) == ("ok", 300, "length")
        assert dropped.status == "cancelled"
        assert len(dropped.output_ids) < 300


def test_a_launch_that_was_cancelled_before_its_turn_does_not_run(new_replica: NewReplica, slow_engine: str) -> None:
    with new_replica(EngineSpec(slow_engine), index=0, device="cpu") as replica:
        replica.wait_ready(WAIT_S)
        first = replica.generate([Request("first", (1,), 200)])
        hangs = replica.generate([Request("hang", (1,), 5)])
        replica.cancel(hangs, 0)
        assert first.result(WAIT_S)[0].status == "ok"
        assert hangs.result(WAIT_S)[0].status == "cancelled"


def test_an_engine_that_hangs_is_ended_and_one_that_is_slow_is_not(new_replica: NewReplica, slow_engine: str) -> None:
    with new_replica(EngineSpec(slow_engine), index=0, device="cpu", hang_s=0.4) as replica:
        replica.wait_ready(WAIT_S)
        slow = replica.generate([Request("slow", (1,), 1500)])
        assert slow.result(WAIT_S)[0].status == "ok"
        (hung,) = replica.generate([Request("hang", (1,), 5)]).result(WAIT_S)
        sentence = "Replica 0 (cpu) was ended: its engine gave no token for 0.4 s (hang_s)."
        assert (hung.status, hung.error) == ("error", sentence)
        assert replica.death == sentence
        replica.restart(WAIT_S)
        assert replica.death is None
        assert replica.generate([Request("again", (1,), 2)]).result(WAIT_S)[0].output_ids == (0, 1)


def test_what_waits_for_a_replica_that_cannot_come_back_fails_with_the_reason(
    new_replica: NewReplica, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "once_engine.py").write_text(
        "import os\n"
        "from skote.types import CapacityError\n"
        "class Once:\n"
        "    def __init__(self, mark):\n"
        "        if os.path.exists(mark):\n"
        "            raise CapacityError('The memory is somebody else\\'s by now.')\n"
        "        open(mark, 'w').close()\n"
        "    def generate(self, requests, emit):\n"
        "        os._exit(3)\n",
        encoding="utf-8",
    )
    monkeypatch.syspath_prepend(tmp_path)
    with new_replica(
        EngineSpec("once_engine.Once", {"mark": str(tmp_path / "mark")}), index=0, device="cpu"
    ) as replica:
        replica.wait_ready(WAIT_S)
        with ReplicaDispatcher([replica], max_restarts=3) as dispatcher:
            begun, waiting = (dispatcher.dispatch(Request(name, (1,), 2)).result(WAIT_S) for name in "ab")
            assert (begun.status, begun.error) == ("error", "Replica 0 (cpu) ended with exit code 3.")
            sentence = "Replica 0 (cpu) could not be started again: The memory is somebody else's by now."
            assert (waiting.status, waiting.error) == ("error", sentence)
            assert [event.what for event in dispatcher.events] == ["ended", "given up"]


LOSING = """
import sys
from types import SimpleNamespace

class Losing:
    # A stand-in for torch says that device 1 is in use, and lost for good once a request called lose has run.

    def __init__(self):
        self.lost = False
        cuda = SimpleNamespace(
            is_initialized=lambda: True, device_count=lambda: 2, memory_allocated=float, synchronize=self.synchronize
        )
        sys.modules["torch"] = SimpleNamespace(cuda=cuda)

    def synchronize(self, device):
        assert device == 1
        if self.lost:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def generate(self, requests, emit):
        name = requests[0].request_id
        self.lost |= name == "lose"
        if name == "odd":
            raise RuntimeError("odd")
        self.synchronize(1)
        emit(0, (5,))
        return ["length"]
"""


def test_a_process_whose_device_is_lost_ends_and_one_whose_engine_fails_does_not(
    new_replica: NewReplica, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise it would fail whatever waits for it, and quickly, so that policies prefer it."""
    (tmp_path / "losing_engine.py").write_text(LOSING, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    log = tmp_path / "log"
    with new_replica(EngineSpec("losing_engine.Losing"), index=0, device="cpu", log=log) as replica:
        replica.wait_ready(WAIT_S)
        with ReplicaDispatcher([replica], max_restarts=1) as dispatcher:
            futures = [dispatcher.dispatch(Request(name, (1,), 1)) for name in ("a", "odd", "b", "lose", "c")]
            a, odd, b, lose, c = (future.result(WAIT_S) for future in futures)
            events = [event.what for event in dispatcher.events]
    assert [each.status for each in (a, odd, b, lose, c)] == ["ok", "error", "ok", "error", "ok"]
    assert odd.error == "Losing.generate failed with RuntimeError: odd"
    assert str(lose.error).startswith("Replica 0 (cpu) ended with exit code 74")
    assert str(lose.error).endswith("ends with: Its CUDA device is lost to this process, which ends.")
    assert events == ["ended", "restarted"]


def test_what_only_waited_in_a_process_that_ends_goes_to_another_one(new_replica: NewReplica) -> None:
    """Four launches lie in each process, which runs them one after another; the first of one ends it."""
    spec = EngineSpec(SIMULATED, {"token_ms": 50.0, "die_on": ["r0"], "fail_after": 2})
    replicas = [new_replica(spec, index=index, device="cpu") for index in range(2)]
    try:
        for replica in replicas:
            replica.wait_ready(WAIT_S)
        with ReplicaDispatcher(replicas, max_concurrency_per_device=4) as dispatcher:
            futures = [dispatcher.dispatch(Request(f"r{number}", (number + 1,), 3)) for number in range(8)]
            results = [future.result(WAIT_S) for future in futures]
            counts = [each.dispatched for each in dispatcher.counts]
    finally:
        for replica in replicas:
            replica.close(0.0)
    engine = SimulatedEngine()
    assert str(results[0].error).startswith(f"Replica 0 (cpu) ended with exit code {DIE_CODE}")
    for number, result in enumerate(results[1:], 1):
        assert (result.status, result.replica) == ("ok", 1)
        assert result.output_ids == tuple(engine.output_ids((number + 1,), 3))
    assert counts == [1, 7]


def test_what_only_waited_in_a_process_that_hangs_goes_to_another_one(
    new_replica: NewReplica, slow_engine: str
) -> None:
    replicas = [new_replica(EngineSpec(slow_engine), index=index, device="cpu", hang_s=0.4) for index in range(2)]
    try:
        for replica in replicas:
            replica.wait_ready(WAIT_S)
        with ReplicaDispatcher(replicas, max_concurrency_per_device=3) as dispatcher:
            names = ["hang", "a", "b", "c", "d", "e"]
            futures = [dispatcher.dispatch(Request(name, (1,), 3)) for name in names]
            results = [future.result(WAIT_S) for future in futures]
    finally:
        for replica in replicas:
            replica.close(0.0)
    assert results[0].error == "Replica 0 (cpu) was ended: its engine gave no token for 0.4 s (hang_s)."
    assert [(each.status, each.output_ids, each.replica) for each in results[1:]] == [("ok", (0, 1, 2), 1)] * 5


STINGY = """
import os

class Stingy:
    # Lets one request into its batch, and ends once two more wait.
    rows = 4

    def generate(self, requests, emit):
        raise NotImplementedError

    def score(self, request, forced_ids):
        raise NotImplementedError

    def describe(self):
        return {}

    def serve(self, desk):
        came = []
        while not came:
            came += desk.arrivals()
        desk.admit(came[0][0])
        desk.emit(came[0][0], (7,))
        while len(came) < 3:
            came += desk.arrivals()
        os._exit(3)
"""


def test_what_waits_for_its_place_in_a_batch_goes_to_another_process(
    new_replica: NewReplica, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "stingy_engine.py").write_text(STINGY, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    replicas = [
        new_replica(EngineSpec(target), index=index, device="cpu")
        for index, target in enumerate(("stingy_engine.Stingy", SIMULATED))
    ]
    try:
        for replica in replicas:
            replica.wait_ready(WAIT_S)
        with ReplicaDispatcher(replicas, max_concurrency_per_device=4) as dispatcher:
            futures = [dispatcher.dispatch(Request(f"r{number}", (1,), 2)) for number in range(6)]
            results = [future.result(WAIT_S) for future in futures]
    finally:
        for replica in replicas:
            replica.close(0.0)
    assert str(results[0].error).startswith("Replica 0 (cpu) ended with exit code 3")
    assert [(each.status, each.replica) for each in results[1:]] == [("ok", 1)] * 5


HASTY = (
    STINGY.replace("class Stingy", "class Hasty").partition("    def serve")[0]
    + """
    def serve(self, desk):
        came = []
        while len(came) < 2:
            came += desk.arrivals()
        for key, _ in came:
            desk.admit(key)
            desk.emit(key, (7,))
        desk.end(came[1][0], "length")
        os._exit(3)
"""
)


def test_a_row_that_had_ended_is_kept_where_its_launch_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "hasty_engine.py").write_text(HASTY, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    with Replica(EngineSpec("hasty_engine.Hasty"), index=0, device="cpu") as replica:
        replica.wait_ready(WAIT_S)
        ended: list[tuple[int, Completion]] = []
        launch = replica.generate([Request("a", (1,), 2), Request("b", (1,), 1)], None, lambda *row: ended.append(row))
        lost, kept = launch.result(WAIT_S)
    assert ended == [(1, kept)]
    assert (kept.request_id, kept.status, kept.output_ids) == ("b", "ok", (7,))
    assert (lost.error, lost.untouched) == ("Replica 0 (cpu) ended with exit code 3.", False)


def test_a_replica_that_is_killed_while_it_is_idle_is_started_again_without_a_request(new_replica: NewReplica) -> None:
    with new_replica(EngineSpec(SIMULATED), index=0, device="cpu") as replica:
        replica.wait_ready(WAIT_S)
        back, restart = threading.Event(), replica.restart

        def note() -> None:
            restart()
            back.set()

        replica.restart = note
        with ReplicaDispatcher([replica], max_restarts=1) as dispatcher:
            os.kill(replica.pid, signal.SIGKILL)
            assert back.wait(WAIT_S)
            assert dispatcher.dispatch(Request("a", (1,), 1)).result(WAIT_S).status == "ok"
            assert [event.what for event in dispatcher.events] == ["ended", "restarted"]


def test_a_replica_that_is_closed_is_no_accident(new_replica: NewReplica) -> None:
    replica = new_replica(EngineSpec(SIMULATED), index=0, device="cpu")
    replica.wait_ready(WAIT_S)
    with ReplicaDispatcher([replica], max_restarts=1) as dispatcher:
        replica.close()
        assert dispatcher.events == []


def test_only_a_replica_that_has_ended_is_started_again(new_replica: NewReplica, slow_engine: str) -> None:
    with new_replica(EngineSpec(slow_engine), index=0, device="cpu") as replica:
        replica.wait_ready(WAIT_S)
        with pytest.raises(ReplicaError, match="cannot be started again: it has not ended"):
            replica.restart()
    with pytest.raises(ReplicaError, match="was closed"):
        replica.restart()


@pytest.mark.slow
def test_of_a_thousand_requests_none_is_lost_doubled_or_hung(new_replica: NewReplica) -> None:
    """With random lengths, 5 % cancelled, and a replica killed in the middle, which comes back."""
    dice = random.Random(5)
    spec = EngineSpec(SIMULATED, {"token_ms": 0.05})
    requests = [
        Request(f"r{number}", tuple(dice.randrange(49152) for _ in range(dice.randint(1, 40))), dice.randint(1, 60))
        for number in range(1000)
    ]
    dropped = set(dice.sample(range(1000), 50))
    answered = threading.Semaphore(0)
    answers: list[str] = []

    def note(done: Future[Completion]) -> None:
        answers.append(done.result().request_id)
        answered.release()

    replicas = [new_replica(spec, index=index, device="cpu") for index in range(3)]
    try:
        for replica in replicas:
            replica.wait_ready(WAIT_S)
        with ReplicaDispatcher(replicas, "least_work", max_restarts=1) as dispatcher:
            futures = []
            for number, request in enumerate(requests):
                futures.append(dispatcher.dispatch(request))
                futures[-1].add_done_callback(note)
                if number in dropped:
                    dispatcher.cancel(futures[-1])
            for _ in range(400):
                assert answered.acquire(timeout=WAIT_S)
            os.kill(replicas[1].pid, signal.SIGKILL)
            assert not wait(futures, WAIT_S).not_done
            events = [(event.replica, event.what) for event in dispatcher.events]
    finally:
        for replica in replicas:
            replica.close(0.0)

    engine = SimulatedEngine()
    results = [future.result() for future in futures]
    assert sorted(answers) == sorted(request.request_id for request in requests)
    for number, (request, result) in enumerate(zip(requests, results, strict=True)):
        whole = tuple(engine.output_ids(request.input_ids, request.max_new_tokens))
        assert result.request_id == request.request_id
        if result.status == "ok":
            assert result.output_ids == whole
        elif result.status == "cancelled":
            assert number in dropped
            assert result.output_ids == whole[: len(result.output_ids)]
    failed = [result for result in results if result.status == "error"]
    assert len(failed) <= 1  # what the killed replica was at
    assert all(result.error == "Replica 1 (cpu) was killed by SIGKILL." for result in failed)
    assert events[0] == (1, "ended")
    assert events[1:] in ([], [(1, "restarted")])  # the others may have been done before it was ready


def test_all_rows_of_a_batch_that_are_cancelled_between_two_tokens_come_back_cancelled(
    new_replica: NewReplica, slow_engine: str
) -> None:
    with new_replica(EngineSpec(slow_engine), index=0, device="cpu") as replica:
        replica.wait_ready(WAIT_S)
        batch = replica.generate([Request(f"r{row}", (1,), 100_000) for row in range(4)])
        for row in range(4):
            replica.cancel(batch, row)
        assert [each.status for each in batch.result(WAIT_S)] == ["cancelled"] * 4


def test_a_process_that_reads_nothing_is_ended_all_the_same(new_replica: NewReplica, slow_engine: str) -> None:
    """Its pipe fills, and whoever writes to it blocks, until the watch ends it."""
    with new_replica(EngineSpec(slow_engine), index=0, device="cpu", hang_s=0.4) as replica:
        replica.wait_ready(WAIT_S)
        os.kill(replica.pid, signal.SIGSTOP)
        launches = [replica.generate([Request("long", tuple(range(30_000)), 2)]) for _ in range(12)]
        assert {each.result(WAIT_S)[0].status for each in launches} == {"error"}
        assert "gave no token" in str(replica.death)


def test_a_replica_whose_own_thread_fills_its_pipe_is_ended_all_the_same(slow_engine: str) -> None:
    """An answer brings on the next launches in the thread that also keeps the watch; the process reads none of them."""
    with Replica(EngineSpec(slow_engine), index=0, device="cpu", hang_s=0.4) as replica:
        replica.wait_ready(WAIT_S)
        launches: list[Future[list[Completion]]] = []
        filled = threading.Event()

        def fill(_: Future[list[Completion]]) -> None:
            os.kill(replica.pid, signal.SIGSTOP)
            launches.extend(replica.generate([Request("long", tuple(range(30_000)), 2)]) for _ in range(12))
            filled.set()

        replica.generate([Request("first", (1,), 2)]).add_done_callback(fill)
        assert filled.wait(WAIT_S)
        results = [each.result(WAIT_S)[0] for each in launches]
        assert {(each.status, each.untouched) for each in results} == {("error", True)}
        assert "gave no token" in str(replica.death)


@pytest.mark.parametrize("hang_s", [0.0, -1.0, 1e9, float("nan")])
def test_a_watch_that_cannot_be_kept_is_refused(new_replica: NewReplica, hang_s: float) -> None:
    with pytest.raises(UsageError, match="hang_s must lie above 0"):
        new_replica(EngineSpec(SIMULATED), index=0, device="cpu", hang_s=hang_s)
