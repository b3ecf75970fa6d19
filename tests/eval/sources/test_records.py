from __future__ import annotations

import gzip
import json
import tracemalloc
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from skote.eval.sources import records
from skote.eval.sources.records import Entry, read_records
from skote.types import UsageError

ROWS = [{"a": 1}, {"a": "ü\u0007 \U0001f600\x85"}, {"a": [1, {"b": None}]}]


def write(path: Path, content: bytes) -> Path:
    """The content as the name's last suffix says: .gz, .zst, or as it is."""
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(content))
    elif path.suffix == ".zst":
        with pa.output_stream(str(path), compression="zstd") as stream:
            stream.write(content)
    else:
        path.write_bytes(content)
    return path


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.jsonl.gz", "rows.jsonl.zst", "rows.json", "rows"])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_json_lines_have_their_line_numbers(tmp_path, name, end):
    lines = [json.dumps(row, ensure_ascii=False) for row in ROWS]
    path = write(tmp_path / name, (lines[0] + end * 3 + end.join(lines[1:])).encode())
    assert list(read_records(path)) == [
        Entry(f"line {number}", row) for number, row in zip((1, 4, 5), ROWS, strict=True)
    ]


@pytest.mark.parametrize("piece", [1, 3, 1 << 20])
@pytest.mark.parametrize("name", ["rows.json", "rows.json.gz"])
@pytest.mark.parametrize("indent", [None, 2])
def test_a_json_list_is_read_entry_by_entry_wherever_a_piece_ends(tmp_path, monkeypatch, piece, name, indent):
    monkeypatch.setattr(records, "PIECE_BYTES", piece)
    path = write(tmp_path / name, json.dumps(ROWS, indent=indent, ensure_ascii=False).encode())
    assert [entry.record for entry in read_records(path)] == ROWS


def test_a_list_of_one_gigabyte_would_not_be_held(tmp_path, monkeypatch):
    """The first entry comes before the second piece is read."""
    read: list[bytes] = []
    pieces = records._pieces
    monkeypatch.setattr(records, "PIECE_BYTES", 64)
    monkeypatch.setattr(records, "_pieces", lambda path: (read.append(piece) or piece for piece in pieces(path)))
    path = write(tmp_path / "rows.json", json.dumps([{"a": "x" * 20}] * 1000).encode())
    next(read_records(path))
    assert len(read) <= 2  # one to look how the file begins, one to read


def test_long_files_of_lines_are_read_piece_by_piece(tmp_path):
    path = write(tmp_path / "rows.jsonl", json.dumps({"prompt": "x" * 10_000}).encode() + b"\n")
    path.write_bytes(path.read_bytes() * 4000)  # 40 MB
    tracemalloc.start()
    try:
        count = sum(1 for _ in read_records(path))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert count == 4000
    assert peak < 8_000_000


def test_csv_has_the_lines_of_the_file_and_quoted_line_ends(tmp_path):
    path = write(tmp_path / "rows.csv", b'\xef\xbb\xbfa, b\r\n1,"x\ny"\r\n\r\n2,z\r\n')
    assert list(read_records(path)) == [Entry("line 3", {"a": "1", "b": "x\ny"}), Entry("line 5", {"a": "2", "b": "z"})]


def test_parquet_rows_are_entries(tmp_path):
    pq.write_table(pa.table({"a": [1, 2]}), tmp_path / "rows.parquet")
    assert list(read_records(tmp_path / "rows.parquet")) == [Entry("entry 1", {"a": 1}), Entry("entry 2", {"a": 2})]


@pytest.mark.parametrize(
    ("name", "content", "place", "fault"),
    [
        ("rows.jsonl", b'{"a": 1}\n{"a": \n', "line 2", "it is not JSON"),
        ("rows.jsonl", b'{"a": 1}\n"text"\n', "line 2", "it is a str, not a mapping"),
        ("rows.jsonl", b'{"a": 1}\n{"a": "\xff"}\n', "line 2", "it is not UTF-8 (invalid start byte at byte 7)"),
        ("rows.jsonl", b'{"a": 1}\n' + b"[" * 200_000, "line 2", "its JSON is nested too deep"),
        ("rows.json", b'[{"a": 1}, 7]', "entry 2", "it is a int, not a mapping"),
        ("rows.csv", b"a,b\n1,2\n3\n", "line 3", "it has 1 fields, and the header has 2"),
        ("rows.csv", b"a,b\n1,2\n\xff,3\n", "line 3", "it is not UTF-8"),
        ("rows.csv", b'a,b\n1,2\n"3"x,4\n', "line 3", "it is not CSV"),
    ],
)
def test_a_broken_record_is_named_and_the_others_are_read(tmp_path, name, content, place, fault):
    good, bad = read_records(write(tmp_path / name, content))
    assert good.fault is None
    assert (bad.place, bad.record) == (place, {})
    assert bad.fault is not None
    assert bad.fault.startswith(fault)


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("rows.json", b'[{"a": 1}, {"a":', r"entry 2 of its JSON list is cut off or not JSON"),
        ("rows.json", b'[{"a": 1}', r"entry 2 of its JSON list is cut off"),
        ("rows.json", b'[{"a": "\xff"}]', r"is not UTF-8 text: invalid start byte"),
        ("rows.parquet", b"PAR1", r"cannot be read: "),
    ],
)
def test_a_file_that_cannot_be_gone_through_is_refused(tmp_path, name, content, sentence):
    with pytest.raises(UsageError, match=sentence):
        list(read_records(write(tmp_path / name, content)))


def test_a_file_that_is_not_there_or_cut_off_is_named(tmp_path):
    with pytest.raises(UsageError, match=r"workload\.source\.path=\S+none\.jsonl cannot be read: .*No such file"):
        list(read_records(tmp_path / "none.jsonl"))
    whole = gzip.compress(json.dumps({"a": "x"}).encode())
    (tmp_path / "cut.jsonl.gz").write_bytes(whole[:-9])
    with pytest.raises(UsageError, match=r"cut\.jsonl\.gz cannot be read: Truncated compressed stream\."):
        list(read_records(tmp_path / "cut.jsonl.gz"))


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.csv", "rows.json"])
def test_an_empty_file_has_no_records(tmp_path, name):
    assert list(read_records(write(tmp_path / name, b""))) == []


def test_a_line_without_end_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(records, "MOST_RECORD_BYTES", 100)
    monkeypatch.setattr(records, "PIECE_BYTES", 64)
    with pytest.raises(UsageError, match="a line of more than 100 bytes"):
        list(read_records(write(tmp_path / "rows.jsonl", b'{"a": "' + b"x" * 300)))
