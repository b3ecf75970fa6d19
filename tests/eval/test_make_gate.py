"""`make gate`, which CI runs: its real engines are held to a limit on latency."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parent.parent


def commands() -> list[list[str]]:
    """The overrides of each run of `make gate`."""
    said = subprocess.run(["make", "-n", "gate"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    lines = said.replace("\\\n", " ").splitlines()
    return [shlex.split(line)[2:] for line in lines if "run.py" in line]


def test_one_run_has_real_engines_and_every_limit_that_a_machine_does_not_change():
    real, simulated = commands()

    assert not any(each.startswith(("engine=", "compare=")) for each in real)
    assert "check.ratio_to_baseline_max=4" in real
    assert {"engine=simulated", "compare=simulated"} <= set(simulated)
    assert not any(each.endswith("=null") for each in simulated)


@pytest.mark.slow
def test_a_tenfold_slowdown_of_ours_fails(tmp_path):
    real, _ = commands()
    # Fewer blocks than the gate's, which has to be sure of less than ten times.
    same = [each for each in real if not each.startswith("workload.blocks=")]
    overrides = [*same, "workload.blocks=6", "engine._target_=slowed.SlowedEngine", "hydra.run.dir=run"]
    done = subprocess.run(
        [sys.executable, ROOT / "run.py", *overrides], cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(HERE)},
        stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
    )  # fmt: skip

    # A machine whose noise hit one arm alone makes it 2: the limits failed all the same.
    assert done.returncode in (1, 2), done.stdout
    assert done.stderr == ""
    checks = json.loads((tmp_path / "run" / "metrics.json").read_text(encoding="utf-8"))["checks"]
    assert {check["name"]: check["outcome"] for check in checks} == {
        "parity": "passed",
        "error_rate_max": "passed",
        "ratio_to_baseline_max.e2el": "failed",
        "ratio_to_baseline_max.ttft": "failed",
        "ratio_to_baseline_max.tpot": "failed",
    }
