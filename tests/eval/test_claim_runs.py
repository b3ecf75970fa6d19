"""Experiments through the command line: the verdict on the terminal, in metrics.json, in the report, as exit code."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "code", "verdict"), [("E20", 0, "HOLDS"), ("E99", 3, "PENDING"), ("E98", 3, "NOT TESTABLE HERE")]
)
def test_an_experiment_ends_in_its_verdict(name: str, code: int, verdict: str, tmp_path: Path) -> None:
    folder = ROOT / "experiments"
    if not (folder / f"{name}.yaml").exists():
        folder = tmp_path
        claim = (
            f"{{id: {name}, statement: S, claimed: C, source: it, open: [{{part: P, verdict: {verdict}, missing: M}}]}}"
        )
        defaults = "[config, override model: tiny_shape, override compare: none, _self_]"
        (folder / f"{name}.yaml").write_text(f"defaults: {defaults}\nclaim: {claim}\n")
    command = [sys.executable, ROOT / "run.py", "-cd", folder, "-cn", name, "hydra.run.dir=run"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (code, "")
    assert f"{name}, Skotergy 2: {verdict}." in done.stdout
    metrics = json.loads((tmp_path / "run" / "metrics.json").read_text(encoding="utf-8"))
    assert (metrics["claim"]["verdict"], metrics["exit_code"]) == (verdict, code)
    assert metrics["arms"] == {}
    assert f"{name}: {verdict}" in (tmp_path / "run" / "report.html").read_text(encoding="utf-8")


@pytest.mark.slow
def test_a_rule_that_is_not_met_ends_in_exit_1(tmp_path: Path) -> None:
    """The same claim with a figure that no machine gives."""
    overrides = ["claim.rules.0.claimed=0", "hydra.run.dir=run"]
    command = [sys.executable, ROOT / "run.py", "-cd", ROOT / "experiments", "-cn", "E20", *overrides]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "E20, Skotergy 2: NOT REPRODUCED." in done.stdout
