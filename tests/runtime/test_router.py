"""The router and its command over the simulated engine, and over one that echoes what it was asked."""

from __future__ import annotations

import inspect
import io
import json
import operator
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from functools import partial
from pathlib import Path
from queue import Queue
from typing import Any

import numpy as np
import pytest

from skote.engines.simulated import SimulatedEngine
from skote.runtime import affinity
from skote.runtime import router as router_module
from skote.runtime.router import Router, main
from skote.runtime.router_command import router_parser
from skote.types import CheckpointError, EngineError, EngineSpec, RequestError, Sampling, UsageError

WAIT_S = 30.0
CPUS = ["cpu", "cpu"]

Open = Callable[..., Router]

ECHO = """
import sys

class Echo:
    def __init__(self, **options):
        self.options = options

    def generate(self, requests, emit):
        for row, request in enumerate(requests):
            sampling = request.sampling
            chosen = [round(100 * sampling.temperature), sampling.top_k, round(100 * sampling.top_p), sampling.seed]
            emit(row, [request.max_new_tokens, *chosen, len(requests)])
        return ["stop"] * len(requests)

class Flags:
    def __init__(self, **options):
        self.threads = options["threads"]

    def generate(self, requests, emit):
        import torch
        emit(0, [int(torch.get_float32_matmul_precision() == "high"), torch.get_num_threads(), self.threads])
        return ["stop"]
"""


class LetterCodec:
    """A token a letter; answers are decoded into their numbers."""

    pad_id = 0
    has_chat_template = True

    def encode(self, text: str) -> tuple[int, ...]:
        return tuple(map(ord, text))

    def encode_chat(self, text: str) -> tuple[int, ...]:
        return self.encode(f"<{text}>")

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(map(str, ids))


def answer(text: str, n_tokens: int) -> str:
    codec = LetterCodec()
    return codec.decode(SimulatedEngine().output_ids(codec.encode(text), n_tokens))


def spec(**options: Any) -> EngineSpec:
    return EngineSpec("skote.engines.simulated.SimulatedEngine", options)


@pytest.fixture
def without_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep torch out of the workers, for speed."""
    monkeypatch.setattr(affinity, "prepare", operator.is_)


@pytest.fixture
def echo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The import path of the module ECHO."""
    (tmp_path / "echo_engines.py").write_text(ECHO, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    return "echo_engines"


@pytest.fixture(params=["process", pytest.param("ray", marks=pytest.mark.slow)])
def open_router(request: pytest.FixtureRequest, without_flags: None) -> Iterator[Open]:
    """Open routers that the test need not close, on either backend, and check that none leaves a thread."""
    routers: list[Router] = []
    backend = {}
    if request.param == "ray":
        backend = {"backend": "ray", "address": request.getfixturevalue("ray_nodes").address}

    def open_one(devices: list[str] | None = None, **options: Any) -> Router:
        options = {"engine": spec(), "codec": LetterCodec()} | backend | options
        routers.append(Router("no-directory", devices or CPUS, **options))
        return routers[-1]

    yield open_one
    for each in routers:
        each.close(grace_s=0.0)
    assert not worker_threads()


def worker_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith(("replica-", "dispatch-"))]


def test_submit_returns_the_answer_without_the_prompt(open_router: Open) -> None:
    assert open_router().submit("hello", max_new_tokens=3) == answer("hello", 3)


def test_submit_many_keeps_the_order_and_shares_the_work(open_router: Open) -> None:
    router = open_router()
    texts = [f"prompt {number}" for number in range(10)]

    assert router.submit_many(texts, max_new_tokens=2) == [answer(text, 2) for text in texts]
    assert [(each.dispatched, each.in_flight_peak) for each in router.counts] == [(5, 1), (5, 1)]
    assert router.submit_many([], max_new_tokens=2) == []


def test_submit_future_answers_later(open_router: Open) -> None:
    router = open_router(max_concurrency_per_device=3, policy="shortest_queue")
    texts = [f"prompt {number}" for number in range(6)]

    futures = [router.submit_future(text, max_new_tokens=4) for text in texts]

    assert [future.result(WAIT_S) for future in futures] == [answer(text, 4) for text in texts]


def test_a_failed_prompt_raises_after_all_have_run(open_router: Open) -> None:
    router = open_router(engine=spec(fail_on=["router-1"]))

    with pytest.raises(EngineError, match=r"told to fail on request 'router-1'"):
        router.submit_many("abcdef", max_new_tokens=2)

    assert [each.launches for each in router.counts] == [3, 3]
    assert router.submit("g", max_new_tokens=2) == answer("g", 2)


