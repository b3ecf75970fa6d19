"""The ledger: which claims there are, what a file or a committed run says of each, page and table."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from skote.contracts.check import CHECKS
from skote.eval.claims import ClaimConfig, OpenPartConfig, RuleConfig, check_claim
from skote.eval.codec import HashCodec
from skote.eval.experiment import compose_experiment
from skote.eval.ledger import (
    BEGIN,
    END,
    Entry,
    claims_command,
    ledger_html,
    ledger_table,
    read_claims,
    read_ledger,
    write_between,
)
from skote.eval.stats import THRESHOLD
from skote.eval.summary import PRIMARY
from skote.eval.workload import build_workload
from skote.types import RecordError, UsageError

EXPERIMENTS = Path(__file__).parent.parent.parent / "experiments"
NAMES = sorted(read_claims(EXPERIMENTS))
FILE = """
defaults: [config, _self_]
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
    (folder / "E10_other.yaml").write_text("defaults: [E10, _self_]\nclaim: {subject: another engine}\n")
    (folder / "E12.yaml").write_text(
        "claim: {id: E12, statement: S, claimed: no, source: it, open: [{part: GPUs, verdict: PENDING, missing: y}]}"
    )
    (folder / "plain.yaml").write_text("defaults: [config]\n")
    return folder


@pytest.fixture
def commit(synthetic: Callable[..., Any], experiments: Path, tmp_path: Path) -> Callable[..., None]:
    """`commit(rows=..., seed=2, ...)`: a run of E10 below runs/E10, which counted `rows` added rows.

    What else is given the run has otherwise than the file.
    """

    def make(rows: float = 1.0, **changes: Any) -> None:
        tree = OmegaConf.create(asdict(compose_experiment(experiments / "E10.yaml")))
        for key, value in changes.items():
            OmegaConf.update(tree, key, value, merge=False)
        contracts = {"pad_token": {"rows_added_beyond": rows}}
        devices = changes.get("devices", ["cpu"])
        manifest = {"config": OmegaConf.to_container(tree), "contracts": contracts, "devices": devices}
        run: Path = synthetic(manifest=manifest).write()
        (run / "report.html").write_text("")
        (tmp_path / "runs").mkdir(exist_ok=True)
        shutil.copytree(run, tmp_path / "runs" / "E10", dirs_exist_ok=True)

    return make


def test_every_claim_of_the_document_has_a_file() -> None:
    ids = {claim["id"] for claim in read_claims(EXPERIMENTS).values()}
    assert ids == {"AA"} | {f"E{number:02d}" for number in range(1, 29)}


@pytest.mark.parametrize("name", NAMES)
def test_every_experiment_composes_and_can_be_judged(name: str) -> None:
    settings = compose_experiment(EXPERIMENTS / f"{name}.yaml")
    claim = read_claims(EXPERIMENTS)[name]
    check_claim(settings.claim)
    assert asdict(settings.claim) == {**asdict(ClaimConfig()), **claim, **_whole(claim)}
    assert settings.claim.needs in ("cpu", "cuda", "two_cuda", "none")
    assert set(settings.claim.contracts) <= set(CHECKS)
    used = {rule.figure.split(".")[1] for rule in settings.claim.rules if rule.figure.startswith("contracts.")}
    assert used <= set(settings.claim.contracts)


@pytest.mark.parametrize(
    ("name", "measured_as"),
    [
        *(("E03", "two_gpu_throughput"), ("E04", "two_gpu_throughput")),
        *(("E04_latency", "two_gpu_latency"), ("E21_cuda", "two_gpu_latency"), ("E21_split", "two_gpu_split")),
    ],
)
def test_a_claim_of_two_gpus_is_measured_as_the_experiment_that_it_names(name: str, measured_as: str) -> None:
    claimed, plain = (asdict(compose_experiment(EXPERIMENTS / f"{each}.yaml")) for each in (name, measured_as))
    assert claimed | {"claim": plain["claim"]} == plain
    assert claimed["claim"]["needs"] == "two_cuda"
    assert Entry(name, read_claims(EXPERIMENTS)[name]).verdict == "NOT TESTABLE HERE"


def test_one_request_at_a_time_is_all_that_the_two_gpu_experiments_differ_in() -> None:
    batched, alone = (
        asdict(compose_experiment(EXPERIMENTS / f"{name}.yaml")) for name in ("two_gpu_throughput", "two_gpu_latency")
    )
    for settings in (batched, alone):
        for arm in ("engine", "compare"):
            settings[arm] |= {"max_batch": 1, "prefill_chunk": 512}
        settings["router"] |= {"max_concurrency_per_device": 1, "microbatch_window_ms": 0.0, "microbatch_max": 8}
    assert batched == alone


