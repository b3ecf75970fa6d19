from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from skote.eval.capacity_page import capacity_content, render_capacity, tried_loads
from skote.eval.record import read_run
from skote.eval.report import main as report_main
from skote.eval.search import Tried
from skote.eval.slo import SloConfig

RUN = Path(__file__).parents[2] / "run.py"
SLO = SloConfig(ttft_ms=100.0, e2el_ms=400.0, attainment=0.9)


def probe(
    load: float, met: int, *, p95: float | str = 50.0, backlog: float = 0.0, valid: bool = True
) -> dict[str, Any]:
    latency = {"p50": 20.0, "p95": p95}
    return {
        "run": f"probes/candidate-{load:g}", "load": load, "valid": valid, "offered_req_s": load / 2,
        "backlog_share": backlog, "lag_p99_ms": 0.2, "scheduled": 100, "met": met, "attainment": met / 100,
        "interval": [0.0, 1.0], "goodput_req_s": 1.0,
        "latency": {"ttft_ms": latency, "tpot_ms": {"p50": None, "p95": None}, "e2el_ms": latency},
    }  # fmt: skip


def test_tries_of_one_load_count_together_and_one_that_is_not_sustained_is_enough():
    probes = [probe(4, 90), probe(2, 100), probe(4, 80, backlog=0.3)]
    assert tried_loads(probes) == [Tried(4, 200, 170, 2, is_saturated=True), Tried(2, 100, 100)]


def arms() -> dict[str, dict[str, Any]]:
    fast = [probe(2, 100, p95=50.0), probe(8, 100, p95=55.0), probe(16, 10, p95="inf"), probe(10, 60, p95=500.0)]
    return {
        "candidate": {"engine": "skotergy", "probes": fast},
        "baseline": {"engine": "baseline", "probes": [probe(2, 100), probe(4, 0), probe(3, 93)]},
    }


def test_the_ratio_is_that_of_the_offered_rates_with_the_bounds_of_both_brackets():
    content = capacity_content(arms(), SLO, "rate")
    candidate, baseline = content["arms"]["candidate"], content["arms"]["baseline"]
    assert (candidate["kept_load"], candidate["missed_load"]) == (8, 10)
    assert (candidate["capacity_req_s"], candidate["missed_req_s"]) == (4.0, 5.0)
    assert (baseline["capacity_req_s"], baseline["missed_req_s"], baseline["undecided"]) == (1.5, 2.0, [3])
    assert content["ratio"] == {"value": 4.0 / 1.5, "low": 2.0, "high": 5.0 / 1.5}
    assert candidate["knee_req_s"] == 4.0


def test_an_arm_that_keeps_no_load_leaves_no_ratio():
    content = capacity_content(arms() | {"baseline": {"engine": "b", "probes": [probe(1, 0)]}}, SLO, "rate")
    assert content["ratio"] == {"value": None, "low": 8.0, "high": None}
    alone = capacity_content({"candidate": arms()["candidate"]}, SLO, "speed_up")
    assert alone["ratio"] is None


def test_the_page_has_curves_limits_and_every_probe(tmp_path):
    path = render_capacity(tmp_path, capacity_content(arms(), SLO, "rate"))
    page = path.read_text(encoding="utf-8")
    assert "2.67 times the load" in page
    assert "limit 400 ms" in page
    assert "limit 100 ms" in page
    assert "TPOT against the load" not in page  # every request has one token
    assert page.count("report.html") == 7
    assert json.loads((tmp_path / "capacity.json").read_text())["ratio"]["low"] == 2.0