def test_a_failed_prompt_raises_from_submit_and_from_its_future(open_router: Open) -> None:
    router = open_router(engine=spec(fail_on=["router-0", "router-1"]))

    with pytest.raises(EngineError, match="router-0"):
        router.submit("a", max_new_tokens=2)
    with pytest.raises(EngineError, match="router-1"):
        router.submit_future("b", max_new_tokens=2).result(WAIT_S)
    assert router.submit_future("c", max_new_tokens=2).result(WAIT_S) == answer("c", 2)


def test_a_replica_that_dies_takes_its_own_prompts_only(open_router: Open) -> None:
    router = open_router(engine=spec(die_on=["router-0"]))
    futures = [router.submit_future(text, max_new_tokens=2) for text in "abcd"]
    wait(futures, WAIT_S)

    with pytest.raises(EngineError, match=r"Replica 0 .* exit code 70"):
        futures[0].result(WAIT_S)
    assert [futures[number].result(WAIT_S) for number in (1, 3)] == [answer("b", 2), answer("d", 2)]
    assert router.submit_many("ef", max_new_tokens=2) == [answer("e", 2), answer("f", 2)]


def test_an_answer_that_cannot_be_decoded_does_not_hang(open_router: Open, caplog: pytest.LogCaptureFixture) -> None:
    class Broken(LetterCodec):
        def decode(self, ids: Sequence[int]) -> str:
            raise ZeroDivisionError

    future = open_router(codec=Broken()).submit_future("hello", max_new_tokens=2)

    with pytest.raises(EngineError, match="'hello' could not be decoded"):
        future.result(WAIT_S)


def test_sampling_reaches_the_engine(open_router: Open, echo: str) -> None:
    router = open_router(["cpu"], engine=EngineSpec(f"{echo}.Echo"))

    assert router.submit("a", max_new_tokens=7) == "7 0 0 100 0 1"
    assert router.submit("a", max_new_tokens=7, greedy=False) == "7 100 0 100 0 1"
    assert router.submit("a", max_new_tokens=8, sampling=Sampling(0.5, 7, 0.9, seed=3)) == "8 50 7 90 3 1"


def test_waiting_for_a_router_in_its_own_callback_is_refused(open_router: Open) -> None:
    """It would wait for the thread that it runs in."""
    router = open_router()
    refused: Queue[str] = Queue()

    def ask_again(_: Future[str]) -> None:
        for call in (lambda: router.submit("again", max_new_tokens=1), router.close):
            try:
                call()
            except UsageError as error:
                refused.put(str(error))

    router.submit_future("first", max_new_tokens=1).add_done_callback(ask_again)

    assert "use submit_future there" in refused.get(timeout=WAIT_S)
    assert "use submit_future there" in refused.get(timeout=WAIT_S)
    assert router.submit("later", max_new_tokens=1) == answer("later", 1)


def test_a_callback_that_waits_holds_up_no_replica(open_router: Open) -> None:
    """The answers of later requests wait for it, their launches do not."""
    router = open_router(["cpu"])
    held, release = threading.Event(), threading.Event()

    def hold(_: Future[str]) -> None:
        held.set()
        assert release.wait(WAIT_S)

    router.submit_future("first", max_new_tokens=1).add_done_callback(hold)
    assert held.wait(WAIT_S)
    later = [router.submit_future(text, max_new_tokens=1) for text in ("second", "third")]
    deadline = time.monotonic() + WAIT_S
    while router.counts[0].launches < 3:  # the second is answered, and the third is launched
        assert time.monotonic() < deadline
    assert not later[0].done()
    release.set()
    assert [each.result(WAIT_S) for each in later] == [answer("second", 1), answer("third", 1)]


def test_a_callback_that_exits_ends_nothing(open_router: Open) -> None:
    router = open_router()
    for text in "ab":
        router.submit_future(text, max_new_tokens=1).add_done_callback(lambda _: sys.exit(3))

    assert router.submit_many("cd", max_new_tokens=1) == [answer("c", 1), answer("d", 1)]
    assert router.events == []