def _whole(claim: dict[str, Any]) -> dict[str, Any]:
    """Rules and open parts of a claim with their defaults."""
    rules = [asdict(RuleConfig()) | rule for rule in claim["rules"]]
    return {"rules": rules, "open": [asdict(OpenPartConfig()) | part for part in claim["open"]]}


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
    assert (pending.verdict, pending.reason, pending.link) == ("PENDING", "GPUs: y.", None)


@pytest.mark.parametrize("beside", [False, True])
def test_a_claim_about_the_same_measurement_is_judged_by_the_run_of_the_file_it_extends(
    experiments: Path, tmp_path: Path, commit: Callable[..., None], beside: bool
) -> None:
    rule = "{name: rows, figure: contracts.pad_token.rows_added_beyond, claimed: 3}"
    (experiments / "E11.yaml").write_text(f"defaults: [E10, _self_]\nclaim: {{id: E11, needs: cpu, rules: [{rule}]}}\n")
    (experiments / "E12.yaml").write_text(f"defaults: [E10, _self_]\nseed: 9\nclaim: {{id: E12, rules: [{rule}]}}\n")
    commit()
    runs = tmp_path / "runs"
    if beside:
        shutil.move(runs / "E10", tmp_path / "E10")
    entries = {entry.name: entry for entry in read_ledger(experiments, runs)}
    assert entries["E10"].verdict == "NOT RUN" if beside else "HOLDS"
    assert (entries["E11"].verdict, entries["E11"].rules[0]["measured"]) == ("NOT REPRODUCED", 1.0)
    assert entries["E11"].link == ("../E10/report.html" if beside else "E10/report.html")
    # Another subject, and another seed, were not measured by it.
    assert {entries[name].verdict for name in ("E10_other", "E12")} == {"NOT RUN"}


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


@pytest.mark.parametrize(
    ("key", "value", "sentence"),
    [
        ("claim.id", "E11", "claim.id is 'E11' in the run and 'E10' in E10.yaml."),
        ("claim.subject", "another", "claim.subject is 'another' in the run and 'Skotergy 2' in E10.yaml."),
        ("claim.rules.0.tolerance", 5.0, "claim.rules.0.tolerance is 5.0 in the run and 0.0 in E10.yaml."),
        (
            "claim.rules",
            [],
            "claim.rules.0.name is not there in the run and 'rows added' in E10.yaml, and 7 more do not match.",
        ),
        ("claim.contracts", ["padding"], "claim.contracts is ['padding'] in the run and [] in E10.yaml."),
        ("workload.blocks", 60, "workload.blocks is 60 in the run and 6 in E10.yaml."),
        ("engine.compile", False, "engine.compile is False in the run and True in E10.yaml."),
        ("seed", 3, "seed is 3 in the run and 0 in E10.yaml."),
        ("devices", ["cpu", "cpu"], "it ran on cpu, cpu, which E10.yaml does not ask for."),
    ],
)
def test_a_run_of_another_configuration_is_left_out_and_the_page_says_why(
    experiments: Path, tmp_path: Path, commit: Callable[..., None], key: str, value: Any, sentence: str
) -> None:
    commit(**{key: value})
    entry = read_ledger(experiments, tmp_path / "runs")[0]
    assert (entry.verdict, entry.link, entry.rules) == ("NOT RUN", None, [])
    assert entry.left_out == f"The run in E10/ is left out: {sentence}"
    assert entry.left_out.replace("'", "&#39;") in ledger_html([entry])


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model.cache_dir", "/elsewhere"),
        ("claim.statement", "The same in other words"),
        ("devices", ["cuda:1"]),
    ],
)
def test_where_things_lie_is_free(
    experiments: Path, tmp_path: Path, commit: Callable[..., None], key: str, value: Any
) -> None:
    commit(**{key: value})
    assert read_ledger(experiments, tmp_path / "runs")[0].verdict == "HOLDS"


@pytest.mark.parametrize(
    ("weights", "sentence"),
    [
        ("cd" * 32, None),
        ("", "model.path is '/elsewhere' in the run, and E10.yaml does not say which weights it means: claim.weights."),
        ("ce" * 32, f"its weights have the SHA-256 {'cd' * 32}, and E10.yaml means {'ce' * 32} (claim.weights)."),
    ],
)
def test_weights_from_elsewhere_are_those_that_the_file_means(
    experiments: Path, tmp_path: Path, commit: Callable[..., None], weights: str, sentence: str | None
) -> None:
    """The synthetic run has weights of the hash cdcd..."""
    (experiments / "E10.yaml").write_text(FILE.replace("  id: E10\n", f"  id: E10\n  weights: '{weights}'\n"))
    commit(**{"model.path": "/elsewhere"})
    entry = read_ledger(experiments, tmp_path / "runs")[0]
    if sentence is None:
        assert (entry.verdict, entry.left_out) == ("HOLDS", None)
    else:
        assert (entry.verdict, entry.left_out) == ("NOT RUN", f"The run in E10/ is left out: {sentence}")


