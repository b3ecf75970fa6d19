"""Whole runs whose timed outputs are sampled."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
SAMPLED = (
    "model=tiny_shape", "engine.compile=false", "measure.harness_overhead=false", "workload.blocks=2",
    "workload.requests_per_block=3", "workload.max_new_tokens=16", "workload.temperature=1", "hydra.run.dir=run",
)  # fmt: skip


def run(cwd, *overrides):
    """The exit code of a run with this folder's engines on the path, its manifest, and the codes of its findings."""
    done = subprocess.run(
        [sys.executable, HERE.parent.parent / "run.py", *SAMPLED, *overrides], cwd=cwd, text=True, check=False,
        env=os.environ | {"PYTHONPATH": str(HERE)}, stdin=subprocess.DEVNULL, capture_output=True,
    )  # fmt: skip
    assert done.stderr == ""
    manifest, metrics = (
        json.loads((cwd / "run" / name).read_text(encoding="utf-8")) for name in ("manifest.json", "metrics.json")
    )
    return done.returncode, manifest, {finding["code"] for finding in metrics["findings"]}


@pytest.mark.slow
@pytest.mark.parametrize("options", [["dtype=fp32"], ["dtype=bf16", "workload.top_k=50", "workload.top_p=0.9"]])
def test_an_honest_engine_that_samples_is_valid(tmp_path, options):
    code, manifest, codes = run(tmp_path, *options)

    assert "sampled_outputs" not in codes
    judged = manifest["parity"]["sampled"]
    assert {arm: (each["passed"], each["tokens"]) for arm, each in judged.items()} == {
        "candidate": (True, 96),
        "baseline": (True, 96),
    }
    assert manifest["parity"]["passed"]
    assert code == 0


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_an_engine_that_is_honest_where_greedy_alone_is_invalid(tmp_path, dtype):
    code, manifest, codes = run(tmp_path, f"dtype={dtype}", "engine._target_=cheats.StaleEngine")

    assert code == 2
    assert {"sampled_outputs", "parity_failed"} <= codes
    judged = manifest["parity"]["sampled"]
    assert (judged["candidate"]["passed"], judged["baseline"]["passed"]) == (False, True)
