from __future__ import annotations

import re

import pandas as pd
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

    links = ["with%20report/report.html", "with%20report/report.html#findings"]
    assert re.findall(r'<a href="([^"]+)"', html) == links
    assert 'id="findings"' in (runs[0] / "report.html").read_text(encoding="utf-8")


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
    for option, verdicts, code in (([], 2, 3), (["--across-machines"], 3, 0)):
        with pytest.raises(SystemExit) as ended:
            main([*map(str, runs), "--out", str(out), *option])
        assert ended.value.code == code
        assert capsys.readouterr().err.startswith("NOT COMPARABLE: 2 different machines (AMD EPYC")
        assert words_of(out).count("FASTER") == verdicts


def test_a_block_that_was_cut_short_compares_nothing(build, steady):
    """Blocks have numbers that both runs know; what counts is that they hold the same requests."""
    runs = [build("a", steady(500.0), blocks=6), build("b", steady(450.0), blocks=6)]
    rows = pd.read_parquet(runs[1] / "requests.parquet")
    lost = (rows.phase == "measure") & (rows.arm == "candidate") & (rows.block == 2) & (rows.request_id == "chat-03")
    rows[~lost].to_parquet(runs[1] / "requests.parquet")
    changed(runs[1], '"requests_per_block": 4', '"requests_per_block": 3')  # or the missing row makes the run invalid
    assert read_comparison(runs).entries[1].across.effect.blocks == 5


def test_runs_are_compared_over_the_requests_that_both_finished(build, timeline, tmp_path):
    """Two requests of a block take 100 ms, two 1000; where the latter fail, what is left looks five times fast."""

    def of(failing):
        def choose(arm, block, request):
            total = (1000.0 if request > 1 else 100.0) * (1 + 0.001 * (block % 2))
            return timeline(0.2, total / 16, [total / 16] * 15, ok=not (failing and arm == "candidate" and request > 1))

        return choose

    runs = [build("a", of(failing=False)), build("b", of(failing=True))]
    comparison = read_comparison(runs)
    across = comparison.entries[1].across

    assert (across.verdict.label, across.left_out) == ("SAME", 2 * 5)
    assert across.effect.center == pytest.approx(0)
    assert comparison.remarks == [
        "10 requests that only one of run 2 and run 1 finished are left out of their difference."
    ]
    assert "are left out of their difference" in words_of(render_comparison(comparison, tmp_path))


def test_no_verdict_between_other_weights(build, steady):
    other = changed(build("b", steady(450.0)), "cd" * 32, "ce" * 32)
    fewer = changed(build("c", steady(450.0)), "134515008", "99000000")
    changed(fewer, "cd" * 32, "00" * 32)
    changed(fewer, '"dtype": "fp32", "seed"', '"dtype": "bf16", "seed"')
    comparison = read_comparison([build("a", steady(500.0)), other, fewer])

    assert [entry.across.refused for entry in comparison.entries[1:]] == ["other weights", "other weights"]
    name = "SmolLM2-135M-Instruct"
    there = f"{name}, 134,515,008 parameters, cdcdcdcdcdcd there): it did other work."
    assert comparison.notes == [
        f"Run 2 had other weights than run 1 ({name}, 134,515,008 parameters, cececececece, and {there}",
        f"Run 3 had other weights than run 1 ({name}, 99,000,000 parameters, 000000000000, and {there}",
    ]


def test_another_dtype_and_unknown_weights_are_remarked_on(build, steady):
    """The hash of the same checkpoint differs by dtype, so it cannot tell; a hash that is missing cannot either."""
    other = changed(build("b", steady(450.0)), '"dtype": "fp32", "seed"', '"dtype": "bf16", "seed"')
    changed(other, "cd" * 32, "00" * 32)
    unknown = changed(build("c", steady(450.0)), f'"weights_sha256": "{"cd" * 32}"', '"weights_sha256": null')
    comparison = read_comparison([build("a", steady(500.0)), other, unknown])

    assert [entry.across.verdict.label for entry in comparison.entries[1:]] == ["FASTER", "FASTER"]
    assert comparison.notes == []
    assert comparison.remarks[0] == "The runs computed in different dtypes (bf16, fp32): that is in their difference."
    assert comparison.remarks[1:] == [
        "That run 2 and 3 had the weights of run 1 is assumed, not checked: there are no hashes of both in one dtype."
    ]


def test_no_verdict_with_a_run_that_did_not_come_to_its_end(build):
    comparison = read_comparison([build("a"), build("b", manifest={"status": "interrupted"})])
    assert comparison.entries[1].across.refused == "a run is incomplete"
    assert comparison.notes == ["Run 2 did not come to its end, so that its outputs were not judged."]


def test_the_exit_code_of_a_comparison_is_the_worst_reason_for_which_there_is_none(build):
    fine, other = build("a"), changed(build("b"), "5b" * 32, "5c" * 32)
    invalid = build("c", manifest={"parity": None})
    codes = [read_comparison([fine, *others]).exit_code for others in ([], [other], [other, invalid], [invalid])]
    assert codes == [0, 3, 2, 2]


def test_a_row_names_the_options_that_differ_its_threads_and_its_findings(build, tmp_path):
    one, two = build("a"), build("b", manifest={"parity": None})
    changed(two, '"name": "smollm2_135m"', '"name": "tiny"')
    changed(two, '"notes": []', '"notes": [], "flags": {"threads": 2}')
    comparison = read_comparison([one, two])

    assert [entry.options for entry in comparison.entries] == [("model=smollm2_135m",), ("model=tiny",)]
    assert [entry.threads for entry in comparison.entries] == ["", "2 threads"]
    severity, counts = comparison.entries[1].findings
    assert severity == "invalid"
    assert counts.startswith("1 invalid, ")
    words = words_of(render_comparison(comparison, tmp_path))
    assert "model=tiny" in words
    assert "fp32, cpu, 2 threads" in words
    assert counts in words
