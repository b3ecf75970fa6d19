"""Replicas in processes, and as Ray actors, on a GPU: the latency guard, the prefix cache, a kill, a lost device."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

from skote.runtime.dispatch import ReplicaDispatcher
from skote.runtime.ray_cluster import RayCluster
from skote.runtime.ray_replica import RayReplica
from skote.runtime.replica import Replica
from skote.types import Completion, EngineSpec, Request

pytestmark = pytest.mark.gpu

DEVICE = "cuda:0"
PAGE = 128
ROWS = 16
WAIT_S = 300.0
SHAPE = {
    "model_type": "llama",
    "vocab_size": 1003,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}


@pytest.fixture
def spec(tmp_path: Path) -> EngineSpec:
    """A small model with drawn weights that batches `ROWS` requests."""
    (tmp_path / "config.json").write_text(json.dumps(SHAPE), encoding="utf-8")
    options = {"local_dir": str(tmp_path), "device": DEVICE, "dtype": "bf16", "random_seed": 3, "max_model_len": 700}
    return EngineSpec("skote.runtime.engine.SkotergyEngine", {**options, "max_batch": ROWS})


def with_options(spec: EngineSpec, **options: Any) -> EngineSpec:
    return EngineSpec(spec.target, {**spec.options, **options})


def requests(count: int, *, head: int = 0, new: int = 40) -> list[Request]:
    """Prompts of 20 to 59 tokens behind `head` tokens that all of them begin with."""
    shared = tuple(7 * position % 1003 for position in range(head))
    return [
        Request(f"r{number}", shared + tuple((number + 3) * each % 1003 for each in range(1, 21 + number % 40)), new,
                ignore_eos=True)
        for number in range(count)
    ]  # fmt: skip


def answers(dispatcher: ReplicaDispatcher, asked: Sequence[Request]) -> list[Completion]:
    return [future.result(WAIT_S) for future in [dispatcher.dispatch(each) for each in asked]]


@pytest.mark.parametrize(("slo_ms", "peak"), [(1e6, ROWS), (1e-6, 1)])
def test_the_guard_lets_as_many_in_as_keep_the_limit(spec: EngineSpec, slo_ms: float, peak: int) -> None:
    with Replica(spec, index=0, device=DEVICE) as replica:
        replica.wait_ready(WAIT_S)
        with ReplicaDispatcher([replica], max_concurrency_per_device=64, tpot_slo_ms=slo_ms) as dispatcher:
            results = answers(dispatcher, requests(4 * ROWS, new=500))
            (counts,) = dispatcher.counts
    assert {each.status for each in results} == {"ok"}
    assert counts.in_flight_peak == peak
    assert counts.slowed > 0


def test_prompts_that_begin_alike_are_computed_once_and_give_the_same_tokens(spec: EngineSpec) -> None:
    asked = requests(24, head=2 * PAGE + 40)
    with Replica(spec, index=0, device=DEVICE) as plain:
        plain.wait_ready(WAIT_S)
        with ReplicaDispatcher([plain], max_concurrency_per_device=64) as dispatcher:
            expected = answers(dispatcher, asked)
            assert dispatcher.loads[0].kept_tokens == 0
    with Replica(with_options(spec, prefix_cache=True), index=0, device=DEVICE) as keeping:
        keeping.wait_ready(WAIT_S)
        with ReplicaDispatcher([keeping], "prefix_aware", max_concurrency_per_device=64) as dispatcher:
            found = [answers(dispatcher, asked) for _ in range(2)]
            kept = dispatcher.loads[0].kept_tokens
    for again in found:
        assert [each.output_ids for each in again] == [each.output_ids for each in expected]
    assert [each.cached_tokens for each in expected] == [None] * 24
    assert found[0][0].cached_tokens == 0
    assert {each.cached_tokens for each in found[0][1:]} == {2 * PAGE}
    assert {each.cached_tokens for each in found[1]} == {2 * PAGE}
    assert kept == 2 * PAGE


def test_a_replica_that_is_killed_comes_back_on_the_same_gpu_and_loses_what_it_had_begun_alone(
    spec: EngineSpec,
) -> None:
    asked = requests(3 * ROWS, new=600)
    begun = threading.Event()
    with Replica(spec, index=0, device=DEVICE) as replica:
        replica.wait_ready(WAIT_S)
        with ReplicaDispatcher([replica], max_concurrency_per_device=64, max_restarts=1) as dispatcher:
            expected = answers(dispatcher, asked)
            futures = [dispatcher.dispatch(asked[0], lambda _: begun.set())]
            futures += [dispatcher.dispatch(each) for each in asked[1:]]
            assert begun.wait(WAIT_S)
            os.kill(replica.pid, signal.SIGKILL)
            results = [future.result(WAIT_S) for future in futures]
            events = [event.what for event in dispatcher.events]
    assert events == ["ended", "restarted"]
    failed = [each for each in results if each.status == "error"]
    assert 1 <= len(failed) <= ROWS
    assert {each.error for each in failed} == {f"Replica 0 ({DEVICE}) was killed by SIGKILL."}
    for result, whole in zip(results, expected, strict=True):
        assert result.status == "error" or result.output_ids == whole.output_ids


LOSING = """
import torch

