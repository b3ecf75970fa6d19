from __future__ import annotations

import re

import pytest

from skote.eval.comparison import render_comparison
from skote.eval.report import render_run
from skote.types import RecordError


@pytest.fixture
def build(synthetic, tmp_path):
    """`build("a", blocks=5)` writes a run into a folder of that name."""

    def write(name, **options):
        builder = synthetic(**({"requests": 4, "blocks": 5} | options))
        builder.directory = tmp_path / name
        return builder.write()

    return write


def words_of(path):
    text = re.sub(r"<style>.*?</style>", " ", path.read_text(encoding="utf-8"), flags=re.DOTALL)
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", text))


def test_each_run_keeps_its_own_verdict(build, tmp_path):
    runs = [build("a"), build("b", arms={"candidate": "baseline"})]
    path = render_comparison(runs, tmp_path)
    words = words_of(path)

    assert path == tmp_path / "comparison.html"
    assert words.count("FASTER") == 1
    assert "one arm" in words
    assert "NOT COMPARABLE" not in words


def test_runs_link_to_reports_that_exist(build, tmp_path):
    runs = [build("with report"), build("without")]
    render_run(runs[0])
    html = render_comparison(runs, tmp_path).read_text(encoding="utf-8")

    assert re.findall(r'<a href="([^"]+)"', html) == ["with%20report/report.html"]


def test_different_workloads_and_machines_are_a_loud_note(build, tmp_path):
    other = build("b")
    manifest = (other / "manifest.json").read_text()
    (other / "manifest.json").write_text(manifest.replace("5b" * 32, "5c" * 32).replace("AMD EPYC 7B13", "Xeon"))
    words = words_of(render_comparison([build("a"), other], tmp_path))

    assert "NOT COMPARABLE" in words
    assert "2 different workloads" in words
    assert "2 different machines (AMD EPYC 7B13, 2 cores, 8.00 GiB, no accelerator; Xeon" in words


def test_a_run_that_cannot_be_read_is_listed_with_the_reason(build, tmp_path):
    words = words_of(render_comparison([build("a"), tmp_path / "lost"], tmp_path, name="both.html"))

    assert "1 run side by side" in words
    assert "lost/manifest.json cannot be read: No such file or directory." in words


def test_nothing_to_compare(tmp_path):
    with pytest.raises(RecordError, match="None of the 1 directories holds a readable run"):
        render_comparison([tmp_path / "lost"], tmp_path)
