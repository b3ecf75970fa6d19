"""Whole runs, through the command line."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import select
import signal
import subprocess
import sys
from pathlib import Path

import pandas as pd
import psutil
import pytest

from skote.eval.record import RunWriter
from skote.runtime import capacity

HERE = Path(__file__).parent
RUN = HERE.parent.parent / "run.py"
FILES = {"requests.parquet", "tokens.parquet", "manifest.json", "metrics.json", "report.html", "run.log", ".hydra"}
TINY = ("model=tiny_shape", "engine.compile=false", "measure.harness_overhead=false")
SIMULATED = ("model=tiny_shape", "engine=simulated", "compare=none", "measure.harness_overhead=false")
SHORT = ("workload.blocks=2", "workload.requests_per_block=3", "workload.max_new_tokens=4")


def start(cwd, *overrides, **options):
    """`python run.py`, with this folder's engines on the path."""
    environment = os.environ | {"PYTHONPATH": str(HERE)}
    return subprocess.Popen(
        [sys.executable, RUN, *overrides], cwd=cwd, env=environment, text=True, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options,
    )  # fmt: skip


def run(cwd, *overrides, **options):
    process = start(cwd, *overrides, **options)
    out, err = process.communicate()
    return process.returncode, out, err


def manifest_of(directory):
    return json.loads((directory / "manifest.json").read_text(encoding="utf-8"))


@pytest.mark.slow
def test_two_arms_end_in_a_report_with_all_its_files(tmp_path):
    code, out, err = run(tmp_path, *TINY, *SHORT, "hydra.run.dir=run")
    assert (code, err) == (0, "")
    assert out.splitlines()[-1].endswith("run/report.html")
    directory = tmp_path / "run"
    assert {path.name for path in directory.iterdir()} >= FILES
    manifest = manifest_of(directory)
    assert manifest["status"] == "complete"
    assert manifest["parity"]["passed"]
    assert set(manifest["arms"]) == {"candidate", "baseline"}
    assert manifest["model"]["weights_sha256"]
    assert manifest["roofline"]["device"] == "cpu"
    assert manifest["roofline"]["read_bandwidth_bytes_per_s"] > 1e8
    assert manifest["roofline"]["matmul_peak_flops_per_s"] > 1e8
    assert manifest["model"]["prefill_flops"]["per_token"] > 0
    assert manifest["telemetry"]["error"] is None
    stamps = pd.read_parquet(directory / "telemetry.parquet")["t_ns"]
    assert stamps.min() <= manifest["passes"][0]["start_ns"] + 1e8
    assert stamps.max() >= manifest["passes"][-1]["end_ns"]
    assert [arm["replicas"][0]["info"]["step_kernels"] for arm in manifest["arms"].values()] == [[], []]
    rows = pd.read_parquet(directory / "requests.parquet")
    measured = rows[rows.phase == "measure"]
    assert measured.groupby("arm").size().to_dict() == {"candidate": 6, "baseline": 6}
    assert (measured.output_tokens == 4).all()
    assert measured.groupby("request_id").output_sha256.nunique().eq(1).all()
    assert manifest["config"]["workload"]["max_new_tokens"] == 4
    assert json.loads((directory / "metrics.json").read_text(encoding="utf-8"))["exit_code"] == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("engine", "dtype"),
    [
        ("SkipPrefillEngine", "fp32"),
        ("SkipPrefillEngine", "bf16"),
        ("MadeUpEngine", "bf16"),
        ("EchoEngine", "fp32"),
        ("EchoEngine", "bf16"),
    ],
)
def test_an_engine_that_cheats_is_invalid(tmp_path, engine, dtype):
    overrides = (f"dtype={dtype}", f"engine._target_=cheats.{engine}")
    code, _, err = run(tmp_path, *TINY, *SHORT, *overrides, "hydra.run.dir=run")
    assert (code, err) == (2, "")
    assert not manifest_of(tmp_path / "run")["parity"]["passed"]
    assert "INVALID" in (tmp_path / "run" / "report.html").read_text(encoding="utf-8")


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_an_engine_of_another_vocabulary_is_invalid_and_told_apart_from_the_baseline(tmp_path, dtype):
    """The simulated engine answers with up to 49,152 tokens, and the baseline that has to judge them knows 512."""
    two_arms = ("engine=simulated", "compare=baseline", "model=tiny_shape", "measure.harness_overhead=false")
    code, _, err = run(tmp_path, *two_arms, *SHORT, f"dtype={dtype}", "hydra.run.dir=run")
    assert (code, err) == (2, "")
    metrics = json.loads((tmp_path / "run" / "metrics.json").read_text(encoding="utf-8"))
    [finding] = [each for each in metrics["findings"] if each["code"] == "parity_failed"]
    assert finding["sentence"].startswith("Parity failed: The candidate answered request p00 with token ")


