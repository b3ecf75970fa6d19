"""Whole runs of an engine that works past its last token, and of honest ones whose rows wait for their batch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
RUN = HERE.parent.parent / "run.py"


def run(directory, *overrides):
    """Exit code and findings of a run of `overrides`."""
    command = [sys.executable, RUN, "model=tiny_shape", "report=none", *overrides, f"hydra.run.dir={directory}"]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": str(HERE)}, capture_output=True, check=False)
    return done.returncode, json.loads((directory / "metrics.json").read_text(encoding="utf-8"))["findings"]


@pytest.mark.slow
def test_work_after_the_last_token_is_invalid(tmp_path):
    size = ("workload.blocks=2", "workload.requests_per_block=3", "workload.max_new_tokens=4", "engine.compile=false")
    code, findings = run(tmp_path, "engine._target_=cheats.LateEngine", "measure.harness_overhead=false", *size)

    assert code == 2
    assert [each["code"] for each in findings if each["severity"] == "invalid"] == ["late_hand_back"]
    [finding] = [each for each in findings if each["code"] == "late_hand_back"]
    assert finding["observed"] >= 50
    assert "Answers of the candidate arm came back" in finding["sentence"]


@pytest.mark.slow
def test_rows_that_wait_for_the_longest_of_their_batch_are_not_late(tmp_path):
    """Eight rows a launch, of 4 to 16 tokens, 3 ms apart: the first ones are handed back 36 ms after they ended."""
    batched = ("router.microbatch_window_ms=20", "workload=mixed_burst", "workload.max_new_tokens=16")
    simulated = ("engine=simulated", "+engine.token_ms=3", "compare=none", "measure.harness_overhead=false")
    code, findings = run(tmp_path, *simulated, *batched, "workload.blocks=2", "workload.requests_per_block=16")

    assert code == 0
    assert "late_hand_back" not in [each["code"] for each in findings]
