"""The records of a file, one by one and with their numbers, whatever the file's form and compression.

Nothing here holds more than one record and one piece of the file, however large it is.
"""

from __future__ import annotations

import codecs
import csv
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from skote.types import UsageError

PIECE_BYTES = 1 << 20
MOST_RECORD_BYTES = 1 << 28
"""A record longer than this is no record: the file is of another form than its name says."""
_COMPRESSION = {".gz": "gzip", ".zst": "zstd"}


class Entry(NamedTuple):
    """A record and its place in the file ("line 7", "entry 7"); where it cannot be read, why."""

    place: str
    record: dict[str, Any]
    fault: str | None = None


def read_records(path: Path) -> Iterator[Entry]:
    """The records of a .csv, .parquet, .json (a list) or .jsonl file; the last three also with .gz or .zst behind.

    Raises:
        UsageError: the file cannot be read, or has another form.
    """
    suffixes = [suffix.lower() for suffix in path.suffixes]
    form = next((suffix for suffix in reversed(suffixes) if suffix not in _COMPRESSION), "")
    try:
        if form == ".parquet":
            yield from _parquet(path)
        elif form == ".csv":
            yield from _csv(path)
        elif form == ".json" and _begins_as_list(path):
            yield from _json_list(path)
        else:
            yield from _json_lines(path)
    except (OSError, pa.ArrowException) as error:
        reason = getattr(error, "strerror", None) or str(error).splitlines()[0].rstrip(".")
        raise UsageError(f"workload.source.path={path} cannot be read: {reason}.") from error


def _pieces(path: Path) -> Iterator[bytes]:
    with pa.input_stream(str(path), compression=_COMPRESSION.get(path.suffix.lower())) as stream:
        while piece := stream.read(PIECE_BYTES):
            yield piece


def _lines(path: Path) -> Iterator[bytes]:
    """The lines of a file, with their ends."""
    rest: list[bytes] = []
    for piece in _pieces(path):
        *whole, last = piece.split(b"\n")
        for line in whole:
            yield b"".join((*rest, line, b"\n"))
            rest = []
        rest.append(last)
        if sum(map(len, rest)) > MOST_RECORD_BYTES:
            raise UsageError(f"workload.source.path={path} has a line of more than {MOST_RECORD_BYTES:,} bytes.")
    if any(rest):
        yield b"".join(rest)


def _json_lines(path: Path) -> Iterator[Entry]:
    for number, line in enumerate(_lines(path), start=1):
        if line.strip():
            yield _entry(f"line {number}", line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line)


def _entry(place: str, text: bytes) -> Entry:
    try:
        record = json.loads(text.decode())
    except UnicodeDecodeError as error:
        return Entry(place, {}, f"it is not UTF-8 ({error.reason} at byte {error.start})")
    except ValueError as error:
        return Entry(place, {}, f"it is not JSON ({error})")
    except RecursionError:
        return Entry(place, {}, "its JSON is nested too deep")
    return _mapping(place, record)


def _mapping(place: str, record: object) -> Entry:
    if not isinstance(record, dict):
        return Entry(place, {}, f"it is a {type(record).__name__}, not a mapping of keys to values")
    return Entry(place, record)


def _csv(path: Path) -> Iterator[Entry]:
    broken: list[int] = []

    def text() -> Iterator[str]:
        for number, line in enumerate(_lines(path), start=1):
            try:
                yield line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError:
                broken.append(number)
                yield line.decode("utf-8", "replace")

    reader = csv.reader(text(), strict=True)
    header: list[str] = []
    while True:
        try:
            fields = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            yield Entry(f"line {reader.line_num}", {}, f"it is not CSV ({error})")
            continue
        place = f"line {reader.line_num}"
        if not any(fields):
            continue
        if broken:
            broken.clear()
            yield Entry(place, {}, "it is not UTF-8")
        elif not header:
            header = [name.strip() for name in fields]
        elif len(fields) != len(header):
            yield Entry(place, {}, f"it has {len(fields)} fields, and the header has {len(header)}")
        else:
            yield Entry(place, dict(zip(header, fields, strict=True)))


def _parquet(path: Path) -> Iterator[Entry]:
    number = 0
    for batch in pq.ParquetFile(path).iter_batches(batch_size=4096):
        for record in batch.to_pylist():
            number += 1
            yield Entry(f"entry {number}", record)


def _begins_as_list(path: Path) -> bool:
    first = next(_pieces(path), b"")
    return first.removeprefix(b"\xef\xbb\xbf").lstrip()[:1] == b"["


def _json_list(path: Path) -> Iterator[Entry]:
    """The entries of one JSON list, which need not fit into memory.

    A decoder takes one entry after the other from a buffer that grows by a piece wherever an entry is not whole yet.
    """
    decode = json.JSONDecoder().raw_decode
    number, buffer, opened, ended = 0, "", False, False
    for text in _text(path):
        buffer += text
        if not opened:
            buffer, opened = buffer.lstrip()[1:], True  # its "["
        while buffer := buffer.lstrip(" \t\r\n,"):
            if buffer.startswith("]"):
                ended, buffer = True, buffer[1:]
                continue
            try:
                record, end = decode(buffer)
            except ValueError:
                break
            number += 1
            yield _mapping(f"entry {number}", record)
            buffer = buffer[end:]
        if len(buffer) > MOST_RECORD_BYTES:
            break
    if buffer or not ended:
        raise UsageError(f"workload.source.path={path}: entry {number + 1} of its JSON list is cut off or not JSON.")


def _text(path: Path) -> Iterator[str]:
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    try:
        for piece in _pieces(path):
            yield decoder.decode(piece)
        yield decoder.decode(b"", final=True)
    except UnicodeDecodeError as error:
        raise UsageError(f"workload.source.path={path} is not UTF-8 text: {error.reason}.") from error
