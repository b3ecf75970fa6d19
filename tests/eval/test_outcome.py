"""junit.xml, summary.md and GitHub's step summary."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from skote.eval.junit import junit_xml
from skote.eval.outcome import STEP_SUMMARY, closing_lines, summary_markdown, write_outcome
from skote.eval.record import read_run
from skote.eval.summary import summarize
from skote.types import RecordError

LIMITS = {
    "name": "ci", "p50_delta_max": -90.0, "ratio_to_baseline_max": 1.0, "tok_s_min": None, "error_rate_max": 0.0,
    "parity": True,
}  # fmt: skip


@pytest.fixture
def checked(synthetic):
    """A run that is 60 % faster, and is asked for 90."""

    def read(**options):
        run = read_run(synthetic(manifest={"config": {"check": LIMITS}}, **options).write())
        return run.directory, run.manifest, summarize(run)

    return read


def test_a_terminal_is_told_checks_and_verdict(checked):
    lines = list(closing_lines(*checked()))

    assert any(line.startswith("  failed: p50_delta_max: ") for line in lines)
    assert lines[-1].startswith("FASTER: A median request takes 58.2\N{NO-BREAK SPACE}% less time end to end with ")


def test_a_terminal_is_told_why_a_run_is_invalid(checked):
    directory, manifest, metrics = checked()
    metrics["verdict"]["label"] = "INVALID"
    metrics["findings"] = [
        {"severity": "warning", "code": "requests_failed", "sentence": "One request failed."},
        {"severity": "invalid", "code": "one_sided_noise", "sentence": "Others took the CPU."},
    ]
    metrics["checks"] = []
    place = directory / "requests.parquet"

    assert list(closing_lines(directory, manifest, metrics)) == [
        f"One request failed. Each one's error is in {place}.",
        "INVALID: Others took the CPU.",
    ]


def test_junit_has_a_case_for_the_run_and_one_for_each_check(checked):
    _, manifest, metrics = checked()
    suite = ElementTree.fromstring(junit_xml(manifest, metrics)).find("testsuite")
    cases = {case.get("name"): [child.tag for child in case] for case in suite}

    assert metrics["exit_code"] == 1
    assert cases == {
        "run": [], "parity": [], "error_rate_max": [], "p50_delta_max": ["failure"],
        "ratio_to_baseline_max.e2el": [], "ratio_to_baseline_max.ttft": [], "ratio_to_baseline_max.tpot": [],
    }  # fmt: skip
    assert (suite.get("tests"), suite.get("failures"), suite.get("errors")) == ("7", "1", "0")


def test_what_is_inconclusive_or_invalid_is_an_error(checked):
    _, manifest, metrics = checked(blocks=3)
    manifest["parity"]["passed"] = False
    suite = ElementTree.fromstring(junit_xml(manifest, metrics)).find("testsuite")
    errors = {case.get("name"): case.find("error").get("type") for case in suite if case.find("error") is not None}

    assert errors["p50_delta_max"] == "INCONCLUSIVE"
    assert "run" not in errors

    metrics["findings"].append({"severity": "invalid", "sentence": "The arms <disagree>."})
    suite = ElementTree.fromstring(junit_xml(manifest, metrics)).find("testsuite")
    assert suite.find("testcase[@name='run']/error").get("message") == "The arms <disagree>."


def test_the_summary_has_verdict_checks_and_figures(checked):
    _, manifest, metrics = checked()
    text = summary_markdown(manifest, metrics)

    assert text.startswith("### skotergy against baseline: FASTER, exit 1\n")
    assert "| p50_delta_max | failed | The median end-to-end latency differs by" in text
    assert "|  | skotergy | baseline | difference | 95 % interval |\n|---|--:|--:|--:|--:|\n| e2el_ms p50 | " in text
    assert text.count("\n| output tok/s |") == 1


def test_the_summary_of_one_arm(checked):
    _, manifest, metrics = checked(arms={"candidate": "skotergy"})
    assert "|  | skotergy |\n|---|--:|\n" in summary_markdown(manifest, metrics)


def test_githubs_step_summary_is_appended_to(checked, monkeypatch, tmp_path):
    directory, manifest, metrics = checked()
    step = tmp_path / "step"
    step.write_text("before\n")
    monkeypatch.setenv(STEP_SUMMARY, str(step))
    write_outcome(directory, manifest, metrics)

    assert step.read_text() == "before\n" + (directory / "summary.md").read_text()
    assert ElementTree.parse(directory / "junit.xml").getroot().tag == "testsuites"


def test_without_github_there_are_the_two_files(checked, monkeypatch):
    directory, manifest, metrics = checked()
    monkeypatch.delenv(STEP_SUMMARY, raising=False)
    before = {path.name for path in directory.iterdir()}
    write_outcome(directory, manifest, metrics)
    assert {path.name for path in directory.iterdir()} - before == {"junit.xml", "summary.md"}


def test_a_step_summary_that_cannot_be_written(checked, monkeypatch, tmp_path):
    monkeypatch.setenv(STEP_SUMMARY, str(tmp_path))
    with pytest.raises(RecordError, match="GITHUB_STEP_SUMMARY names"):
        write_outcome(*checked())