def test_a_search_is_rebuilt_from_its_probes(tmp_path, capsys):
    searched = arms()
    for name, arm in searched.items():
        for number, each in enumerate(arm["probes"]):
            directory = tmp_path / "probes" / f"{name}-{number:02d}"
            directory.mkdir(parents=True)
            each["run"] = f"probes/{name}-{number:02d}"
            named = {"ttft_ms": "adj_ttft_sched_ms", "tpot_ms": "adj_tpot_ms", "e2el_ms": "adj_e2el_sched_ms"}
            latencies = {
                metric: {q: {"value": value} for q, value in each["latency"][own].items()}
                for own, metric in named.items()
            }
            metrics = {
                "arms": {"candidate": {"metrics": latencies}}, "verdict": {"valid": each["valid"]},
                "slo": {"arms": {"candidate": each}},
                "traffic": {"candidate": each | {"dispatch_lag_ms": {"p99": each["lag_p99_ms"]}}},
            }  # fmt: skip
            (directory / "metrics.json").write_text(json.dumps(metrics))
    page = render_capacity(tmp_path, capacity_content(searched, SLO, "rate"))
    first, figures = page.read_text(), (tmp_path / "capacity.json").read_text()
    page.unlink()
    with pytest.raises(SystemExit) as ended:
        report_main(["capacity", str(tmp_path)])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"{page}\n"
    assert (page.read_text(), (tmp_path / "capacity.json").read_text()) == (first, figures)
    with pytest.raises(SystemExit) as ended:
        report_main(["capacity", str(tmp_path / "probes")])
    assert ended.value.code == 1
    assert "capacity.json cannot be read" in capsys.readouterr().err


@pytest.mark.slow
def test_a_search_finds_what_a_simulated_engine_can_take(tmp_path):
    """Requests of 50 ms, one at a time: 20 a second are its most. All that lies between is left to the search."""
    done = subprocess.run(
        [
            sys.executable, RUN, "-cd", RUN.parent / "experiments", "-cn", "capacity", "model=tiny_shape",
            "engine=simulated", "compare=simulated", "+engine.prefill_ms=50", "+compare.prefill_ms=50", "report=none",
            "slo.ttft_ms=150", "search.start=12", "search.precision=3", "search.tries=1", "workload.max_new_tokens=1",
            "measure.harness_overhead=false", "workload.load=constant", "workload.requests_per_block=24",
            "hydra.run.dir=found",
        ],
        cwd=tmp_path, text=True, capture_output=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    content = json.loads((tmp_path / "found" / "capacity.json").read_text())
    for found in content["arms"].values():
        assert found["kept_load"] in (6.0, 12.0)
        assert 5.9 < found["capacity_req_s"] < 20
        assert 11.9 < found["missed_req_s"] < 25
    runs = [read_run(tmp_path / "found" / each["run"]) for each in content["arms"]["candidate"]["probes"]]
    assert [run.manifest["config"]["workload"]["arrivals"]["rate"] for run in runs] == [
        each["load"] for each in content["arms"]["candidate"]["probes"]
    ]
    stopped = runs[-1].requests
    assert {"ok", "cancelled"} == set(stopped[stopped["phase"] == "measure"]["status"])
    assert (tmp_path / "found" / "probes" / "parity" / "manifest.json").exists()
    cells = json.loads((tmp_path / "found" / "search.json").read_text())["cells"]
    probes = [each["run"] for arm in ("candidate", "baseline") for each in content["arms"][arm]["probes"]]
    assert [cell["directory"] for cell in cells] == ["probes/parity", *probes]
    assert {cell["state"] for cell in cells} == {"done"}
    assert cells[1]["overrides"] == ["workload.arrivals.rate=12.0"]

    # As one that was killed in its second probe: that one runs again, the others are taken as they are.
    (tmp_path / "found" / probes[1] / "metrics.json").unlink()
    kept = (tmp_path / "found" / probes[0] / "manifest.json").read_bytes()
    done = subprocess.run(
        [sys.executable, RUN, "resume=found"], cwd=tmp_path, text=True, capture_output=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert f"Done before: {tmp_path / 'found' / probes[0]}" in done.stdout
    assert f"Done before: {tmp_path / 'found' / probes[1]}" not in done.stdout
    assert (tmp_path / "found" / probes[0] / "manifest.json").read_bytes() == kept
    assert (tmp_path / "found" / probes[1] / "metrics.json").exists()


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["search.start=1", "workload=poisson"], "A search needs limits to keep"),
        (["search.start=1", "slo.tpot_ms=5"], "workload.load=closed has none"),
        (["-m", "search.start=1", "slo.tpot_ms=5", "workload=poisson", "seed=1,2"], "has no place in a sweep"),
    ],
)
def test_a_search_that_cannot_be_is_refused(tmp_path, overrides, sentence):
    done = subprocess.run(
        [sys.executable, RUN, *overrides, "model=tiny_shape"], cwd=tmp_path, text=True, capture_output=True, check=False
    )
    assert done.returncode == 4
    assert sentence in done.stderr
