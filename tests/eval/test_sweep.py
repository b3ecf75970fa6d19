from __future__ import annotations

import json
from pathlib import Path

import pytest

from skote.eval.record import file_hashes
from skote.eval.sweep import Cell, Sweep, cell_key, finished_code, read_sweep, shuffled
from skote.types import ExitCode, UsageError


def test_the_record_is_read_as_it_was_written(tmp_path):
    sweep = Sweep(tmp_path, ["-m", "seed=1,2"], 7, [Cell("1", ["seed=2"], "done", 0), Cell("0", ["seed=1"])])
    sweep.write()
    assert read_sweep(tmp_path) == sweep
    assert sweep.troubled() == []
    assert [sweep.name_of(cell) for cell in sweep.cells] == ["1 (seed=2)", "0 (seed=1)"]


def test_a_job_is_called_by_what_it_does_not_share():
    cells = [Cell("0", ["a=1", "b=1"]), Cell("1", ["a=1", "b=2"])]
    assert Sweep(Path(), [], 0, cells).name_of(cells[1]) == "1 (b=2)"
    assert Sweep(Path(), [], 0, cells[:1]).name_of(cells[0]) == "0"


@pytest.mark.parametrize(
    ("code", "said", "state"),
    [(0, None, "done"), (3, None, "done"), (4, "A sentence.", "failed"), (130, "Interrupted.", "interrupted")],
)
def test_how_a_job_ended(code, said, state):
    cell = Cell("0", [])
    cell.end(ExitCode(code), said)
    assert (cell.state, cell.exit_code, cell.sentence) == (state, code, said)


def test_the_worst_code_is_that_of_the_jobs_that_ran():
    cells = [Cell("0", [], "done", 0), Cell("1", [], "done", 3), Cell("2", [], "failed", 4, "No."), Cell("3", [])]
    assert Sweep(Path(), [], 0, cells).worst() == 4
    assert Sweep(Path(), [], 0, cells[3:]).worst() == 0


def test_the_order_is_drawn_from_the_seed():
    items = list(range(20))
    assert shuffled(items, 1) == shuffled(items, 1) != shuffled(items, 2)
    assert sorted(shuffled(items, 1)) == items
    orders = [tuple(shuffled([0, 1, 2], seed)) for seed in range(600)]
    counts = [orders.count(order) for order in sorted(set(orders))]
    # Chi-square of 6 equal shares, 5 degrees of freedom: 20.5 is exceeded in one of a thousand.
    assert len(counts) == 6
    assert sum((count - 100) ** 2 / 100 for count in counts) < 20.5


def test_a_key_is_the_configuration_and_the_requests():
    key = cell_key({"a": 1, "b": [1, 2]}, "ab")
    assert key == cell_key({"b": [1, 2], "a": 1}, "ab")
    assert len({key, cell_key({"a": 1, "b": [2, 1]}, "ab"), cell_key({"a": 1, "b": [1, 2]}, "ac")}) == 3


@pytest.fixture
def finished(synthetic):
    directory = synthetic(requests=1, blocks=1).write()
    manifest = json.loads((directory / "manifest.json").read_text())
    manifest |= {"cell_key": "key", "files": file_hashes(directory)}
    (directory / "manifest.json").write_text(json.dumps(manifest))
    (directory / "metrics.json").write_text(json.dumps({"exit_code": 3}))
    return directory


def test_a_job_that_came_to_its_end_is_kept_with_its_code(finished):
    assert finished_code(finished, "key") == 3


@pytest.mark.parametrize(
    "change",
    [
        lambda d: (d / "metrics.json").unlink(),
        lambda d: (d / "manifest.json").write_text("{"),
        lambda d: (d / "requests.parquet").write_bytes(b""),
        lambda d: (d / "tokens.parquet").unlink(),
        lambda d: (d / "manifest.json").write_text((d / "manifest.json").read_text().replace("complete", "failed")),
    ],
    ids=["no metrics", "half a manifest", "emptied rows", "no tokens", "failed"],
)
def test_any_other_runs_again(finished, change):
    change(finished)
    assert finished_code(finished, "key") is None


def test_another_configuration_runs_again(finished, tmp_path):
    assert finished_code(finished, "other") is None
    assert finished_code(tmp_path / "nowhere", "key") is None


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, r"needs the directory of a sweep \(-m\) or a search, with its sweep.json or search.json: No such file"),
        ("{", r"sweep.json is damaged"),
        ("[]", r"start it anew"),
        ('{"schema_version": 99}', r"was not written by this version"),
    ],
)
def test_a_directory_without_a_readable_record(tmp_path, content, said):
    if content is not None:
        (tmp_path / "sweep.json").write_text(content)
    with pytest.raises(UsageError, match=said):
        read_sweep(tmp_path)