def test_requests_that_failed_are_told_on_the_terminal_with_the_place_of_the_others(tmp_path):
    """Engines see a count for an id: 0 is the warm-up of the only shape, 2 and 3 are measured."""
    one_shape = ("workload.prompts=sentences", "workload.prompt_tokens=20")
    code, out, err = run(tmp_path, *SIMULATED, *SHORT, *one_shape, '+engine.fail_on=["2","3"]', "hydra.run.dir=run")
    assert (code, err) == (1, "")
    [line] = [each for each in out.splitlines() if "requests failed" in each]
    assert line.startswith("2 of 6 requests failed in the candidate arm, first b00-r01 (The simulated engine was told")
    assert line.endswith(f"Each one's error is in {tmp_path}/run/requests.parquet.")


@pytest.mark.slow
def test_two_replicas_are_compared_with_one_in_the_same_run(tmp_path):
    """4 requests at once of 5 + 3 x 5 ms each: 80 ms for one replica, 40 for two."""
    two_arms = ("engine=simulated", "compare=simulated", "model=tiny_shape", "measure.harness_overhead=false")
    speed = [f"+{arm}.{delay}_ms=5" for arm in ("engine", "compare") for delay in ("prefill", "token")]
    load = ("workload=burst16x64", "workload.requests_per_block=4", "workload.max_new_tokens=4", "workload.blocks=6")
    devices = ("devices=[cpu,cpu]", "other.devices=cpu")
    code, _, err = run(tmp_path, *two_arms, *speed, *load, *devices, "hydra.run.dir=run")
    assert (code, err) in ((0, ""), (2, ""))  # 2 where others take the cores of one arm alone
    metrics = json.loads((tmp_path / "run" / "metrics.json").read_text(encoding="utf-8"))
    assert [len(arm["by_replica"]) for arm in (metrics["arms"]["candidate"], metrics["arms"]["baseline"])] == [2, 0]
    assert {arm: content["requests"]["ok"] for arm, content in metrics["arms"].items()} == {
        "candidate": 24,
        "baseline": 24,
    }
    assert metrics["parity"]["passed"]
    assert "arms_differ" in {finding["code"] for finding in metrics["findings"]}
    assert "simulated (2 × cpu) against simulated (cpu)" in (tmp_path / "run" / "report.html").read_text(
        encoding="utf-8"
    )


@pytest.mark.slow
def test_an_honest_engine_in_bf16_is_valid(tmp_path):
    code, _, err = run(tmp_path, *TINY, "workload.blocks=3", "dtype=bf16", "hydra.run.dir=run")
    assert (code, err) == (0, "")
    assert manifest_of(tmp_path / "run")["parity"]["passed"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("engine", "asked"), [("baseline", ["compare=none"]), ("baseline", []), ("simulated", [])], ids=str
)
def test_what_has_nothing_to_be_compared_with_is_one_arm(tmp_path, engine, asked):
    overrides = ("model=tiny_shape", "measure.harness_overhead=false", f"engine={engine}", *asked)
    code, _, err = run(tmp_path, *overrides, *SHORT, "hydra.run.dir=run")
    assert (code, err) == (0, "")
    assert list(manifest_of(tmp_path / "run")["arms"]) == ["candidate"]
    assert set(pd.read_parquet(tmp_path / "run" / "requests.parquet").engine) == {engine}