def test_futures_of_texts_and_of_ids_can_be_cancelled(open_router: Open) -> None:
    router = open_router(["cpu"], engine=spec(token_ms=1.0))
    running, waiting = (router.submit_future(text, max_new_tokens=100_000) for text in "ab")
    last = router.submit_ids((1,), max_new_tokens=100_000)

    for future in (waiting, last, running):
        assert router.cancel(future)

    with pytest.raises(EngineError, match="cancelled before a replica took it"):
        waiting.result(WAIT_S)
    with pytest.raises(EngineError, match=r"^The request was cancelled\.$"):
        running.result(WAIT_S)
    assert last.result(WAIT_S).status == "cancelled"
    assert not any(map(router.cancel, (running, waiting, last)))


def test_requests_of_the_wrong_type_are_refused_by_name(open_router: Open) -> None:
    router = open_router(["cpu"])
    asked: Any = router
    for call, said in (
        (lambda: asked.submit(None, max_new_tokens=1), "A prompt must be text, got None."),
        (lambda: asked.submit_many(["a", 5], max_new_tokens=1), "A prompt must be text, got 5."),
        (lambda: asked.submit_many(5, max_new_tokens=1), "texts must be a list of prompts, got 5."),
        (lambda: asked.submit_future(b"a", max_new_tokens=1), "A prompt must be text, got b'a'."),
        (
            lambda: asked.submit("a", max_new_tokens="5"),
            "max_new_tokens must be a whole number of at least 1, got '5'.",
        ),
        (
            lambda: asked.submit("a", max_new_tokens=True),
            "max_new_tokens must be a whole number of at least 1, got True.",
        ),
        (lambda: asked.submit("a", max_new_tokens=1, greedy="no"), "greedy must be True or False, got 'no'."),
        (lambda: asked.submit("a", max_new_tokens=1, sampling=0.7), "sampling must be a Sampling, or None, got 0.7."),
        (
            lambda: asked.submit("a", max_new_tokens=1, priority=3),
            "priority must be one of interactive, batch, got 3.",
        ),
        (lambda: asked.submit_ids([1, None], max_new_tokens=1), "input_ids must be whole numbers, got [1, None]."),
        (lambda: asked.submit_ids([1], max_new_tokens=1, hear=5), "hear must be a function, or None, got 5."),
        (
            lambda: asked.submit_ids([1], max_new_tokens=1, ignore_eos="no"),
            "ignore_eos must be True or False, got 'no'.",
        ),
        (lambda: asked.submit_ids("ab", max_new_tokens=1), "input_ids must be whole numbers, got ab."),
        (lambda: Sampling("hot"), "temperature must be 0 (greedy) or more, got 'hot'."),  # type: ignore[arg-type]
        (lambda: Sampling(top_k=True), "top_k must be a whole number, 0 (no limit) or more, got True."),
        (lambda: Sampling(top_p=None), "top_p must lie in (0, 1], got None."),  # type: ignore[arg-type]
        (lambda: Sampling(seed=1.5), "seed must be a whole number, got 1.5."),  # type: ignore[arg-type]
        (lambda: asked.submit_ids(7, max_new_tokens=1), "input_ids must be whole numbers, got 7."),
    ):
        with pytest.raises(RequestError, match=f"^{re.escape(said)}$"):
            call()
    assert sum(each.launches for each in router.counts) <= 1  # the good prompt before the bad one


def test_ids_of_any_whole_numbers_are_taken(open_router: Open) -> None:
    """Of a list, and of numpy's."""
    router = open_router(["cpu"])
    ids: Any = list(np.array([1, 2, 3]))

    completion = router.submit_ids(ids, max_new_tokens=2).result(WAIT_S)

    assert completion.output_ids == tuple(SimulatedEngine().output_ids((1, 2, 3), 2))


def test_a_micro_batch_window_fills_launches(open_router: Open, echo: str) -> None:
    router = open_router(
        ["cpu"], engine=EngineSpec(f"{echo}.Echo"), microbatch_window_ms=3.6e6, microbatch_max=3
    )  # fmt: skip

    assert router.submit_many("abc", max_new_tokens=2) == ["2 0 0 100 0 3"] * 3


def test_bad_requests_are_refused_before_they_run(open_router: Open) -> None:
    router = open_router()

    with pytest.raises(RequestError, match="empty prompt"):
        router.submit("", max_new_tokens=1)
    with pytest.raises(RequestError, match="max_new_tokens"):
        router.submit_many(["a"], max_new_tokens=0)
    with pytest.raises(RequestError, match="max_new_tokens"):
        router.submit_future("a", max_new_tokens=-1)
    assert sum(each.dispatched for each in router.counts) == 0


