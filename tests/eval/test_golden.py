"""A small run that is kept with its metrics.json, and files of other versions.

After a change that is meant to change figures: `skote-report tests/eval/golden && rm tests/eval/golden/report.html`.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from skote.eval.record import read_run
from skote.eval.report import render_run
from skote.eval.schema_version import SCHEMA_VERSION, STEPS
from skote.types import RecordError

GOLDEN = Path(__file__).parent / "golden"


@pytest.fixture
def copy(tmp_path):
    """A copy of the kept run; `copy(schema_version=3)` changes its manifest, and None takes a key out."""

    def make(**changes):
        directory = shutil.copytree(GOLDEN, tmp_path / "golden")
        manifest = json.loads((directory / "manifest.json").read_text(encoding="utf-8")) | changes
        content = {key: value for key, value in manifest.items() if key not in changes or value is not None}
        (directory / "manifest.json").write_text(json.dumps(content), encoding="utf-8")
        return directory

    return make


def test_metrics_are_the_same_to_the_byte(copy):
    directory = copy()
    render_run(directory)

    assert (directory / "metrics.json").read_bytes() == (GOLDEN / "metrics.json").read_bytes()


def test_the_kept_run_holds_what_is_hard():
    """A failure, two tokens a chunk, both verdicts that can be refused, and a steady state."""
    metrics = json.loads((GOLDEN / "metrics.json").read_text(encoding="utf-8"))

    assert metrics["arms"]["baseline"]["requests"] == {"scheduled": 72, "ok": 71, "failed": 1}
    assert (
        metrics["arms"]["candidate"]["metrics"]["itl_ms"]["n"]
        == 2 * metrics["arms"]["candidate"]["metrics"]["icl_ms"]["n"]
    )
    assert metrics["deltas"]["e2el_ms"]["p50"]["verdict"] == "FASTER"
    assert metrics["deltas"]["e2el_ms"]["p95"]["reason"] == "too_few_samples"
    assert metrics["steady"]["arms"]["candidate"]["requests"] == 6 * (12 - 2 * 3)
    assert metrics["stop"]["reason"] == "narrow_enough"


def test_an_older_manifest_becomes_one_of_today(copy):
    manifest = read_run(copy(schema_version=1, stop=None)).manifest

    assert manifest["schema_version"] == SCHEMA_VERSION
    assert manifest["stop"] is None
    assert manifest["workload"]["repeated_prompts"] == 0  # what is there stays


def test_what_an_older_version_did_not_count_is_not_zero(copy):
    workload = json.loads((GOLDEN / "manifest.json").read_text(encoding="utf-8"))["workload"]
    del workload["repeated_prompts"]

    assert read_run(copy(schema_version=1, workload=workload)).manifest["workload"]["repeated_prompts"] is None


def test_every_older_version_has_a_step():
    assert sorted(STEPS) == list(range(1, SCHEMA_VERSION))


@pytest.mark.parametrize("version", [0, SCHEMA_VERSION + 1, "two", None])
def test_other_versions_are_refused_in_one_sentence(copy, version):
    with pytest.raises(RecordError, match=rf"has schema version {version}, and this Skotergy reads 1 to") as caught:
        read_run(copy(schema_version=version))

    assert str(caught.value).count(". ") == 0