@pytest.mark.slow
def test_the_report_of_a_stand_in_says_what_it_stands_for(tmp_path):
    folder = tmp_path / "own"
    folder.mkdir()
    (folder / "small.yaml").write_text("defaults: [config, override model: tiny_shape, override engine: simulated]\n")
    (folder / "big.yaml").write_text("defaults: [config, _self_]\ndevices: 99\ninstead: small\n")
    alone = ("compare=none", "measure.harness_overhead=false", *SHORT)
    code, _, err = run(tmp_path, "-cd", "own", "-cn", "big", *alone, "hydra.run.dir=run")
    assert (code, err) == (0, "")
    assert manifest_of(tmp_path / "run")["stands_for"]["experiment"] == "big"
    page = (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    assert "of the 99 accelerator(s) that big asks for: small.yaml runs instead." in page


def test_an_option_that_an_engine_refuses_is_told_before_the_harness_is_measured(tmp_path):
    code, out, err = run(tmp_path, "model=tiny_shape", "engine=simulated", "+engine.token_ms=-1", "hydra.run.dir=run")
    assert code == 4
    assert "no delay or fail_after below 0" in err
    assert "Loading simulated" in out
    assert "harness" not in out


@pytest.mark.slow
def test_a_sweep_ends_in_one_comparison(tmp_path):
    code, out, err = run(tmp_path, "-m", *SIMULATED, *SHORT, "+engine.token_ms=0,2", "hydra.sweep.dir=sweep")
    assert (code, err) == (0, "")
    assert out.splitlines()[-1].endswith("sweep/comparison.html")
    assert all({path.name for path in (tmp_path / "sweep" / job).iterdir()} >= FILES for job in "01")


@pytest.mark.slow
def test_a_sweep_goes_on_after_a_job_that_failed(tmp_path):
    code, out, err = run(tmp_path, "-m", *SIMULATED, *SHORT, "+engine.token_ms=-1,0", "hydra.sweep.dir=sweep")
    assert code == 4
    assert len(err.splitlines()) == 1
    assert "The simulated engine needs a vocabulary, and no delay" in err
    assert manifest_of(tmp_path / "sweep" / "1")["status"] == "complete"
    assert out.splitlines()[-1].endswith("sweep/comparison.html")


def test_a_sweep_with_a_job_that_cannot_run_is_refused_before_its_first(command, tmp_path):
    """Also where that job would have come last."""
    swept = ("workload.blocks=0,2", "router.microbatch_max=8,0")
    code, out, err = command("-m", *SIMULATED, *swept, "seed=0", "hydra.sweep.dir=sweep")

    assert code == 4
    assert "Checking all 4 jobs before the first one runs" in out
    assert sorted(err.splitlines()) == [
        "skote-eval: Nothing was run: 3 of the sweep's 4 jobs cannot.",
        "skote-eval: job 0 (workload.blocks=0 router.microbatch_max=8): workload.blocks must be at least 1, got 0.",
        "skote-eval: job 1 (workload.blocks=0 router.microbatch_max=0): workload.blocks must be at least 1, got 0.",
        (
            "skote-eval: job 3 (workload.blocks=2 router.microbatch_max=0): "
            "router.microbatch_max must be a whole number of at least 1, got 0."
        ),
    ]
    cells = json.loads((tmp_path / "sweep" / "sweep.json").read_text(encoding="utf-8"))["cells"]
    assert {cell["directory"]: cell["state"] for cell in cells} == {
        "0": "failed", "1": "failed", "2": "waiting", "3": "failed",
    }  # fmt: skip
    assert not list((tmp_path / "sweep").rglob("manifest.json"))


@pytest.mark.slow
def test_without_a_report_the_metrics_are_there(tmp_path):
    code, out, err = run(tmp_path, *SIMULATED, *SHORT, "report=none", "hydra.run.dir=run")
    assert (code, err) == (0, "")
    assert out.splitlines()[-1].endswith("run/metrics.json")
    assert not (tmp_path / "run" / "report.html").exists()


@pytest.mark.slow
@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_and_a_time_limit_keep_what_had_finished_and_leave_no_process(tmp_path, ending):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reading = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    process = start(
        tmp_path, *SIMULATED, *SHORT, "hydra.run.dir=run", "engine._target_=stalled.StalledEngine",
        "+engine.stall_after=15", f"+engine.pipe={pipe}", start_new_session=True,
    )  # fmt: skip
    assert select.select([reading], [], [], 60) == ([reading], [], [])
    os.close(reading)
    family = psutil.Process(process.pid).children(recursive=True)
    assert family
    process.send_signal(ending)
    with contextlib.closing(process.stdout), contextlib.closing(process.stderr):
        try:
            _, err = process.communicate(timeout=30)
        finally:
            process.kill()
    assert process.returncode == 130
    assert len(err.splitlines()) == 1
    assert "Interrupted" in err
    assert not any(each.is_running() for each in family)
    rows = pd.read_parquet(tmp_path / "run" / "requests.parquet")
    assert list(rows[rows.phase == "measure"].request_id) == ["b00-r00", "b00-r01", "b00-r02", "b01-r00"]
    assert len(pd.read_parquet(tmp_path / "run" / "tokens.parquet")) >= 16
    manifest = manifest_of(tmp_path / "run")
    assert manifest["status"] == "interrupted"
    assert len(manifest["passes"]) >= 2


@pytest.mark.slow
def test_a_disk_that_fills_up_is_one_sentence_and_keeps_the_last_rows(tmp_path):
    writer = RunWriter(tmp_path, "empty", "0" * 64)
    writer.flush()
    # Room for a manifest, which comes first and is as large as its configuration, and not for all tokens.
    limit = max(path.stat().st_size for path in tmp_path.glob("*.parquet")) + 16384

    def fill() -> None:  # the nearest to a full disk that needs no root
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    code, _, err = run(
        tmp_path, *SIMULATED, "+engine.token_ms=0.2", "workload.max_new_tokens=64", "hydra.run.dir=run",
        preexec_fn=fill,
    )  # fmt: skip
    assert code == 1
    assert len(err.splitlines()) == 1
    assert "could not be written" in err
    assert "hydra.run.dir=DIR" in err
    assert set(pd.read_parquet(tmp_path / "run" / "requests.parquet").status) == {"ok"}


@pytest.mark.slow
def test_an_unknown_option_is_one_line_on_stderr(tmp_path):
    code, out, err = run(tmp_path, "workload=nonsense")
    assert (code, out) == (4, "")
    assert len(err.splitlines()) == 1
    assert "nonsense" in err


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["engine=nonsense"], "nonsense"),
        (["workload.max_new_token=4"], "There is no such option; workload has name, load, concurrency, blocks,"),
        (["engine.max_bach=1"], "There is no such option; engine has name, _target_, max_model_len, max_batch,"),
        (["engine=simulated", "engine.token_ms=1"], "has name, _target_. A keyword argument of its class that is not"),
        (["-cn", "E28"], "Experiments need their folder too: -cd experiments -cn NAME."),
        (["seed=1", "-cn", "E28", "devices=1"], "devices=1. Options (KEY=VALUE) have to stand together"),
        (["sed=1"], "There is no such option; the top has hydra, model, dtype, engine,"),
        (["workload.max_new_tokens=few"], "workload.max_new_tokens"),
        (["dtype=nonsense"], "nonsense"),
        (["dtype.name=nonsense"], "choose one of fp32, tf32, bf16, fp16"),
        (["model=local", "model.path=missing"], "missing"),
        (["model=local"], "model.path"),
        (["model=tiny_shape", "model.path=mine"], "choose model=local, or leave model.path out"),
        (["model=tiny_shape", "devices=99"], "devices=99"),
        (["model=tiny_shape", "devices=cuda:77"], "cuda:77"),
        (["model=tiny_shape", "devices=0"], "devices=0"),
        (["workload.max_new_tokens=0"], "workload.max_new_tokens must be at least 1, got 0"),
        (["workload.max_new_tokens=-3"], "workload.max_new_tokens must be at least 1, got -3"),
        (
            ["model=tiny_shape", "workload=prefill_longcontext", "workload.prompt_tokens=4000"],
            "longer than the context",
        ),
        (["model=tiny_shape", "model.layers=3"], "layers"),
        (["a prompt with spaces"], "a prompt with spaces"),
        (["hydra.run.dir=/proc/nowhere"], "/proc/nowhere"),
        (["resume=nowhere"], "needs the directory of a sweep (-m) or a search, with its sweep.json or search.json"),
        (["+workload.resume=nowhere"], "workload.resume"),
        (["against=run"], "add check=reproduce"),
        (["check=reproduce"], "check=reproduce needs against=RUN_DIR"),
        (["check=reproduce", "against=nowhere"], "against=nowhere is not the directory of a run"),
        (["check=reproduce", "against=nowhere", "seed=3", "workload=chat"], "leave out seed=3 workload=chat"),
        (["check=ci", "compare=none"], "which this run does not have: drop compare=none"),
        (["check=ci", "check.error_rate_max=3"], "check.error_rate_max is a share from 0 to 1"),
        (["check.tok_s_min=3"], "judged with check=ci alone"),
        (["check=ci", "check.p50_delta_max=nan"], "check.p50_delta_max must be a finite number, got nan"),
        (["measure.stop.half_width=0.1"], "measure.stop is null here: choose an option of conf/measure/ that fills it"),
        (["measure.stop={half_width:0.1}"], "measure.stop is null here"),
        (["model.shape.vocab_size=512"], "model.shape is null here: choose an option of conf/model/"),
        (["measure=quick", "measure.stop.half_width=-1"], "measure.stop.half_width must lie between 0 and 1, got -1.0"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_usage_is_one_sentence_and_exit_4(command, overrides, said):
    code, _, err = command(*overrides)
    assert code == 4
    assert len(err.splitlines()) == 1
    assert err.startswith("skote-eval: ")
    assert said in err
    assert "Traceback" not in err


def test_a_model_that_does_not_fit_is_one_sentence(command, monkeypatch):
    monkeypatch.setattr(capacity, "available_bytes", lambda device: 24 * 10**9)
    code, _, err = command("model=llama31_8b_shape", "devices=cpu")
    assert code == 4
    assert len(err.splitlines()) == 1
    assert "does not fit" in err
    assert "model.layers=N" in err
