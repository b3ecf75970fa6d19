from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
from omegaconf import OmegaConf

from skote.eval.experiment import compose_experiment
from skote.eval.record import read_run
from skote.eval.summary import summarize
from skote.eval.traffic import padded_share
from skote.eval.verify import differences

ROOT = Path(__file__).parents[2]
MS = 1_000_000


def rows(*launches: tuple[int, int, list[int]]) -> pd.DataFrame:
    """Rows of one pass: (replica, admitted_ns, prompt lengths) a launch."""
    return pd.DataFrame(
        [
            {"arm": "candidate", "block": 0, "round": 0, "replica": replica, "admitted_ns": at, "input_tokens": length}
            for replica, at, lengths in launches
            for length in lengths
        ]
    )


def test_padding_is_counted_launch_by_launch():
    # 2 x 30 computed for 40, 3 x 10 for 30: 70 of 90 are prompts'.
    assert padded_share(rows((0, 5, [10, 30]), (1, 5, [10, 10, 10]))) == pytest.approx(20 / 90)
    assert padded_share(rows((0, 5, [10]), (0, 6, [30]))) == 0.0
    assert padded_share(rows((0, None, [10]))) is None  # type: ignore[arg-type]


def test_lag_and_rates_are_over_the_schedule(synthetic):
    run = read_run(synthetic(blocks=2, requests=4, arms={"candidate": "skotergy"}).write())
    assert "traffic" not in summarize(run)
    run.manifest["workload"] |= {"load": "trace", "concurrency": None, "schedule": {}}
    measured = run.requests["phase"] == "measure"
    order = run.requests[measured].groupby("block").cumcount()
    start = run.requests.loc[measured].groupby("block")["dispatched_ns"].transform("min")
    run.requests.loc[measured, "scheduled_ns"] = start + order * 1000 * MS
    run.requests.loc[measured, "dispatched_ns"] = start + order * 1001 * MS  # 0 to 3 ms late
    run.requests.loc[measured, "end_ns"] = run.requests.loc[measured, "dispatched_ns"] + 10 * MS
    figures = summarize(run)["traffic"]["candidate"]
    assert figures["offered_req_s"] == 1.0
    assert figures["sent_req_s"] == pytest.approx(1 / 1.001)
    assert figures["dispatch_lag_ms"] == pytest.approx({"p50": 1.5, "p95": 3.0, "p99": 3.0, "max": 3.0}, abs=0.01)
    assert figures["padded_share"] == 0.0
    assert figures["backlog_share"] == 0.25  # the last of four


def test_a_queue_that_grows_leaves_a_backlog(synthetic, timeline):
    """Requests of 99 ms, one at a time, due every 25 ms: when the last of 8 is, after 175 ms, one was answered."""
    shape = timeline(0, 98, [1])
    run = read_run(synthetic(blocks=1, requests=8, arms={"candidate": "skotergy"}).write(lambda *_: shape))
    run.manifest["workload"] |= {"load": "constant", "concurrency": None, "schedule": {}}
    measured = run.requests["phase"] == "measure"
    start = run.requests.loc[measured, "dispatched_ns"].min()
    run.requests.loc[measured, "scheduled_ns"] = [start + index * 25 * MS for index in range(8)]
    assert summarize(run)["traffic"]["candidate"]["backlog_share"] == 7 / 8


def test_the_routing_experiment_sweeps_three_policies_over_one_workload():
    settings = compose_experiment(ROOT / "experiments" / "azure_routing.yaml")
    assert (settings.workload.load, settings.devices, settings.compare["name"]) == ("trace", 2, "")
    assert settings.router.policy == "length_aware"
    swept = OmegaConf.load(ROOT / "experiments" / "azure_routing.yaml").hydra.sweeper.params
    assert swept == {"router": "length_aware,round_robin,least_work"}


@pytest.mark.slow
def test_a_trace_runs_end_to_end_over_two_replicas(tmp_path):
    """Six requests a block, two a second and a hundred times as fast, in both arms and through the whole report."""
    rows = [f"2023-11-16 18:00:{index // 2:02d}.{5 * (index % 2)},{10 + index},{1 + index % 3}" for index in range(12)]
    (tmp_path / "azure.csv").write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "\n".join(rows))
    done = subprocess.run(
        [
            sys.executable, ROOT / "run.py", "workload=trace", "workload.source.path=azure.csv", "devices=2",
            "workload.arrivals.speed_up=100", "workload.blocks=2", "workload.requests_per_block=6",
            "model=tiny_shape", "engine=simulated", "compare=simulated", "measure.harness_overhead=false",
            "slo.e2el_ms=60000", "hydra.run.dir=run",
        ],
        cwd=tmp_path, text=True, capture_output=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    run = read_run(tmp_path / "run")
    metrics = json.loads((tmp_path / "run" / "metrics.json").read_text())
    measured = run.requests[run.requests["phase"] == "measure"]
    for arm in ("candidate", "baseline"):
        assert metrics["traffic"][arm]["offered_req_s"] == pytest.approx(200.0)
        assert metrics["slo"]["arms"][arm]["attainment"] == 1.0
        for _, rows_of in measured[measured["arm"] == arm].groupby("block"):
            sent = rows_of.sort_values("request_id")
            assert list(sent["scheduled_ns"].diff().dropna()) == [5 * MS] * 5
            assert (sent["dispatched_ns"] >= sent["scheduled_ns"]).all()
    assert set(measured["input_tokens"]) == set(range(10, 22))
    assert set(measured["output_tokens"]) == {1, 2, 3}
    assert list(differences(tmp_path / "run")) == []
    page = (tmp_path / "run" / "report.html").read_text()
    assert "sent by the clock, trace, 200.0 requests a second" in page
    assert "azure.csv, azure, sha256" in page
