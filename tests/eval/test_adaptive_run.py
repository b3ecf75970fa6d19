"""Whole runs that add blocks, and a run of one engine against itself."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

ROOT = Path(__file__).parents[2]
SMALL = (
    "model=tiny_shape",
    "measure.harness_overhead=false",
    "workload.max_new_tokens=2",
    "workload.requests_per_block=3",
    "hydra.run.dir=run",
)


def run(cwd, *overrides, codes=(0,)):
    done = subprocess.run(
        [sys.executable, ROOT / "run.py", *overrides, *SMALL], cwd=cwd, capture_output=True, text=True, check=False
    )
    assert done.returncode in codes
    assert done.stderr == ""
    directory = cwd / "run"
    manifest, metrics = (
        json.loads((directory / name).read_text(encoding="utf-8")) for name in ("manifest.json", "metrics.json")
    )
    rows = pd.read_parquet(directory / "requests.parquet")
    return manifest, metrics, rows[rows.phase == "measure"]


@pytest.mark.slow
def test_the_baseline_against_itself_adds_blocks_until_the_budget_ends(tmp_path):
    """A width that no run reaches: all of the budget's blocks are measured, judged and covered by the hash.

    What so short a run says of its rule is up to the machine's noise.
    """
    manifest, metrics, rows = run(
        tmp_path, "-cd", ROOT / "experiments", "-cn", "aa_selftest", "workload.blocks=5", "measure.stop.max_blocks=8",
        "measure.stop.half_width=1e-9", codes=(0, 1, 3),
    )  # fmt: skip

    assert {arm: content["engine"] for arm, content in manifest["arms"].items()} == {
        "candidate": "baseline",
        "baseline": "baseline",
    }
    assert manifest["stop"]["reason"] == metrics["stop"]["reason"] == "blocks_spent"
    assert (manifest["stop"]["planned_blocks"], manifest["workload"]["blocks"]) == (5, 8)
    assert rows.groupby("arm").block.nunique().to_dict() == {"candidate": 8, "baseline": 8}
    assert set(rows.workload_sha256) == {manifest["workload"]["sha256"]}
    assert set(manifest["requested_tokens"]) == set(rows.request_id)
    assert set(manifest["parity"]["outputs"]["candidate"]) >= set(rows.request_id)
    assert metrics["deltas"]["e2el_ms"]["p50"]["blocks"] == 8
    firsts = rows[rows["round"] == 0].groupby("block").arm.first().tolist()
    assert all(set(firsts[start : start + 2]) == {"candidate", "baseline"} for start in (0, 2, 4, 6))
    page = (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    assert "the budget of 8 blocks is spent" in page


@pytest.mark.slow
def test_a_run_that_is_narrow_at_once_adds_only_the_missing_order(tmp_path):
    """Five blocks and a width that any run reaches: one more, so that each order was first three times."""
    manifest, _, rows = run(
        tmp_path, "engine=simulated", "compare=simulated", "+engine.token_ms=2", "+compare.token_ms=2",
        "measure=paper", "workload.blocks=5", "measure.stop.half_width=0.99",
    )  # fmt: skip

    assert manifest["stop"]["reason"] == "narrow_enough"
    assert rows.block.nunique() == manifest["workload"]["blocks"] == 6


@pytest.mark.slow
def test_one_arm_has_nothing_to_become_narrow(tmp_path):
    manifest, metrics, rows = run(tmp_path, "engine=baseline", "measure=quick", "workload.blocks=2")

    assert list(manifest["arms"]) == ["candidate"]
    assert manifest["stop"] is None
    assert metrics["stop"] is None
    assert rows.block.nunique() == 2
