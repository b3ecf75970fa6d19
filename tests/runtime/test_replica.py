"""Replicas in real processes, with the simulated engine and with engines that the tests write to a folder."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from skote.engines.simulated import DIE_CODE, SimulatedEngine
from skote.runtime.replica import Replica
from skote.runtime.worker_process import WorkerProcess
from skote.types import CapacityError, EngineError, EngineSpec, RecordError, ReplicaError, Request, UsageError

SIMULATED = "skote.engines.simulated.SimulatedEngine"
WAIT_S = 30.0

Start = Callable[..., Replica]

ENGINES = """
import os
import sys
from skote.types import CapacityError, EngineError

STATE = []

def remember(word):
    STATE.append(word)

class Refusing:
    def __init__(self, **options):
        raise CapacityError("The model needs 9 GB, there are 8.")

class Special(EngineError):
    pass

class Odd:
    def __init__(self):
        print("noise on stdout")

    def generate(self, requests, emit):
        name = requests[0].request_id
        emit(0, [7, 8])
        emit(0, [9])
        if name == "short":
            return []
        if name == "memory":
            raise MemoryError
        if name == "unexpected":
            raise RuntimeError("CUDA out of memory.\\nTried to allocate 2 GiB")
        if name == "exit":
            sys.stderr.write("the last words\\n\\n")
            sys.stderr.flush()
            os._exit(3)
        return ["stop"] * len(requests)

    def state(self):
        return STATE

    def pid_after(self, *numbers):
        return os.getpid(), sum(numbers)

    def special(self):
        raise Special("Quite special.")

    def unpicklable(self):
        return lambda: None


class Late:
    # a token that is computed when somebody asks for the integer
    def __index__(self):
        STATE.append("asked")
        return 5


class LateEngine(Odd):
    def generate(self, requests, emit):
        emit(0, [Late()])
        if "asked" not in STATE:
            raise RuntimeError("the stamp came before the integer")
        return ["length"]


class Empty(Odd):
    def generate(self, requests, emit):
        emit(0, [])
        return ["length"]


class Curious(Odd):
    # remembers the names of its requests
    def generate(self, requests, emit):
        STATE.extend(request.request_id for request in requests)
        return ["length"] * len(requests)

    def score(self, request, forced_ids):
        STATE.append(request.request_id)


class Picky(Odd):
    # refuses a batch, and alone only the request called bad
    def generate(self, requests, emit):
        if len(requests) > 1 or requests[0].request_id == "bad":
            raise ValueError("I will not")
        emit(0, [1])
        return ["length"]
