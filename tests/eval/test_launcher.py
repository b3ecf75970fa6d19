"""Sweeps whose jobs another launcher of Hydra's runs, each in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from skote.eval.turn import machine_turn

ROOT = Path(__file__).parent.parent.parent


def test_one_is_within_at_a_time(tmp_path: Path) -> None:
    order: list[str] = []
    entered = threading.Event()

    def second() -> None:
        with machine_turn(tmp_path):
            order.append("second")

    thread = threading.Thread(target=second)
    with machine_turn(tmp_path):
        thread.start()
        entered.wait(0.1)  # time in which it could come too early
        order.append("first")
    thread.join(10)
    assert order == ["first", "second"]


def sweep(directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable, "run.py", "-m", "hydra/launcher=joblib", "hydra.launcher.n_jobs=2", "model=tiny_shape",
        "engine=simulated", "compare=none", "workload.max_new_tokens=3", "measure.harness_overhead=false",
        f"hydra.sweep.dir={directory}", *arguments,
    ]  # fmt: skip
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_the_jobs_of_a_launched_sweep_are_runs_that_took_turns(tmp_path: Path) -> None:
    pytest.importorskip("hydra_plugins.hydra_joblib_launcher")
    done = sweep(tmp_path, "workload.blocks=1", "workload.requests_per_block=2,3")
    assert (done.returncode, done.stderr) == (0, "")
    manifests = [json.loads((tmp_path / job / "manifest.json").read_text(encoding="utf-8")) for job in "01"]
    assert [each["status"] for each in manifests] == ["complete", "complete"]
    assert [each["config"]["workload"]["requests_per_block"] for each in manifests] == [2, 3]
    assert all(each["command"].startswith("run.py -m hydra/launcher=joblib ") for each in manifests)
    spans = sorted(
        (each["clock"]["monotonic_ns"], max(measured["end_ns"] for measured in each["passes"])) for each in manifests
    )
    assert spans[0][1] < spans[1][0]


@pytest.mark.slow
def test_a_job_that_fails_gives_the_sweep_its_code_and_the_others_run(tmp_path: Path) -> None:
    pytest.importorskip("hydra_plugins.hydra_joblib_launcher")
    done = sweep(tmp_path, "workload.blocks=0,1", "workload.requests_per_block=2")
    assert done.returncode == 4
    *_, said = done.stderr.splitlines()
    assert said == f"skote-eval: The job in {tmp_path}/0 ended with exit code 4: its run.log and its report say why."
    assert "workload.blocks must be at least 1, got 0." in done.stderr
    assert json.loads((tmp_path / "1" / "manifest.json").read_text(encoding="utf-8"))["status"] == "complete"