def test_each_replica_has_a_log(open_router: Open, tmp_path: Path) -> None:
    open_router(log_dir=tmp_path)

    assert sorted(path.name for path in tmp_path.iterdir()) == ["replica-0.log", "replica-1.log"]


def test_the_grace_of_a_close_is_that_of_all_replicas_together(open_router: Open) -> None:
    """Each has a request that outlasts it; one after the other they would take three times as long."""
    router = open_router(["cpu"] * 3, engine=spec(prefill_ms=600_000.0))
    futures = [router.submit_ids((1,), max_new_tokens=1) for _ in range(3)]
    started = time.monotonic()

    router.close(grace_s=1.0)

    assert 1.0 <= time.monotonic() - started < 2.5
    assert {future.result(WAIT_S).status for future in futures} == {"cancelled"}


def test_a_closed_router_takes_no_prompts(open_router: Open) -> None:
    with open_router(["cpu"]) as router:
        pass
    router.close()

    with pytest.raises(EngineError, match="closed"):
        router.submit("a", max_new_tokens=1)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"policy": "best"}, "best"),
        ({"dtype": "int3"}, "int3"),
        ({"devices": ["cuda:99"]}, "cuda:99"),
        ({"max_concurrency_per_device": 0}, "max_concurrency_per_device"),
        ({"engine": spec(token_ms=-1.0)}, "token_ms"),
        ({"engine": spec(speed=1)}, "speed"),
        ({"engine": "simulated"}, "engine must be an EngineSpec, or None, got 'simulated'"),
        ({"dtype": 32}, "dtype must be text, or None, got 32"),
        ({"dtype": ""}, "dtype '' is not known"),
        ({"policy": 1}, "policy 1 is not known"),
        ({"policy": ""}, "policy '' is not known"),
        ({"devices": True}, "devices=True"),
        ({"devices": ["cpu", None]}, "None"),
        ({"log_dir": 5}, "log_dir must be a folder's path, or None, got 5"),
        ({"hang_s": "5"}, "hang_s must lie above 0 .*, got '5'"),
        ({"max_concurrency_per_device": "2"}, "max_concurrency_per_device .*, got '2'"),
        ({"max_queue": True}, "max_queue .*, got True"),
        ({"microbatch_window_ms": "2"}, "microbatch_window_ms .*, got '2'"),
    ],
)
def test_arguments_that_do_not_fit_leave_nothing_behind(open_router: Open, options: dict[str, Any], named: str) -> None:
    with pytest.raises(UsageError, match=named):
        open_router(**options)
    assert not worker_threads()


def test_a_directory_without_a_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=str(tmp_path)):
        Router(tmp_path, "cpu")


def test_the_dtypes_flags_are_set_in_the_worker(echo: str) -> None:
    with Router("no-directory", "cpu", "tf32", engine=EngineSpec(f"{echo}.Flags"), codec=LetterCodec()) as router:
        high, threads, option = router.submit("a", max_new_tokens=3).split()

    assert high == "1"
    assert threads == option