"""


def request(name: str = "a", max_new_tokens: int = 4) -> Request:
    return Request(name, (1, 2, 3), max_new_tokens)


@pytest.fixture
def start() -> Iterator[Start]:
    """Start replicas that the test need not close, and check that closing leaves no process and no thread."""
    started: list[Replica] = []

    def start_one(target: str = SIMULATED, *, ready: bool = True, **options: Any) -> Replica:
        keywords = {name: options.pop(name) for name in ("setup", "log", "hide_ids", "hang_s") if name in options}
        replica = Replica(EngineSpec(target, options), index=len(started), device="cpu", **keywords)
        started.append(replica)
        if ready:
            replica.wait_ready(WAIT_S)
        return replica

    yield start_one
    for replica in started:
        replica.close(grace_s=0.0)
        assert not replica.alive
        with pytest.raises(ProcessLookupError):
            os.kill(replica.pid, 0)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("replica-")]


@pytest.fixture
def odd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The import path of the module ENGINES."""
    (tmp_path / "odd_engines.py").write_text(ENGINES, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    return "odd_engines"


@pytest.mark.parametrize(("hide_ids", "seen"), [(False, ["w00", "b00-r00", "p00"]), (True, ["0", "1", "2"])])
def test_ids_that_tell_a_phase_can_be_hidden_from_the_engine(
    start: Start, odd: str, hide_ids: bool, seen: list[str]
) -> None:
    replica = start(f"{odd}.Curious", hide_ids=hide_ids)

    completions = replica.generate([request("w00"), request("b00-r00")]).result(WAIT_S)
    replica.call("score", request("p00"), (1, 2)).result(WAIT_S)

    assert [completion.request_id for completion in completions] == ["w00", "b00-r00"]
    assert replica.call("state").result(WAIT_S) == seen


def test_a_launch_comes_back_with_tokens_and_ordered_stamps(start: Start) -> None:
    replica = start()
    requests = [request("a", 3), request("b", 1)]

    first, second = replica.generate(requests).result(WAIT_S)

    assert (first.request_id, first.input_tokens, first.status, first.finish_reason) == ("a", 3, "ok", "length")
    assert first.output_ids == tuple(SimulatedEngine().output_ids((1, 2, 3), 3))
    assert second.output_ids == first.output_ids[:1]
    assert second.admitted_ns == first.admitted_ns  # which is how findings know the rows of one launch
    assert [chunk.n_tokens for chunk in first.chunks] == [1, 1, 1]
    assert (first.replica, first.device, first.error) == (0, "cpu", None)
    assert first.admitted_ns is not None
    stamps = [first.dispatched_ns, first.admitted_ns, *(chunk.t_ns for chunk in first.chunks), first.end_ns]
    assert stamps == sorted(stamps)


def test_a_token_counts_when_the_host_holds_its_integer(start: Start, odd: str) -> None:
    completion = start(f"{odd}.LateEngine").generate([request("a", 1)]).result(WAIT_S)[0]

    assert (completion.status, completion.output_ids) == ("ok", (5,))
    assert type(completion.output_ids[0]) is int


def test_a_chunk_without_tokens_is_an_error(start: Start, odd: str) -> None:
    completion = start(f"{odd}.Empty").generate([request("a", 1)]).result(WAIT_S)[0]

    assert (completion.status, completion.chunks) == ("error", ())
    assert completion.error == "Empty emitted a chunk without tokens."


def test_one_request_of_a_batch_does_not_fail_the_others(start: Start, odd: str) -> None:
    batch = [request("a", 1), request("bad", 1), request("c", 1)]
    completions = start(f"{odd}.Picky").generate(batch).result(WAIT_S)

    assert [completion.status for completion in completions] == ["ok", "error", "ok"]
    assert [completion.output_ids for completion in completions] == [(1,), (), (1,)]


def test_launches_are_pipelined_and_answered_in_order(start: Start) -> None:
    replica = start()
    order: list[str] = []
    futures = [replica.generate([request(str(number))]) for number in range(20)]
    for future in futures:
        future.add_done_callback(lambda done: order.append(done.result()[0].request_id))

    assert [future.result(WAIT_S)[0].request_id for future in futures] == [str(number) for number in range(20)]
    replica.close()
    assert order == [str(number) for number in range(20)]


def test_chunks_of_several_tokens_and_early_stops_are_kept(start: Start, odd: str) -> None:
    completion = start(f"{odd}.Odd").generate([request()]).result(WAIT_S)[0]

    assert completion.output_ids == (7, 8, 9)
    assert [chunk.n_tokens for chunk in completion.chunks] == [2, 1]
    assert completion.finish_reason == "stop"


def test_a_failed_launch_keeps_its_tokens_and_the_next_one_works(start: Start) -> None:
    replica = start(fail_on=["bad"], fail_after=2)

    bad, good = (replica.generate([request(name)]).result(WAIT_S)[0] for name in ("bad", "good"))

    assert (bad.status, len(bad.output_ids), len(bad.chunks), bad.finish_reason) == ("error", 2, 2, None)
    assert bad.error == "The simulated engine was told to fail on request 'bad'."
    assert good.status == "ok"


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("memory", "Odd.generate failed with MemoryError."),
        ("unexpected", "Odd.generate failed with RuntimeError: CUDA out of memory."),
        ("short", "Odd ended 0 rows of 1."),
    ],
)
def test_unexpected_exceptions_become_one_sentence(
    start: Start, odd: str, tmp_path: Path, name: str, error: str
) -> None:
    log = tmp_path / "worker.log"
    replica = start(f"{odd}.Odd", log=log)

    completion = replica.generate([request(name)]).result(WAIT_S)[0]

    assert (completion.status, completion.error, completion.output_ids) == ("error", error, (7, 8, 9))
    assert ("Traceback" in log.read_text(encoding="utf-8")) == (name != "short")
    assert replica.generate([request()]).result(WAIT_S)[0].status == "ok"


def test_a_death_in_mid_generation_resolves_every_launch(start: Start) -> None:
    replica = start(die_on=["deadly"], fail_after=2)
    futures = [replica.generate([request(name)]) for name in ("before", "deadly", "after")]

    before, deadly, after = (future.result(WAIT_S)[0] for future in futures)

    assert before.status == "ok"
    expected = f"Replica 0 (cpu) ended with exit code {DIE_CODE}."
    assert (deadly.status, deadly.error, after.status, after.error) == ("error", expected, "error", expected)
    assert not replica.alive
    assert replica.death == expected
    late = replica.generate([request("late"), request("later")]).result(WAIT_S)
    assert [(each.request_id, each.error) for each in late] == [("late", expected), ("later", expected)]
    with pytest.raises(ReplicaError, match=f"exit code {DIE_CODE}"):
        replica.call("describe").result(WAIT_S)


def test_a_killed_process_is_reported_by_its_signal(start: Start) -> None:
    replica = start(prefill_ms=60_000.0)
    future = replica.generate([request()])

    os.kill(replica.pid, signal.SIGKILL)

    assert future.result(WAIT_S)[0].error == "Replica 0 (cpu) was killed by SIGKILL."


