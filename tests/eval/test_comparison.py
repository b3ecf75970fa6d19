from __future__ import annotations

import re

import pytest

from skote.eval.comparison import read_comparison, render_comparison
from skote.eval.report import main, render_run
from skote.types import RecordError


@pytest.fixture
def build(synthetic, tmp_path):
    """`build("a", blocks=5)` writes a run into a folder of that name."""

    def write(name, timeline=None, **options):
        builder = synthetic(**({"requests": 4, "blocks": 5} | options))
        builder.directory = tmp_path / name
        return builder.write(timeline)

    return write


def words_of(path):
    text = re.sub(r"<style>.*?</style>", " ", path.read_text(encoding="utf-8"), flags=re.DOTALL)
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", text))


def test_each_run_keeps_its_own_verdict(build, tmp_path):
    runs = [build("a"), build("b", arms={"candidate": "baseline"})]
    path = render_comparison(read_comparison(runs), tmp_path)
    words = words_of(path)

    assert path == tmp_path / "comparison.html"
    assert words.count("FASTER") == 1
    assert words.count("SAME") + words.count("INCONCLUSIVE") == 1  # between the runs
    assert "one arm" in words
    assert "NOT COMPARABLE" not in words


def test_runs_link_to_reports_that_exist(build, tmp_path):
    runs = [build("with report"), build("without")]
    render_run(runs[0])
    html = render_comparison(read_comparison(runs), tmp_path).read_text(encoding="utf-8")

    assert re.findall(r'<a href="([^"]+)"', html) == ["with%20report/report.html"]


def test_different_workloads_and_machines_are_a_loud_note(build, tmp_path):
    other = build("b")
    manifest = (other / "manifest.json").read_text()
    (other / "manifest.json").write_text(manifest.replace("5b" * 32, "5c" * 32).replace("AMD EPYC 7B13", "Xeon"))
    words = words_of(render_comparison(read_comparison([build("a"), other]), tmp_path))

    assert "NOT COMPARABLE" in words
    assert "2 different workloads" in words
    assert "2 different machines (AMD EPYC 7B13, 2 cores, 8.00 GiB, no accelerator; Xeon" in words


def test_a_run_that_cannot_be_read_is_listed_with_the_reason(build, tmp_path):
    words = words_of(render_comparison(read_comparison([build("a"), tmp_path / "lost"]), tmp_path, name="both.html"))

    assert "1 run side by side" in words
    assert "lost/manifest.json cannot be read: No such file or directory." in words


def test_nothing_to_compare(tmp_path):
    with pytest.raises(RecordError, match="None of the 1 directories holds a readable run"):
        read_comparison([tmp_path / "lost"])


def changed(directory, old, new):
    path = directory / "manifest.json"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    return directory


@pytest.fixture
def steady(timeline):
    """Requests that take `ms` in the candidate and 1000 ms in the baseline, but for a little in each block."""

    def choose(ms):
        def of(arm, block, request):
            total = (ms if arm == "candidate" else 1000.0) * (1 + 0.001 * (block % 2))
            return timeline(0.2, total / 16, [total / 16] * 15)

        return of

    return choose


def test_candidates_are_compared_over_the_blocks_that_both_runs_have(build, steady):
    runs = [build("a", steady(500.0)), build("b", steady(450.0)), build("c", steady(550.0)), build("d", steady(500.0))]
    first, *others = read_comparison(runs).entries

    assert first.across is None
    assert [entry.across.verdict.label for entry in others] == ["FASTER", "SLOWER", "SAME"]
    assert [round(100 * entry.across.effect.center, 6) for entry in others] == [-10.0, 10.0, 0.0]


def test_a_run_with_fewer_blocks_is_compared_over_those(build, steady):
    runs = [build("a", steady(500.0), blocks=8), build("b", steady(450.0), blocks=6), build("c", blocks=4)]
    effects = [entry.across.effect for entry in read_comparison(runs).entries[1:]]
    assert [effect.blocks for effect in effects] == [6, 4]
    assert effects[1].refused == "too_few_blocks"


def test_no_verdict_across_machines_unless_asked_for(build, steady):
    runs = [build("a", steady(500.0)), changed(build("b", steady(450.0)), "AMD EPYC 7B13", "Xeon")]
    refused, asked = read_comparison(runs), read_comparison(runs, across_machines=True)

    assert (refused.entries[1].across.verdict, refused.entries[1].across.refused) == (None, "other hardware")
    assert "only the differences within a run hold" in refused.notes[0]
    assert asked.entries[1].across.verdict.label == "FASTER"
    assert "judges the machines as much as the engines" in asked.notes[0]


def test_machines_of_one_kind_may_have_other_names_and_a_little_more_memory(build):
    other = changed(changed(build("b"), "bench-01", "bench-02"), str(8 * 2**30), str(8 * 2**30 - 10**8))
    comparison = read_comparison([build("a"), other])
    assert comparison.notes == []
    assert comparison.entries[1].across.verdict is not None


def test_no_verdict_between_other_requests_or_with_an_invalid_run(build):
    other = changed(build("b"), "5b" * 32, "5c" * 32)
    invalid = build("c", manifest={"parity": None})
    found = [entry.across for entry in read_comparison([build("a"), other, invalid], across_machines=True).entries[1:]]
    assert [(each.verdict, each.refused) for each in found] == [(None, "other requests"), (None, "a run is invalid")]


def test_other_versions_and_other_code_are_remarked_on(build, tmp_path):
    other = changed(changed(build("b"), "2.13.0", "2.12.1"), "f82e541aa0c8", "0123456789ab")
    comparison = read_comparison([build("a"), other])

    assert comparison.remarks == [
        "The runs used different versions: torch 2.12.1 and 2.13.0.",
        "The runs are of 2 states of the code (0123456789ab, f82e541aa0c8).",
    ]
    assert comparison.notes == []
    words = words_of(render_comparison(comparison, tmp_path))
    assert "What else differs" in words
    assert "NOT COMPARABLE" not in words


def test_the_command_says_it_loudly_and_takes_across_machines(build, steady, tmp_path, capsys):
    runs = [build("a", steady(500.0)), changed(build("b", steady(450.0)), "AMD EPYC 7B13", "Xeon")]
    out = tmp_path / "both.html"
    for option, verdicts in (([], 2), (["--across-machines"], 3)):
        with pytest.raises(SystemExit) as ended:
            main([*map(str, runs), "--out", str(out), *option])
        assert ended.value.code == 0
        assert capsys.readouterr().err.startswith("NOT COMPARABLE: 2 different machines (AMD EPYC")
        assert words_of(out).count("FASTER") == verdicts
