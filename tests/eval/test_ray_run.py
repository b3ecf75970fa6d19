"""A whole run whose replicas are Ray actors, from the command line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.slow
def test_a_run_starts_its_own_ray_and_ends_it(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    before = set(psutil.pids())
    command = [
        sys.executable, "run.py", "model=tiny_shape", "engine=simulated", "compare=simulated", "devices=2",
        "router/backend=ray", "router=least_work", "workload.blocks=1", "workload.requests_per_block=4",
        "workload.max_new_tokens=3", "measure.harness_overhead=false", f"hydra.run.dir={tmp_path}",
    ]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    manifest = json.loads((tmp_path / "manifest.json").read_text(encoding="utf-8"))
    assert manifest["status"] == "complete"
    assert manifest["config"]["router"]["backend"] == {"name": "ray", "address": None}
    assert [each["cache_probe"] for each in manifest["passes"]] == [None, None]  # tokens are told with the end alone
    for arm in ("candidate", "baseline"):
        replicas = manifest["arms"][arm]["replicas"]
        assert [each["node"] for each in replicas] == [os.uname().nodename] * 2
        assert [each["clock"] for each in replicas] == [None, None]
        assert (tmp_path / f"{arm}-1.log").exists()
    left = [each.name() for each in psutil.process_iter() if each.pid not in before]
    assert not [name for name in left if name in ("raylet", "gcs_server")]


def test_without_ray_a_run_is_refused_with_exit_4(tmp_path: Path) -> None:
    code = "import sys; sys.modules['ray'] = None; from skote.eval.runner import main; main()"
    arguments = ["model=tiny_shape", "router/backend=ray", f"hydra.run.dir={tmp_path}"]
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (4, "")
    sentence = 'skote-eval: router/backend=ray needs Ray, which is an extra: pip install "skotergy[ray]".\n'
    assert done.stderr == sentence