def test_a_death_is_reported_with_its_own_last_words(start: Start, odd: str, tmp_path: Path) -> None:
    log = tmp_path / "worker.log"
    log.write_text("an older replica's words\n", encoding="utf-8")
    replica = start(f"{odd}.Odd", log=log)

    error = replica.generate([request("exit")]).result(WAIT_S)[0].error

    assert error == f"Replica 0 (cpu) ended with exit code 3; its log {log} ends with: the last words"
    assert log.read_text(encoding="utf-8").startswith("an older replica's words\nnoise on stdout")


def test_close_cancels_what_outlasts_the_grace(start: Start) -> None:
    replica = start(prefill_ms=60_000.0)
    future = replica.generate([request()])

    replica.close(grace_s=0.05)
    replica.close()

    completion = future.result(WAIT_S)[0]
    assert (completion.status, completion.error) == ("cancelled", "Replica 0 (cpu) was closed.")


def test_close_lets_launches_finish_within_the_grace(start: Start) -> None:
    replica = start(prefill_ms=20.0)
    futures = [replica.generate([request(name)]) for name in "ab"]

    replica.close(grace_s=WAIT_S)

    assert [future.result(WAIT_S)[0].status for future in futures] == ["ok", "ok"]


def test_a_constructors_error_keeps_its_class_and_sentence(start: Start, odd: str) -> None:
    replica = start(f"{odd}.Refusing", ready=False)

    with pytest.raises(CapacityError, match=r"^The model needs 9 GB, there are 8\.$"):
        replica.wait_ready(WAIT_S)
    assert not replica.alive


@pytest.mark.parametrize(
    ("target", "options", "sentence"),
    [
        ("no_such_package.Engine", {}, "Engine 'no_such_package.Engine' cannot be imported"),
        ("skote.types.NoEngine", {}, "Engine 'skote.types.NoEngine' cannot be imported"),
        (SIMULATED, {"speed": 9}, "does not take these options: got an unexpected keyword argument 'speed'"),
        (SIMULATED, {"token_ms": -1.0}, "token_ms=-1.0"),
    ],
)
def test_a_wrong_spec_is_a_usage_error(start: Start, target: str, options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        start(target, **options)


def test_a_setup_that_cannot_be_imported_there_ends_the_process(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, odd: str
) -> None:
    import odd_engines

    setup = partial(odd_engines.remember, "x")
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry != str(tmp_path)])
    log = tmp_path / "worker.log"

    with pytest.raises(ReplicaError, match=r"exit code 1; its log .* ends with: ModuleNotFoundError"):
        start(setup=setup, log=log)


def test_setup_runs_before_the_engine_is_built(start: Start, odd: str) -> None:
    import odd_engines

    replica = start(f"{odd}.Odd", setup=partial(odd_engines.remember, "flags"))

    assert replica.call("state").result(WAIT_S) == ["flags"]
    assert odd_engines.STATE == []


def test_waiting_for_a_slow_engine_ends_at_the_timeout(start: Start) -> None:
    replica = start(ready=False)

    with pytest.raises(ReplicaError, match="was not ready after 0 s"):
        replica.wait_ready(0.0)
    assert not replica.alive


def test_other_methods_are_called_by_name(start: Start, odd: str) -> None:
    replica = start(f"{odd}.Odd")

    assert replica.call("pid_after", 1, 2).result(WAIT_S) == (replica.pid, 3)
    with pytest.raises(UsageError, match="no public method '_private'"):
        replica.call("_private").result(WAIT_S)
    with pytest.raises(UsageError, match="no public method 'missing'"):
        replica.call("missing").result(WAIT_S)
    with pytest.raises(EngineError, match=r"^Quite special\.$"):
        replica.call("special").result(WAIT_S)
    with pytest.raises(EngineError, match=r"^Odd\.unpicklable failed with "):
        replica.call("unpicklable").result(WAIT_S)


def test_scores_and_memory_come_back(start: Start) -> None:
    replica = start(vocab_size=11)

    logits = replica.call("score", request(), (0, 0)).result(WAIT_S)
    found = replica.call("choices", request(), (0, 3)).result(WAIT_S)
    memory = replica.call("peak_memory").result(WAIT_S)

    forced = SimulatedEngine(vocab_size=11).score(request(), (0, 3))
    assert found.vocab == 11
    assert (found.chosen.tolist(), found.best.tolist()) == ([forced[0, 0], forced[1, 3]], forced.max(-1).tolist())
    assert (logits == SimulatedEngine(vocab_size=11).score(request(), (0, 0))).all()
    assert 5e6 < memory["host_bytes"] < 1e9
    assert memory["device_bytes"] == 0