class Losing:
    # Reads beyond a tensor's end for a request called lose: the device is lost to the process.

    def __init__(self):
        self.ones = torch.ones(4, device="cuda:0")

    def generate(self, requests, emit):
        place = 10**9 if requests[0].request_id == "lose" else 1
        emit(0, (int(self.ones[torch.tensor([place], device="cuda:0")].item()),))
        return ["length"]
"""


def test_a_process_whose_device_is_lost_ends_and_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "losing_on_cuda.py").write_text(LOSING, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    with Replica(EngineSpec("losing_on_cuda.Losing"), index=0, device=DEVICE, log=tmp_path / "log") as replica:
        replica.wait_ready(WAIT_S)
        with ReplicaDispatcher([replica], max_concurrency_per_device=3, max_restarts=1) as dispatcher:
            a, lost, c = answers(dispatcher, [Request(name, (1,), 1) for name in ("a", "lose", "c")])
            events = [event.what for event in dispatcher.events]
    assert [(each.status, each.output_ids) for each in (a, lost, c)] == [("ok", (1,)), ("error", ()), ("ok", (1,))]
    assert str(lost.error).startswith(f"Replica 0 ({DEVICE}) ended with exit code 74")
    assert str(lost.error).endswith("ends with: Its CUDA device is lost to this process, which ends.")
    assert events == ["ended", "restarted"]


def test_ray_actors_share_a_gpu_and_answer_as_a_process_does(spec: EngineSpec) -> None:
    """A bundle of one GPU, which two arms share; one of them is killed, and comes back."""
    pytest.importorskip("ray")
    asked = requests(2 * ROWS)
    with Replica(spec, index=0, device=DEVICE) as replica:
        replica.wait_ready(WAIT_S)
        expected = [each.output_ids for each in replica.generate(asked).result(WAIT_S)]
    with (
        RayCluster(None, [DEVICE]) as cluster,
        RayReplica(cluster, spec, index=0, device=DEVICE) as first,
        RayReplica(cluster, spec, index=0, device=DEVICE) as second,
    ):
        for arm in (first, second):
            arm.wait_ready(WAIT_S)
            assert (arm.rows, arm.here) == (ROWS, True)
            with ReplicaDispatcher([arm], max_concurrency_per_device=64, max_restarts=1) as dispatcher:
                assert [each.output_ids for each in answers(dispatcher, asked)] == expected
                if arm is second:
                    os.kill(arm.pid, signal.SIGKILL)
                    broken = answers(dispatcher, asked)  # some may have been sent before the end is known
                    assert {each.output_ids for each in broken if each.status == "ok"} <= set(expected)
                    assert [each.output_ids for each in answers(dispatcher, asked)] == expected
                    assert [event.what for event in dispatcher.events] == ["ended", "restarted"]
