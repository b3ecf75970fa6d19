"""Runs that are checked, repeated, killed and gone on with, through the command line."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pandas as pd
import pytest

from skote.eval.record import file_hashes
from skote.eval.report import main as report
from skote.eval.report import render_run
from skote.eval.runner import main
from skote.eval.sweep import Sweep

HERE = Path(__file__).parent
RUN = HERE.parent.parent / "run.py"
SMALL = (
    "model=tiny_shape", "engine=simulated", "compare=simulated", "measure.harness_overhead=false", "workload.blocks=5",
    "workload.requests_per_block=2", "workload.max_new_tokens=4",
)  # fmt: skip
FASTER = ("+engine.prefill_ms=3", "+engine.token_ms=3", "+compare.prefill_ms=9", "+compare.token_ms=9")

WORKLOAD = """
name: mine
blocks: 1
requests_per_block: 2
max_new_tokens: {tokens}
prompts: short
"""


def start(cwd, *overrides):
    environment = {key: value for key, value in os.environ.items() if key != "GITHUB_STEP_SUMMARY"}
    return subprocess.Popen(
        [sys.executable, RUN, *overrides], cwd=cwd, env=environment | {"PYTHONPATH": str(HERE)}, text=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def run(cwd, *overrides):
    process = start(cwd, *overrides)
    out, err = process.communicate()
    return process.returncode, out, err


def read(path):
    return json.loads(path.read_text(encoding="utf-8"))


@contextlib.contextmanager
def stalled(cwd, *overrides):
    """A run that has come to its stalling request, and is killed there: by SIGKILL, as by a machine out of memory."""
    pipe = cwd / "pipe"
    os.mkfifo(pipe)
    reading = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    process = start(cwd, *overrides, "engine._target_=stalled.StalledEngine", f"+engine.pipe={pipe}")
    try:
        assert select.select([reading], [], [], 60) == ([reading], [], [])
        yield
    finally:
        os.close(reading)
        process.send_signal(signal.SIGKILL)
        process.communicate()


def await_text(path, text):
    """Until `path` holds `text`: a request may begin before the one before it is noted."""
    deadline = time.monotonic() + 60
    while not (path.exists() and text in path.read_text(encoding="utf-8")):
        assert time.monotonic() < deadline
        os.sched_yield()


@pytest.mark.slow
def test_a_gate_ends_with_the_code_of_its_limits_and_a_reproduction_with_that_of_its_own(tmp_path):
    code, _, err = run(tmp_path, *SMALL, *FASTER, "check=ci", "check.p50_delta_max=-90", "hydra.run.dir=run")
    assert (code, err) == (1, "")
    metrics = read(tmp_path / "run" / "metrics.json")
    assert [check["name"] for check in metrics["checks"] if check["outcome"] == "failed"] == ["p50_delta_max"]
    assert {"junit.xml", "summary.md"} <= {path.name for path in (tmp_path / "run").iterdir()}
    assert not (tmp_path / "run" / "unflushed.jsonl").exists()
    with pytest.raises(SystemExit) as ended:
        report(["verify", str(tmp_path / "run")])
    assert ended.value.code == 0

    code, _, err = run(tmp_path, "check=reproduce", "against=run", "hydra.run.dir=again")
    again = read(tmp_path / "again" / "metrics.json")
    outcomes = {check["name"]: check["outcome"] for check in again["checks"]}
    ratio = outcomes.pop("ratio")  # what a few requests of some milliseconds tell is up to the machine's noise
    assert (code, err) == ({"passed": 0, "inconclusive": 3, "failed": 1}[ratio], "")
    assert outcomes == {"workload": "passed", "weights": "skipped", "outputs": "passed"}
    assert read(tmp_path / "again" / "manifest.json")["config"]["engine"]["token_ms"] == 3


@pytest.mark.slow
def test_a_killed_run_leaves_what_had_finished(tmp_path):
    directory = tmp_path / "run"
    with stalled(tmp_path, *SMALL, "compare=none", "+engine.stall_after=14", "hydra.run.dir=run"):
        await_text(directory / "unflushed.jsonl", "b01-r00")
    written = pd.read_parquet(directory / "requests.parquet")
    assert list(written[written.phase == "measure"].request_id) == ["b00-r00", "b00-r01"]
    assert read(directory / "manifest.json")["status"] == "interrupted"
    assert len(read(directory / "manifest.json")["passes"]) == 1

    with pytest.raises(SystemExit) as ended:
        report([str(directory)])
    assert ended.value.code == 0
    recovered = pd.read_parquet(directory / "requests.parquet")
    assert list(recovered[recovered.phase == "measure"].request_id) == ["b00-r00", "b00-r01", "b01-r00"]
    assert read(directory / "metrics.json")["arms"]["candidate"]["requests"]["ok"] == 3


@pytest.mark.slow
def test_a_sweep_that_was_killed_goes_on(tmp_path):
    """Of four jobs two fail as their engine is built; the one that is killed is the last of the others."""
    sweep = tmp_path / "sweep"
    command = (
        "-m", *SMALL, "compare=none", "+engine.token_ms=0,-1", "+engine.stall_after=999,6", "seed=0",
        "hydra.sweep.dir=sweep",
    )  # fmt: skip
    with stalled(tmp_path, *command):
        pass
    cells = {cell["directory"]: cell for cell in read(sweep / "sweep.json")["cells"]}
    assert list(cells) == ["3", "0", "1", "2"]
    assert (cells["0"]["state"], cells["0"]["exit_code"]) == ("done", 0)
    assert cells["1"]["state"] == "waiting"
    kept = (sweep / "0" / "manifest.json").read_bytes()
    (tmp_path / "pipe").unlink()  # the engine makes it a file, and does not wait any more

    code, out, err = run(tmp_path, "resume=sweep")
    assert code == 4
    assert [line.partition(" needs ")[0] for line in err.splitlines()] == ["skote-eval: The simulated engine"] * 2
    assert f"Done before: {sweep / '0'}" in out
    assert "job 2: exit 4: The simulated engine needs" in out
    assert (sweep / "0" / "manifest.json").read_bytes() == kept
    states = {cell["directory"]: cell["state"] for cell in read(sweep / "sweep.json")["cells"]}
    assert states == {"0": "done", "1": "done", "2": "failed", "3": "failed"}
    assert list(read(sweep / "sweep.json")) == ["arguments", "cells", "schema_version", "seed"]
    assert (sweep / "comparison.html").exists()
    assert {path.name for path in tmp_path.iterdir()} == {"pipe", "sweep"}


@pytest.mark.slow
def test_a_job_whose_configuration_has_changed_runs_again(tmp_path):
    (tmp_path / "own" / "workload").mkdir(parents=True)
    (tmp_path / "own" / "workload" / "mine.yaml").write_text(WORKLOAD.format(tokens=3))
    code, _, _ = run(
        tmp_path, "-m", "-cd", "own", "workload=mine", "model=tiny_shape", "engine=simulated", "compare=none",
        "measure.harness_overhead=false", "hydra.sweep.dir=sweep",
    )  # fmt: skip
    assert code == 0
    (tmp_path / "own" / "workload" / "mine.yaml").write_text(WORKLOAD.format(tokens=4))
    code, out, _ = run(tmp_path, "resume=sweep")
    assert (code, out.count("Done before")) == (0, 0)
    assert set(pd.read_parquet(tmp_path / "sweep" / "0" / "requests.parquet").output_tokens) == {4}


def test_another_command_is_not_what_is_resumed(tmp_path, monkeypatch, capsys):
    Sweep(tmp_path, ["-m", "seed=1,2", "hydra.sweep.dir=x"], 0, []).write()
    monkeypatch.setattr(sys, "argv", ["run.py", "-m", "seed=1,3", f"resume={tmp_path}"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 4
    assert "whose command was '-m seed=1,2': repeat that, or give resume=DIR alone" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda m: m.update(run_id="other"), "against=run is not the directory of a run: run holds the requests of"),
        (
            lambda m: m["files"].update({"tokens.parquet": "00" * 32}),
            "is not as it was left: tokens.parquet: SHA-256 is",
        ),
        (lambda m: m["machine"].update(host="elsewhere"), "is not as it was left: manifest_sha256: metrics.json says"),
        (None, "against=run cannot be verified: run/metrics.json cannot be read: No such file or directory."),
    ],
)
def test_a_run_that_was_edited_is_not_repeated(synthetic, tmp_path, monkeypatch, capsys, change, said):
    directory = synthetic(requests=2, blocks=2).write()
    manifest = read(directory / "manifest.json")
    manifest["files"] = file_hashes(directory)
    (directory / "manifest.json").write_text(json.dumps(manifest))
    if change is not None:
        render_run(directory)
        change(manifest)
        (directory / "manifest.json").write_text(json.dumps(manifest))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["run.py", "check=reproduce", "against=run", "hydra.run.dir=again"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 4
    assert said in capsys.readouterr().err