def test_nothing_is_left_open(start: Start, tmp_path: Path) -> None:
    descriptors = Path("/proc/self/fd")
    if not descriptors.exists():
        pytest.skip("counts descriptors in /proc")
    start().close()
    before = len(list(descriptors.iterdir()))

    start(log=tmp_path / "worker.log").close()
    with pytest.raises(UsageError):
        start("no_such_package.Engine")
    with pytest.raises(RecordError, match="no_such_folder"):
        start(log=tmp_path / "no_such_folder" / "worker.log")
    with pytest.raises(AttributeError):
        start(callback=lambda: None)

    assert len(list(descriptors.iterdir())) == before


def test_the_parents_death_ends_a_busy_worker() -> None:
    script = f"""
import sys, time
from skote.runtime.replica import Replica
from skote.types import EngineSpec, Request
replica = Replica(EngineSpec({SIMULATED!r}, {{"prefill_ms": 600_000.0}}), index=0, device="cpu")
replica.wait_ready(30)
replica.generate([Request("a", (1,), 1)])
print("busy", flush=True)
time.sleep(600)
"""
    # The worker inherits stderr: it reaches its end when parent and worker are both gone.
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        assert parent.stderr is not None
        assert parent.stdout.readline() == b"busy\n"

        parent.kill()

        ends: list[bytes] = []
        reader = threading.Thread(target=lambda: ends.append(parent.stderr.read()), daemon=True)
        reader.start()
        reader.join(WAIT_S)
        assert ends == [b""]


def test_ctrl_c_reaches_the_parent_alone(start: Start) -> None:
    replica = start()

    assert os.getpgid(replica.pid) == replica.pid != os.getpgrp()


def test_a_callback_that_exits_ends_no_replica(start: Start) -> None:
    replica = start()
    launches = [replica.generate([request(name)]) for name in "ab"]
    launches[0].add_done_callback(lambda _: sys.exit(3))

    assert [launch.result(WAIT_S)[0].status for launch in launches] == ["ok", "ok"]
    assert replica.generate([request("c")]).result(WAIT_S)[0].status == "ok"


def test_a_callback_that_exits_at_the_end_of_a_replica_loses_no_other_call(start: Start) -> None:
    replica = start(prefill_ms=60_000.0)
    launches = [replica.generate([request(name)]) for name in "ab"]
    launches[0].add_done_callback(lambda _: sys.exit(3))

    os.kill(replica.pid, signal.SIGKILL)

    assert [launch.result(WAIT_S)[0].status for launch in launches] == ["error", "error"]


def refuse(_: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


def test_without_a_thread_no_process_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[int] = []
    process_of = WorkerProcess.__init__

    def note(self: WorkerProcess, *arguments: Any) -> None:
        process_of(self, *arguments)
        started.append(self.pid)

    monkeypatch.setattr(WorkerProcess, "__init__", note)
    monkeypatch.setattr(threading.Thread, "start", refuse)

    with pytest.raises(ReplicaError, match=r"^The thread replica-0 cannot be started: can't start new thread\.$"):
        Replica(EngineSpec(SIMULATED), index=0, device="cpu")
    with pytest.raises(ProcessLookupError):
        os.kill(started[0], 0)


def test_a_restart_without_a_thread_leaves_it_dead_with_the_reason(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    replica = start(die_on=["deadly"])
    assert replica.generate([request("deadly")]).result(WAIT_S)[0].status == "error"
    sentence = (
        "Replica 0 (cpu) could not be started again: The thread replica-0 cannot be started: can't start new thread."
    )

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(ReplicaError, match="can't start new thread"):
            replica.restart()

    assert replica.death == sentence
    assert replica.generate([request()]).result(WAIT_S)[0].error == sentence
    replica.restart()
    assert replica.generate([request()]).result(WAIT_S)[0].status == "ok"


def test_what_cannot_be_sent_is_an_error_and_not_taken_for_a_hang(start: Start) -> None:
    replica = start(hang_s=0.2)
    unsendable = Request("a", (lambda: None,), 1)  # type: ignore[arg-type]

    (completion,) = replica.generate([unsendable]).result(WAIT_S)

    assert completion.status == "error"
    assert str(completion.error).startswith("Replica 0 (cpu) cannot be sent what generate was given: ")
    for _ in range(3):  # the watch looks at what is unanswered
        assert replica.call("peak_memory").result(WAIT_S)
    assert replica._calls == {}


@pytest.mark.parametrize("hang_s", ["5", True, [1]])
def test_a_watch_of_the_wrong_type_is_refused(hang_s: Any) -> None:
    with pytest.raises(UsageError, match=r"^hang_s must lie above 0 .* or null for no limit, got "):
        Replica(EngineSpec(SIMULATED), index=0, device="cpu", hang_s=hang_s)
