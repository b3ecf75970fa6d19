"""vLLM as an engine, against a module that speaks its API: what it is asked, and what is made of its answers."""

from __future__ import annotations

import asyncio
import sys
from types import ModuleType, SimpleNamespace

import pytest

from skote.engines.vllm import VllmEngine
from skote.types import BatchingEngine, EngineError, Request, Sampling, UsageError

OPTIONS = {"local_dir": "/the/model", "device": "cuda:0", "dtype": "bf16"}


class EngineGenerateError(Exception):
    pass


class FakeLlm:
    """Answers a prompt that ends in p with p + 1, p + 2, ... two at a time; 90 to 93 fail, end otherwise, or hang."""

    made = ()

    def __init__(self, args):
        self.args, self.asked, self.aborted, self.shut = args, [], [], 0
        FakeLlm.made = (*FakeLlm.made, self)

    @classmethod
    def from_engine_args(cls, args):
        if args.model == "broken":
            raise ValueError("No such architecture.\nTrace follows.")
        return cls(args)

    def shutdown(self):
        self.shut += 1

    async def generate(self, prompt, sampling_params, request_id):
        self.asked.append((prompt, sampling_params, request_id))
        first, limit = prompt["prompt_token_ids"][-1], sampling_params.max_tokens
        if first == 90:
            raise EngineGenerateError("The request is ill.\nTrace follows.")
        reason = {91: "abort", 92: "stop"}.get(first, "length")
        try:
            for start in range(0, limit, 2):
                await asyncio.sleep(30 if first == 93 and start else 0)
                ids = list(range(first + 1 + start, first + 1 + min(start + 2, limit)))
                done = reason if start + 2 >= limit else None
                yield SimpleNamespace(
                    outputs=[SimpleNamespace(token_ids=ids, finish_reason=done)], num_cached_tokens=len(ids)
                )
        except (asyncio.CancelledError, GeneratorExit):
            self.aborted.append(request_id)
            raise


class FakeArgs:
    FIELDS = frozenset(
        ("model", "dtype", "max_model_len", "max_num_seqs", "gpu_memory_utilization", "enable_prefix_caching")
    ) | {"disable_log_stats", "enforce_eager"}

    def __init__(self, **fields):
        if foreign := set(fields) - self.FIELDS:
            raise TypeError(f"unexpected {sorted(foreign)}")
        vars(self).update(fields)


class Desk:
    """Two requests from the start; the second is cancelled once it has emitted."""

    def __init__(self, *requests):
        self.waiting, self.said = list(enumerate(requests)), []
        self.cancelled = set()

    def arrivals(self):
        taken, self.waiting = self.waiting, []
        return taken

    def on_arrival(self, wake):
        self.wake = wake

    def is_cancelled(self, key):
        return key in self.cancelled

    def admit(self, key):
        self.said.append((key, "admit"))

    def cached(self, key, tokens):
        self.said.append((key, "cached", tokens))

    def emit(self, key, ids):
        self.said.append((key, *ids))
        if ids[0] == 94:
            self.cancelled.add(key)
            self.wake()

    def end(self, key, reason):
        self.said.append((key, reason))

    def fail(self, key, error):
        self.said.append((key, str(error)))


@pytest.fixture(autouse=True)
def fake_vllm(monkeypatch):
    FakeLlm.made = ()
    top, params, v1, core, exceptions = (
        ModuleType(name)
        for name in ("vllm", "vllm.sampling_params", "vllm.v1", "vllm.v1.engine", "vllm.v1.engine.exceptions")
    )
    top.__version__, top.AsyncLLMEngine, top.AsyncEngineArgs = "0.22.0", FakeLlm, FakeArgs
    top.SamplingParams = SimpleNamespace
    params.RequestOutputKind = SimpleNamespace(DELTA="delta")
    exceptions.EngineGenerateError = EngineGenerateError
    for module in (top, params, v1, core, exceptions):
        monkeypatch.setitem(sys.modules, module.__name__, module)


@pytest.fixture
def make():
    """`make()`: an engine, closed with the test."""
    engines = []

    def build():
        engines.append(VllmEngine(**OPTIONS))
        return engines[-1]

    yield build
    for engine in engines:
        engine.close()