def test_a_run_from_before_weights_were_named_is_held_against_them(
    experiments: Path, tmp_path: Path, commit: Callable[..., None]
) -> None:
    commit()
    for weights, verdict in (("cd" * 32, "HOLDS"), ("ce" * 32, "NOT RUN")):
        (experiments / "E10.yaml").write_text(FILE.replace("  id: E10\n", f"  id: E10\n  weights: '{weights}'\n"))
        assert read_ledger(experiments, tmp_path / "runs")[0].verdict == verdict


def test_a_claim_of_a_cuda_device_takes_no_run_on_a_cpu(
    experiments: Path, tmp_path: Path, commit: Callable[..., None]
) -> None:
    (experiments / "E10.yaml").write_text(FILE.replace("  id: E10\n", "  id: E10\n  needs: cuda\n"))
    commit()
    assert "it ran on cpu, which E10.yaml does not ask for" in (
        read_ledger(experiments, tmp_path / "runs")[0].left_out or ""
    )
    commit(devices=["cuda:3"])
    assert read_ledger(experiments, tmp_path / "runs")[0].verdict == "HOLDS"


def test_a_file_that_does_not_compose_is_one_sentence(
    experiments: Path, tmp_path: Path, commit: Callable[..., None]
) -> None:
    commit()
    (experiments / "E10.yaml").write_text(FILE.replace("config, ", "config, {override model: nonsense}, "))
    with pytest.raises(UsageError, match=r"E10\.yaml cannot be composed: .*nonsense"):
        read_ledger(experiments, tmp_path / "runs")


def test_a_damaged_run_is_one_sentence(experiments: Path, tmp_path: Path, commit: Callable[..., None]) -> None:
    commit()
    (tmp_path / "runs" / "E10" / "manifest.json").write_text("{")
    with pytest.raises(RecordError, match="is damaged"):
        read_ledger(experiments, tmp_path / "runs")


def test_bad_folders_and_files_are_one_sentence(experiments: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="There is no folder"):
        read_claims(tmp_path / "nowhere")
    (experiments / "E11.yaml").write_text("claim: [")
    with pytest.raises(UsageError, match=r"E11\.yaml cannot be read as YAML"):
        read_claims(experiments)


@pytest.mark.parametrize(
    ("name", "prompt_lengths", "answer_lengths", "least"),
    [("E02", 3, 2, 72), ("E02_cpu", 3, 2, 200), ("E05", 28, 7, 200)],
)
def test_mixtures_mix_lengths_and_repeat_no_prompt(
    name: str, prompt_lengths: int, answer_lengths: int, least: int
) -> None:
    settings = compose_experiment(EXPERIMENTS / f"{name}.yaml")
    workload = build_workload(settings.workload, HashCodec(512), settings.seed)
    shapes = {(len(request.input_ids), request.max_new_tokens) for request in workload.requests}
    assert len(shapes) == prompt_lengths * answer_lengths
    assert len({request.input_ids for request in workload.requests}) == len(workload.requests) >= least
    assert workload.repeated_prompts == 0


def test_outputs_of_e05_are_all_requests_timed_and_held_out() -> None:
    settings = compose_experiment(EXPERIMENTS / "E05.yaml")
    workload = build_workload(settings.workload, HashCodec(512), settings.seed)
    rules = {rule.figure: rule.claimed for rule in settings.claim.rules}
    assert rules["arms.candidate.requests.ok"] == len(workload.requests)
    assert rules["parity.equal"] == len(workload.requests) + len(workload.probe)


def test_the_harness_against_itself_is_judged_by_the_bounds_of_the_runs_verdict() -> None:
    settings = compose_experiment(EXPERIMENTS / "aa_selftest.yaml")
    assert (settings.engine["name"], settings.compare["name"]) == ("baseline", "baseline")
    (rule,) = settings.claim.rules
    assert rule.figure == f"deltas.{PRIMARY[0]}.{PRIMARY[1]}"
    assert (rule.direction, rule.claimed, rule.tolerance) == ("equal", 0.0, 100 * THRESHOLD)
