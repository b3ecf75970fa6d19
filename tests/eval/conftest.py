"""Runs made of numbers that a test chooses, written through the record's own writer."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

from skote.eval.record import RowKey, RunWriter, ids_sha256
from skote.eval.runner import main
from skote.types import Chunk, Completion

MS = 1_000_000
WORKLOAD_SHA = "5b" * 32

Arm = Literal["candidate", "baseline"]


@dataclass
class Timeline:
    """What one request does, in ms after it was dispatched: admitted, first token, the gaps that follow."""

    admitted: float
    first: float
    gaps: list[float]
    ok: bool = True
    output: tuple[int, ...] | None = None
    tokens_per_chunk: int = 1


@dataclass
class Synthetic:
    """Builds a run's directory: blocks of requests through one arm or two, one after the other in each pass."""

    directory: Path
    seed: int = 7
    blocks: int = 6
    requests: int = 12
    tokens: int = 16
    arms: dict[Arm, str] = field(default_factory=lambda: {"candidate": "skotergy", "baseline": "baseline"})
    concurrency: int = 1
    manifest: dict[str, Any] = field(default_factory=dict)

    def write(self, timeline: Callable[[Arm, int, int], Timeline] | None = None) -> Path:
        """Write parquet files and manifest; `timeline(arm, block, request)` chooses what happens."""
        self.directory.mkdir(parents=True, exist_ok=True)
        rng = np.random.default_rng(self.seed)
        choose = timeline or (lambda arm, block, request: self._plausible(rng, arm))
        writer = RunWriter(self.directory, self.directory.name, WORKLOAD_SHA)
        now = 5_000_000 * MS
        passes = []
        for block in range(-1, self.blocks):
            order = list(self.arms) if block % 2 == 0 else list(reversed(self.arms))
            for round_, arm in enumerate(order):
                key = RowKey(arm, self.arms[arm], max(block, 0), round_, "warmup" if block < 0 else "measure")
                start = now
                free = [now] * self.concurrency
                for request in range(self.requests):
                    slot = int(np.argmin(free))
                    completion = self._completion(free[slot], request, choose(arm, block, request), slot)
                    writer.add(key, free[slot], completion)
                    free[slot] = completion.end_ns
                now = max(free) + 50 * MS
                passes.append(
                    {
                        "arm": arm,
                        "block": key.block,
                        "round": round_,
                        "phase": key.phase,
                        "start_ns": start,
                        "end_ns": now,
                        "foreign_cpu_share": 0.01,
                        "steal_share": None,
                    }
                )
        writer.flush()
        manifest = self._manifest(passes) | self.manifest
        (self.directory / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
        return self.directory

    def output(self, request: int) -> tuple[int, ...]:
        """The token ids that both arms give for a request."""
        return tuple(range(request, request + self.tokens))

    def _plausible(self, rng: np.random.Generator, arm: Arm) -> Timeline:
        step, first = (39.0, 140.0) if arm == "candidate" else (104.0, 165.0)
        gaps = step * np.exp(rng.normal(0.0, 0.05, self.tokens - 1))
        return Timeline(0.2, first * float(np.exp(rng.normal(0.0, 0.15))), [float(gap) for gap in gaps])

    def _completion(self, dispatched: int, request: int, timeline: Timeline, replica: int) -> Completion:
        stamps = dispatched + MS * np.cumsum([timeline.first, *timeline.gaps])
        output = timeline.output or self.output(request)
        size = timeline.tokens_per_chunk
        chunks = tuple(Chunk(int(stamp), size) for stamp in stamps) if timeline.ok else ()
        last = chunks[-1].t_ns if chunks else dispatched + 5 * MS
        return Completion(
            request_id=f"chat-{request:02d}",
            input_tokens=40 + request,
            output_ids=output if timeline.ok else (),
            chunks=chunks,
            dispatched_ns=dispatched,
            admitted_ns=int(dispatched + timeline.admitted * MS) if timeline.ok else None,
            end_ns=last + MS // 2,
            status="ok" if timeline.ok else "error",
            finish_reason="length" if timeline.ok else None,
            error=None if timeline.ok else "The replica on cpu ended.",
            replica=replica,
        )

    def _manifest(self, passes: list[dict[str, Any]]) -> dict[str, Any]:
        ids = [f"chat-{request:02d}" for request in range(self.requests)]
        outputs = {name: ids_sha256(self.output(request)) for request, name in enumerate(ids)}
        both = len(self.arms) == 2
        parity = {
            "mode": "token_equal",
            "passed": True,
            "compared": self.requests,
            "equal": self.requests,
            "agreement": 1.0,
            "near_ties": 0,
            "divergences": [],
            "kl_ratio": None,
            "nll_ratio": None,
            "limit": None,
            "sentence": f"All {self.requests} prompts give the same tokens in both arms.",
            "outputs": dict.fromkeys(self.arms, outputs),
        }
        infos = {
            "skotergy": {
                "tier": 1,
                "tier_reason": "LlamaForCausalLM has an adapter",
                "compile_s": 11.4,
                "paths": {"rms_norm": {"reference": 61 * 16, "triton": 0}, "attention": {"static": 480}},
                "step_kernels": [
                    {"kernel": "gate_up_gemv_kernel", "calls": 30, "us": 150.0},
                    {"kernel": "flash_decode_kernel", "calls": 30, "us": 50.0},
                ],
            },
            "baseline": {
                "tier": 3,
                "tier_reason": "Transformers eager is the reference",
                "compile_s": None,
                "paths": {},
            },
        }
        return {
            "schema_version": 1,
            "run_id": self.directory.name,
            "status": "complete",
            "error": None,
            "started": "2026-03-02T10:00:00+00:00",
            "finished": "2026-03-02T10:04:31+00:00",
            "clock": {"wall_ns": 1_772_445_600 * 10**9, "monotonic_ns": 4_990_000 * MS},
            "command": "python run.py workload=chat",
            "overrides": ["workload=chat"],
            "config": {
                "model": {"name": "smollm2_135m", "path": None},
                "dtype": "fp32",
                "measure": {"blocks": self.blocks},
                "workload": {"name": "chat", "prompts": ["a", "b"]},
            },
            "machine": {
                "host": "bench-01",
                "system": "Linux 6.8",
                "cpu": "AMD EPYC 7B13",
                "cores": 2,
                "memory_bytes": 8 * 2**30,
                "accelerators": [],
                "python": "3.11.9",
                "packages": {"torch": "2.13.0", "transformers": "5.24.0", "skotergy": "2.0.0"},
                "git": {"commit": "f82e541aa0c8e77c3f1f4b9a5d8c6e7f80912345", "dirty": False, "dirty_sha256": None},
            },
            "model": {
                "name": "SmolLM2-135M-Instruct",
                "path": "models/smollm2-135m-instruct",
                "parameters": 134_515_008,
                "bytes_per_token": 538_060_032,
                "kv_bytes_per_token": 46_080,
                "tokenizer_sha256": "ab" * 32,
                "weights_sha256": "cd" * 32,
            },
            "dtype": "fp32",
            "seed": self.seed,
            "workload": {
                "name": "chat",
                "sha256": WORKLOAD_SHA,
                "load": "closed",
                "concurrency": self.concurrency,
                "blocks": self.blocks,
                "requests_per_block": self.requests,
                "max_new_tokens": self.tokens,
                "greedy": True,
                "respect_eos": False,
            },
            "devices": ["cpu"],
            "arms": {
                arm: {
                    "engine": engine,
                    "replicas": [
                        {
                            "device": "cpu",
                            "load_s": 1.9,
                            "warmup_s": 4.2,
                            "peak_memory_bytes": 900 * 2**20,
                            "info": infos[engine] | {"weights_fingerprint": "ef" * 32, "notes": []},
                        }
                    ],
                }
                for arm, engine in self.arms.items()
            },
            "requested_tokens": dict.fromkeys(ids, self.tokens),
            "parity": parity if both else None,
            "harness": {"us_per_token": 21.3, "ms_per_request": 0.31, "requests": 64, "tokens": 1024},
            "roofline": {"device": "cpu", "read_bandwidth_bytes_per_s": 2e10},
            "passes": passes,
        }


@pytest.fixture
def synthetic(tmp_path: Path) -> Callable[..., Synthetic]:
    """`synthetic(blocks=3, ...)` is a builder of a run in a folder of its own."""
    return partial(Synthetic, tmp_path / "run")


@pytest.fixture
def timeline() -> type[Timeline]:
    """What one request of a synthetic run does."""
    return Timeline


@pytest.fixture
def command(monkeypatch, tmp_path, capfd):
    """Runs the command in this process: what ends before an engine starts need not pay for a new one."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level

    def call(*overrides):
        monkeypatch.setattr(sys, "argv", ["run.py", *overrides])
        monkeypatch.chdir(tmp_path)
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capfd.readouterr()
        return ended.value.code, out, err

    yield call
    for handler in set(root.handlers) - set(handlers):
        handler.close()
    root.handlers[:], root.level = handlers, level