@pytest.fixture
def command(without_flags: None, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Run `skote-router` on the simulated engine with prompts on standard input."""

    def run(prompts: str, *arguments: str, codec: LetterCodec | None = None, **options: Any) -> int:
        simulated = partial(Router, engine=spec(**options), codec=codec or LetterCodec())
        monkeypatch.setattr(router_module, "Router", simulated)
        monkeypatch.setattr(sys, "stdin", io.StringIO(prompts))
        return main(["no-directory", "--devices", "cpu,cpu", *arguments])

    return run


def test_answers_go_to_stdout_and_figures_to_stderr(
    command: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert command("one\n\n  \ntwo\r\n", "--max-new-tokens", "3") == 0

    captured = capsys.readouterr()
    assert captured.out == f"{answer('one', 3)}\n{answer('two', 3)}\n"
    headers = captured.err.splitlines()
    assert [header.split(", e2el_ms ")[0] for header in headers] == [
        "--- 1/2 (replica 0, output_tokens 3",
        "--- 2/2 (replica 1, output_tokens 3",
    ]


def test_the_sampling_arguments_reach_the_engine(
    without_flags: None, echo: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        router_module, "Router", partial(Router, engine=EngineSpec(f"{echo}.Echo"), codec=LetterCodec())
    )
    monkeypatch.setattr(sys, "stdin", io.StringIO("a\n"))

    chosen = ("--temperature", "0.5", "--top-k", "7", "--top-p", "0.9", "--seed", "3")
    assert main(["no-directory", "--devices", "cpu", "--max-new-tokens", "8", *chosen]) == 0

    assert capsys.readouterr().out == "8 50 7 90 3 1\n"


def test_the_routers_arguments_reach_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    given: list[Any] = []

    def open_router(*arguments: Any, **options: Any) -> Router:
        given.extend((arguments, options))
        raise UsageError("Seen.")

    monkeypatch.setattr(router_module, "Router", open_router)
    monkeypatch.setattr(sys, "stdin", io.StringIO("a\n"))
    flags = "--devices 2 --policy least_work --max-concurrency 3 --microbatch-window-ms 1.5 --microbatch-max 4"
    more = "--max-queue 0 --max-restarts 5 --hang-s 60 --tpot-slo-ms 8 --log-dir logs"

    assert main(["directory", *flags.split(), *more.split()]) == 4

    monkeypatch.setattr(sys, "stdin", io.StringIO("a\n"))
    assert main(["directory", "--max-batch", "6"]) == 4
    arguments, options = given[2:]
    assert arguments == ("directory", None, None, "round_robin", 6)
    assert options["engine"] == EngineSpec("skote.runtime.engine.SkotergyEngine", {"max_batch": 6})
    del given[2:]
    assert given == [
        ("directory", 2, None, "least_work", 3),
        {
            "microbatch_window_ms": 1.5,
            "microbatch_max": 4,
            "max_queue": 0,
            "max_restarts": 5,
            "hang_s": 60.0,
            "tpot_slo_ms": 8.0,
            "backend": "process",
            "address": None,
            "log_dir": Path("logs"),
        },
    ]


@pytest.mark.parametrize(
    ("flags", "code", "said"),
    [
        (["--backend", "threads"], 4, "argument --backend: invalid choice: 'threads'"),
        (["--address", "head:6379"], 4, "--address head:6379 is of a Ray: add --backend ray."),
        (["--log-dir", __file__], 1, "cannot be made a folder"),
    ],
)
def test_wrong_flags_are_named_as_flags(
    flags: list[str], code: int, said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("a\n"))
    assert main(["no-directory", *flags]) == code
    assert said in capsys.readouterr().err


def test_the_folder_of_logs_is_made(command: Callable[..., int], tmp_path: Path) -> None:
    assert command("one\n", "--log-dir", str(tmp_path / "new" / "logs")) == 0
    assert len(list((tmp_path / "new" / "logs").glob("replica-*.log"))) == 2


def test_the_commands_defaults_are_the_routers() -> None:
    options = vars(router_parser().parse_args(["directory"]))
    defaults = {name: each.default for name, each in inspect.signature(Router).parameters.items()}
    names = ("microbatch_window_ms", "microbatch_max", "max_queue", "max_restarts", "hang_s", "tpot_slo_ms", "log_dir")
    for name in names:
        assert options[name] == defaults[name], name


def test_prompts_past_a_full_queue_fail_by_name(
    command: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert command("a\nb\nc\n", "--max-queue", "0", "--max-new-tokens", "2", prefill_ms=300.0) == 1

    captured = capsys.readouterr()
    assert captured.out == f"{answer('a', 2)}\n{answer('b', 2)}\n"
    assert "prompt 3 of 3 failed: Every queue is full (" in captured.err


def test_json_lines(command: Callable[..., int], capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("één\nzwei\n", encoding="utf-8")

    assert command("unread", "--json", "--max-new-tokens", "2", "--policy", "shortest_queue", str(file)) == 0

    records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [record.pop("e2el_ms") > 0.0 for record in records] == [True, True]
    assert records == [
        {"index": 0, "prompt": "één", "text": answer("één", 2), "error": None, "replica": 0, "output_tokens": 2},
        {"index": 1, "prompt": "zwei", "text": answer("zwei", 2), "error": None, "replica": 1, "output_tokens": 2},
    ]


def test_chat_wraps_each_prompt(command: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    assert command("hi\n", "--chat", "--max-new-tokens", "2") == 0
    assert capsys.readouterr().out == f"{answer('<hi>', 2)}\n"


def test_a_failed_prompt_loses_no_other(command: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    assert command("a\nb\nc\n", "--max-new-tokens", "2", fail_on=["router-1"]) == 1

    captured = capsys.readouterr()
    assert captured.out == f"{answer('a', 2)}\n{answer('c', 2)}\n"
    assert "skote-router: prompt 2 of 3 failed: The simulated engine was told to fail on request 'router-1'." in (
        captured.err.splitlines()
    )


def test_a_failed_prompt_keeps_its_json_line(command: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    class Skipping(LetterCodec):
        def encode(self, text: str) -> tuple[int, ...]:
            return () if text == "b" else super().encode(text)

    assert command("a\nb\nc\n", "--json", codec=Skipping()) == 1

    first, second, third = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert (first["error"], third["error"]) == (None, None)
    assert (second["index"], second["text"]) == (1, None)
    assert "empty prompt" in second["error"]


@pytest.mark.parametrize(
    ("prompts", "arguments", "sentence"),
    [
        ("", [], "There is no prompt"),
        (" \n\n", [], "There is no prompt"),
        ("a", ["no-such-file.txt"], "no-such-file.txt cannot be read"),
        ("a", ["--max-new-tokens", "0"], "'0' is not a whole number of at least 1"),
        ("a", ["--speed", "9"], "unrecognized arguments: --speed 9"),
        ("a", ["--policy", "best"], "argument --policy: invalid choice: 'best'"),
        ("a", ["--dtype", "int3"], "dtype 'int3'"),
        ("a", ["--chat", "--raw"], "not allowed with"),
        ("a", ["--top-k", "-1"], "top_k must be a whole number"),
        ("a", ["--max-queue", "-1"], "argument --max-queue: '-1' is not a whole number, 0 or more"),
        ("a", ["--max-restarts", "1.5"], "argument --max-restarts: '1.5' is not a whole number, 0 or more"),
        ("a", ["--microbatch-window-ms", "inf"], "argument --microbatch-window-ms: 'inf' is not a number, 0 or more"),
        ("a", ["--microbatch-max", "0"], "argument --microbatch-max: '0' is not a whole number of at least 1"),
        ("a", ["--hang-s", "0"], "hang_s must lie above 0"),
    ],
)
def test_wrong_usage_is_one_sentence_and_exit_4(
    command: Callable[..., int],
    capsys: pytest.CaptureFixture[str],
    prompts: str,
    arguments: list[str],
    sentence: str,
) -> None:
    assert command(prompts, *arguments) == 4

    captured = capsys.readouterr()
    assert captured.out == ""
    assert sentence in captured.err
    assert captured.err.startswith("skote-router: ")
    assert captured.err.count("\n") == 1


COMMAND = """
import operator
import sys
from functools import partial
from skote.runtime import affinity, router
from skote.types import EngineSpec

class Codec:
    pad_id = 0
    has_chat_template = True

    def encode(self, text):
        print("busy", flush=True)
        return (1,)

    encode_chat = encode

    def decode(self, ids):
        return "an answer"

slow = EngineSpec("skote.engines.simulated.SimulatedEngine", {"prefill_ms": float(sys.argv[1])})
affinity.prepare = operator.is_
router.Router = partial(router.Router, engine=slow, codec=Codec())
sys.exit(router.main(["no-directory", "--devices", "cpu"]))
"""


def start_command(prefill_ms: float) -> subprocess.Popen[bytes]:
    """`skote-router` in a process of its own, with one prompt; it prints "busy" when it has encoded it."""
    process = subprocess.Popen(
        [sys.executable, "-c", COMMAND, str(prefill_ms)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdin is not None
    process.stdin.write(b"a prompt\n")
    process.stdin.close()
    process.stdin = None
    return process


def test_ctrl_c_ends_with_130_and_without_orphans() -> None:
    with start_command(prefill_ms=600_000.0) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"busy\n"

        process.send_signal(signal.SIGINT)

        # The worker holds stderr too: its end is the end of both.
        _, stderr = process.communicate(timeout=WAIT_S)
    assert process.returncode == 130
    assert stderr.decode().splitlines() == ["skote-router: interrupted."]


def test_a_reader_that_has_enough_ends_the_command_quietly() -> None:
    with start_command(prefill_ms=0.0) as process:
        assert process.stdout is not None
        process.stdout.close()
        process.stdout = None

        _, stderr = process.communicate(timeout=WAIT_S)
    assert process.returncode == 1
    assert b"Traceback" not in stderr
    assert b"Exception" not in stderr
