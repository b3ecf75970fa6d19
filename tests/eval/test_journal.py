from __future__ import annotations

import json

import pandas as pd
import pytest

from skote.eval.journal import NAME, Journal, recover
from skote.eval.record import RowKey, RunWriter, read_run
from skote.eval.report import render_run
from skote.types import Chunk, Completion, RecordError

KEY = RowKey("candidate", "skotergy", 6, 0, "measure")


def completion(name, start=10**12):
    chunks = tuple(Chunk(start + index * 10**6, 1 + index) for index in range(3))
    return Completion(name, 5, (7, 8, 9, 10, 11, 12), chunks, start - 10, start - 5, start + 10**7, "ok", "length")


@pytest.fixture
def killed(synthetic):
    """A run that was killed in block 6, when two requests had finished."""
    directory = synthetic(requests=2).write()
    manifest = json.loads((directory / "manifest.json").read_text()) | {"status": "interrupted", "passes": []}
    (directory / "manifest.json").write_text(json.dumps(manifest))
    journal = Journal(directory)
    journal.note(KEY, 10**12 - 20, completion("a"))
    journal.note(KEY, 2 * 10**12 - 20, completion("b", 2 * 10**12))
    return directory


def test_what_had_finished_becomes_the_rows_that_the_writer_writes(killed, tmp_path):
    before = len(read_run(killed).requests)
    assert recover(killed) == 2
    assert not (killed / NAME).exists()

    writer = RunWriter(tmp_path, "run", "5b" * 32)
    writer.add(KEY, 10**12 - 20, completion("a"))
    writer.add(KEY, 2 * 10**12 - 20, completion("b", 2 * 10**12))
    writer.flush()
    for name, rows in (("requests.parquet", 2), ("tokens.parquet", 6)):
        recovered = pd.read_parquet(killed / name).tail(rows).reset_index(drop=True)
        pd.testing.assert_frame_equal(recovered, pd.read_parquet(tmp_path / name))
    assert len(read_run(killed).requests) == before + 2
    assert recover(killed) == 0


def test_the_report_of_a_killed_run_has_them(killed):
    metrics = render_run(killed)[1]
    assert metrics["arms"]["candidate"]["requests"]["ok"] == 6 * 2 + 2
    assert metrics["exit_code"] != 0


def test_a_line_that_was_cut_off_is_no_request(killed):
    text = (killed / NAME).read_text()
    (killed / NAME).write_text(text[:-30])
    assert recover(killed) == 1
    assert list(read_run(killed).requests.request_id)[-1:] == ["a"]


def test_rows_that_are_written_already_are_not_doubled(killed):
    text = (killed / NAME).read_text()
    recover(killed)
    rows = len(read_run(killed).requests), len(read_run(killed).tokens)
    (killed / NAME).write_text(text)
    recover(killed)
    assert (len(read_run(killed).requests), len(read_run(killed).tokens)) == rows


def test_a_journal_that_was_cleared_is_gone_and_goes_on(tmp_path):
    journal = Journal(tmp_path)
    journal.clear()
    journal.note(KEY, 1, completion("a"))
    journal.clear()
    assert list(tmp_path.iterdir()) == []
    journal.note(KEY, 1, completion("b"))
    assert (tmp_path / NAME).read_text().count("\n") == 1
    journal.clear()


def test_what_cannot_be_written_or_understood_is_one_sentence(killed, tmp_path):
    with pytest.raises(RecordError, match=r"unflushed\.jsonl could not be written"):
        Journal(tmp_path / "nowhere").note(KEY, 1, completion("a"))
    (killed / NAME).write_text("nonsense\n")
    with pytest.raises(RecordError, match="cannot be recovered, a file is damaged"):
        recover(killed)
