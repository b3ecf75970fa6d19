from __future__ import annotations

import json

import pandas as pd
import pytest

from skote.eval.record import file_hashes, outputs_sha256, read_run
from skote.eval.report import main, render_run
from skote.eval.verify import differences
from skote.types import RecordError


def edit(path, change):
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


@pytest.fixture
def finished(synthetic):
    """A run whose manifest has the hashes, as one that came to its end."""
    directory = synthetic(requests=3).write()
    rows = read_run(directory).requests.to_dict("records")
    edit(
        directory / "manifest.json",
        lambda manifest: manifest.update(files=file_hashes(directory), outputs=outputs_sha256(rows)),
    )
    render_run(directory)
    return directory


def test_a_run_as_it_was_left_is_verified(finished, capsys):
    assert list(differences(finished)) == []
    with pytest.raises(SystemExit) as ended:
        main(["verify", str(finished)])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"{finished}: verified\n"


def test_every_changed_figure_is_named(finished, capsys):
    edit(finished / "metrics.json", lambda m: m["deltas"]["e2el_ms"]["p50"].update(verdict="SAME", delta_pct=-70.5))
    found = list(differences(finished))

    assert found[0].startswith("deltas.e2el_ms.p50.delta_pct: metrics.json says -70.5, the files give -")
    assert found[1:] == ['deltas.e2el_ms.p50.verdict: metrics.json says "SAME", the files give "FASTER".']
    with pytest.raises(SystemExit) as ended:
        main(["verify", str(finished)])
    assert ended.value.code == 1
    out, err = capsys.readouterr()
    assert out == f"{finished}: 2 differences\n"
    assert len(err.splitlines()) == 2


def test_the_last_digits_may_differ(finished):
    def nudge(metrics):
        metrics["deltas"]["e2el_ms"]["p50"]["delta_pct"] *= 1 + 1e-12

    edit(finished / "metrics.json", nudge)
    assert list(differences(finished)) == []


def test_figures_that_are_missing_or_made_up(finished):
    def change(metrics):
        del metrics["arms"]["candidate"]["tokens"]
        metrics["arms"]["candidate"]["speed"] = 9000

    edit(finished / "metrics.json", change)
    assert list(differences(finished)) == [
        "arms.candidate.speed: metrics.json has it, the files do not give it.",
        "arms.candidate.tokens: the files give it, metrics.json does not have it.",
    ]


def test_changed_rows_show_in_hash_outputs_and_figures(finished):
    rows = pd.read_parquet(finished / "requests.parquet")
    row = rows.index[(rows.phase == "measure") & (rows.arm == "candidate")][0]
    rows.loc[row, "output_sha256"] = "00" * 32
    rows.to_parquet(finished / "requests.parquet")
    found = list(differences(finished))

    assert found[0].startswith("requests.parquet: SHA-256 is ")
    assert found[1] == (
        "requests.parquet: the outputs of the candidate are not those that the manifest has the hash of."
    )
    assert any(sentence.startswith("findings: ") for sentence in found)


def test_files_that_came_and_went(finished):
    edit(finished / "manifest.json", lambda m: m["files"].update({"gone.parquet": "00" * 32}))
    pd.DataFrame({"a": [1]}).to_parquet(finished / "new.parquet")
    render_run(finished)
    assert list(differences(finished)) == [
        "gone.parquet: the manifest has its hash, the file is gone.",
        "new.parquet: the manifest does not know this file.",
    ]


def test_rows_of_another_workload(finished):
    edit(finished / "manifest.json", lambda m: m["workload"].update(sha256="ab" * 32))
    assert f"requests.parquet: rows of the workload {'5b' * 6}, the manifest says {'ab' * 6}." in differences(finished)


@pytest.mark.parametrize("version", [1, 2])
def test_without_hashes_a_run_is_not_verified(synthetic, capsys, version):
    """Version 1 had none; a complete run of today that has none has lost them."""
    directory = synthetic(requests=2, manifest={"schema_version": version, "stop": None}).write()
    edit(directory / "manifest.json", lambda m: m["workload"].update(repeated_prompts=0))
    render_run(directory)
    with pytest.raises(SystemExit) as ended:
        main(["verify", str(directory)])
    assert ended.value.code == version - 1
    out, err = capsys.readouterr()
    assert out == f"{directory}: {'figures verified; no hashes' if version == 1 else '2 differences'}\n"
    assert err.count("is missing, and every complete run has these hashes") == 2 * (version - 1)


def test_a_killed_run_has_no_hashes_to_lose(synthetic, capsys):
    changes = {"schema_version": 2, "stop": None, "status": "interrupted", "files": None, "outputs": None}
    directory = synthetic(requests=2, manifest=changes).write()
    edit(directory / "manifest.json", lambda m: m["workload"].update(repeated_prompts=0))
    render_run(directory)
    with pytest.raises(SystemExit) as ended:
        main(["verify", str(directory)])
    assert ended.value.code == 0
    assert capsys.readouterr().out.endswith(": figures verified; no hashes\n")


def test_hashes_that_were_emptied(finished):
    edit(finished / "manifest.json", lambda m: m.update(files={}, outputs={}))
    found = list(differences(finished))
    assert "requests.parquet: the manifest does not know this file." in found
    assert "requests.parquet: the outputs of the baseline are not those that the manifest has the hash of." in found


def test_a_page_that_was_edited_or_deleted(finished):
    page = finished / "report.html"
    text = page.read_text(encoding="utf-8")
    line = text[: text.index(">FASTER<")].count("\n") + 1
    page.write_text(text.replace(">FASTER<", ">TWICE AS FAST<", 1), encoding="utf-8")
    (said,) = differences(finished)
    assert said.startswith(f"report.html: line {line} says ")
    assert "TWICE AS" in said
    assert "FASTER" in said

    page.unlink()
    assert list(differences(finished)) == ["report.html: it is gone, and skote-report RUN_DIR writes it anew."]


def test_a_run_that_renders_no_page_needs_none(finished):
    edit(finished / "manifest.json", lambda m: m["config"].update(report={"render": False}))
    render_run(finished)
    (finished / "report.html").unlink()
    assert list(differences(finished)) == []


def test_a_manifest_that_was_edited(finished):
    """The host's name reaches no figure; how the file is indented is nobody's business."""
    edit(finished / "manifest.json", lambda m: None)
    assert list(differences(finished)) == []
    edit(finished / "manifest.json", lambda m: m["machine"].update(host="elsewhere"))
    assert [said.partition(":")[0] for said in differences(finished)][:1] == ["manifest_sha256"]


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda directory: (directory / "metrics.json").unlink(), "metrics.json cannot be read: No such file"),
        (lambda directory: (directory / "requests.parquet").unlink(), "requests.parquet cannot be read: No such file"),
        (lambda directory: (directory / "metrics.json").write_text("{"), "metrics.json is damaged"),
        (lambda directory: (directory / "tokens.parquet").write_bytes(b"PAR1"), "tokens.parquet is damaged"),
    ],
)
def test_what_cannot_be_read_is_one_sentence(finished, damage, said, capsys):
    damage(finished)
    with pytest.raises(RecordError, match=said):
        list(differences(finished))
    with pytest.raises(SystemExit) as ended:
        main(["verify", str(finished)])
    assert ended.value.code == 1
    assert len(capsys.readouterr().err.splitlines()) == 1
