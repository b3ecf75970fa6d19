"""The ledger: which claims there are, what a file or a committed run says of each, page and table."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from skote.config import CONF_DIR, register_schema, to_settings
from skote.contracts.check import CHECKS
from skote.eval.claims import ClaimConfig, RuleConfig, check_claim
from skote.eval.ledger import (
    BEGIN,
    END,
    claims_command,
    ledger_html,
    ledger_table,
    read_claims,
    read_ledger,
    write_between,
)
from skote.types import RecordError, UsageError

EXPERIMENTS = Path(__file__).parent.parent.parent / "experiments"
NAMES = sorted(read_claims(EXPERIMENTS))
FILE = """
defaults: [config]
claim:
  id: E10
  statement: Embeddings grow only for a pad token
  claimed: qualitative
  source: the document
  rules:
    - {name: rows added, figure: contracts.pad_token.rows_added_beyond, claimed: 1}
"""


@pytest.fixture
def experiments(tmp_path: Path) -> Path:
    folder = tmp_path / "experiments"
    folder.mkdir()
    (folder / "E10.yaml").write_text(FILE)
    (folder / "E10_other.yaml").write_text("defaults: [E10]\nclaim: {subject: another engine}\n")
    (folder / "E12.yaml").write_text(
        "claim: {id: E12, statement: S, claimed: no, source: it, open: [{part: GPUs, verdict: PENDING, missing: y}]}"
    )
    (folder / "plain.yaml").write_text("defaults: [config]\n")
    return folder


@pytest.fixture
def commit(synthetic: Callable[..., Any], tmp_path: Path) -> Callable[..., None]:
    """`commit(id=..., rows=...)`: a run of E10 below runs/E10, which counted `rows` added rows."""

    def make(claim_id: str = "E10", rows: float = 1.0) -> None:
        rule = RuleConfig("rows added", "contracts.pad_token.rows_added_beyond", 1.0)
        claim = asdict(ClaimConfig(claim_id, "Embeddings grow", "1", "the document", rules=[rule]))
        manifest = {"config": {"claim": claim}, "contracts": {"pad_token": {"rows_added_beyond": rows}}}
        run: Path = synthetic(manifest=manifest).write()
        (run / "report.html").write_text("")
        (tmp_path / "runs").mkdir(exist_ok=True)
        shutil.copytree(run, tmp_path / "runs" / "E10", dirs_exist_ok=True)

    return make


def test_every_claim_of_the_document_has_a_file() -> None:
    ids = {claim["id"] for claim in read_claims(EXPERIMENTS).values()}
    assert ids == {f"E{number:02d}" for number in range(1, 29)}


@pytest.mark.parametrize("name", NAMES)
def test_every_experiment_composes_and_can_be_judged(name: str) -> None:
    register_schema()
    with initialize_config_dir(version_base="1.3", config_dir=str(CONF_DIR)):
        base = compose("config")
    assert base.claim.id == ""
    with initialize_config_dir(version_base="1.3", config_dir=str(EXPERIMENTS)):
        settings = to_settings(compose(name, overrides=[f"hydra.searchpath=[file://{CONF_DIR}]"]))
    claim = read_claims(EXPERIMENTS)[name]
    check_claim(settings.claim)
    assert (settings.claim.id, settings.claim.subject) == (claim["id"], claim["subject"])
    assert settings.claim.needs in ("cpu", "cuda", "none")
    assert set(settings.claim.contracts) <= set(CHECKS)
    used = {rule.figure.split(".")[1] for rule in settings.claim.rules if rule.figure.startswith("contracts.")}
    assert used <= set(settings.claim.contracts)
    assert OmegaConf.structured(settings.claim).statement == claim["statement"]


def test_a_file_takes_the_claim_of_the_one_that_it_extends(experiments: Path) -> None:
    claims = read_claims(experiments)
    assert list(claims) == ["E10", "E10_other", "E12"]
    assert claims["E10_other"]["subject"] == "another engine"
    assert claims["E10_other"]["rules"] == claims["E10"]["rules"]


def test_a_claim_is_what_its_run_says_or_what_its_file_says(
    experiments: Path, tmp_path: Path, commit: Callable[..., None]
) -> None:
    commit()
    ran, not_run, pending = read_ledger(experiments, tmp_path / "runs")
    assert (ran.verdict, ran.link) == ("HOLDS", "E10/report.html")
    assert "AMD EPYC" in ran.setting
    assert not_run.verdict == "NOT RUN"
    assert "-cn E10_other" in not_run.reason
    assert (pending.verdict, pending.reason, pending.link) == ("PENDING", "GPUs: y", None)


def test_page_and_table_have_every_claim(experiments: Path, tmp_path: Path, commit: Callable[..., None]) -> None:
    commit()
    entries = read_ledger(experiments, tmp_path / "runs")
    page = ledger_html(entries)
    assert '<a href="E10/report.html">E10</a>' in page
    assert page.count('<tr id="') == 3
    assert "<strong>1</strong> HOLDS" in page
    table = ledger_table(entries, "reports/claims").splitlines()
    assert len(table) == 5
    assert table[2].endswith("| rows added 1 | [HOLDS](reports/claims/E10/report.html) |")


def test_the_command_writes_page_and_readme(
    experiments: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    readme = tmp_path / "README.md"
    readme.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    arguments = ["--experiments", str(experiments), "--runs", str(tmp_path / "runs"), "--readme", str(readme)]
    assert claims_command(arguments) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "runs" / "index.html")
    text = readme.read_text()
    assert text.startswith(f"before\n{BEGIN}\n| claim |")
    assert text.endswith(f"|\n{END}\nafter\n")
    assert "old" not in text


def test_a_readme_without_marks_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "README.md"
    path.write_text("no marks")
    with pytest.raises(UsageError, match="needs the lines"):
        write_between(path, "table")


def test_a_run_that_counted_something_else_does_not_hold(
    experiments: Path, tmp_path: Path, commit: Callable[..., None]
) -> None:
    commit(rows=3.0)
    assert read_ledger(experiments, tmp_path / "runs")[0].verdict == "NOT REPRODUCED"


def test_runs_of_something_else_are_refused(experiments: Path, tmp_path: Path, commit: Callable[..., None]) -> None:
    commit(claim_id="E11")
    with pytest.raises(RecordError, match="does not judge claim E10"):
        read_ledger(experiments, tmp_path / "runs")
    (tmp_path / "runs" / "E10" / "manifest.json").write_text("{")
    with pytest.raises(RecordError, match="is damaged"):
        read_ledger(experiments, tmp_path / "runs")


def test_bad_folders_and_files_are_one_sentence(experiments: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="There is no folder"):
        read_claims(tmp_path / "nowhere")
    (experiments / "E11.yaml").write_text("claim: [")
    with pytest.raises(UsageError, match=r"E11\.yaml cannot be read as YAML"):
        read_claims(experiments)