def test_it_is_made_with_the_runs_options_and_ones_own_win():
    engine = VllmEngine(**OPTIONS, max_model_len=64, engine_args={"enforce_eager": True, "max_num_seqs": 3})
    (llm,) = FakeLlm.made
    assert vars(llm.args) == {
        "model": "/the/model", "dtype": "bfloat16", "max_model_len": 64, "max_num_seqs": 3,
        "gpu_memory_utilization": 0.45, "enable_prefix_caching": False, "disable_log_stats": True,
        "enforce_eager": True,
    }  # fmt: skip
    assert isinstance(engine, BatchingEngine)
    assert (engine.rows, engine.describe()["scores"]) == (128, False)
    assert engine.describe()["tier_reason"] == "vLLM 0.22.0, up to 128 requests a step"
    engine.close()
    assert llm.shut == 1


def test_token_ids_go_in_and_come_out_chunk_by_chunk(make):
    heard = [[], []]
    requests = [
        Request("a", (1, 7), 3, ignore_eos=True),
        Request("b", (92,), 2, Sampling(0.5, top_k=4, top_p=0.9, seed=11)),
    ]
    engine = make()
    assert engine.generate(requests, lambda row, ids: heard[row].append(list(ids))) == ["length", "stop"]
    assert heard == [[[8, 9], [10]], [[93, 94]]]
    (prompt, params, first), (_, sampled, second) = FakeLlm.made[0].asked
    assert prompt == {"prompt_token_ids": [1, 7]}
    assert vars(params) == {
        "max_tokens": 3, "temperature": 0.0, "top_k": 0, "top_p": 1.0, "seed": None, "ignore_eos": True,
        "detokenize": False, "output_kind": "delta",
    }  # fmt: skip
    assert (sampled.temperature, sampled.top_k, sampled.top_p, sampled.seed) == (0.5, 4, 0.9, 11)
    assert first != second


def test_a_desk_is_served_and_a_request_that_nobody_waits_for_is_taken_out(make):
    desk = Desk(Request("a", (1,), 2), Request("b", (93,), 9), Request("c", (90,), 1))
    make().serve(desk)
    assert [each for each in desk.said if each[0] == 0] == [(0, "admit"), (0, 2, 3), (0, "cached", 2), (0, "length")]
    assert [each for each in desk.said if each[0] == 1] == [(1, "admit"), (1, 94, 95), (1, None)]
    assert [each for each in desk.said if each[0] == 2] == [
        (2, "admit"), (2, "vLLM failed on the request: The request is ill."),
    ]  # fmt: skip
    assert len(FakeLlm.made[0].aborted) == 1


def test_an_end_that_is_none(make):
    with pytest.raises(EngineError, match=r"ended the request for the reason 'abort'"):
        make().generate([Request("a", (91,), 1)], lambda *_: None)


@pytest.mark.parametrize(
    ("changed", "error", "sentence"),
    [
        ({"device": "cpu"}, UsageError, "engine=vllm runs on CUDA alone, and this arm is on cpu"),
        ({"device": "cuda:1"}, UsageError, "first GPU that it sees, and this arm is on cuda:1"),
        ({"random_seed": 0}, UsageError, "vLLM reads a checkpoint"),
        ({"layers": 2}, UsageError, "vLLM reads a checkpoint"),
        ({"engine_args": {"speed": 9}}, UsageError, r"vLLM 0.22.0 does not take them \(unexpected \['speed'\]\)"),
        ({"local_dir": "broken"}, EngineError, r"vLLM 0.22.0 cannot load broken: No such architecture\.$"),
    ],
)
def test_what_cannot_run_is_one_sentence(changed, error, sentence):
    with pytest.raises(error, match=sentence):
        VllmEngine(**OPTIONS | changed)


def test_without_the_package(monkeypatch):
    for name in [name for name in sys.modules if name.startswith("vllm")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "vllm", None)  # as where there is none
    with pytest.raises(UsageError, match=r"engine=vllm needs the package vllm: pip install 'skotergy\[vllm\]'"):
        VllmEngine(**OPTIONS)
