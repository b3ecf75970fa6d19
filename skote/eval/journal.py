"""The journal of a pass: a line a request that finished, until its rows are in the parquet files.

Rows are written to parquet between passes, where nothing is timed. A process that is killed in the middle of a pass
leaves the requests that had finished here; `recover` puts them where they belong.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from skote.eval.record import REQUEST_SCHEMA, TOKEN_SCHEMA, RowKey, replace_file, request_row, token_rows, unwritten
from skote.types import Chunk, Completion, RecordError

NAME = "unflushed.jsonl"


class Journal:
    """Appends to `unflushed.jsonl` in a run's directory; the file is there while it has something to say."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / NAME
        self._descriptor: int | None = None

    def note(self, key: RowKey, scheduled_ns: int, completion: Completion) -> None:
        """Append a request that has finished, straight to the system: what is buffered dies with the process.

        Raises:
            RecordError: it could not be written.
        """
        chunks = [number for chunk in completion.chunks for number in (chunk.t_ns, chunk.n_tokens)]
        facts = {name: getattr(completion, name) for name in _PLAIN}
        line = {"key": asdict(key), "scheduled_ns": scheduled_ns, "chunks": chunks, **facts}
        try:
            if self._descriptor is None:
                self._descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            os.write(self._descriptor, json.dumps(line).encode() + b"\n")
        except OSError as error:
            raise unwritten(self._path, error) from error

    def clear(self) -> None:
        """Forget what was noted: it is in the parquet files now."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
        self._path.unlink(missing_ok=True)


_PLAIN = (
    "request_id", "input_tokens", "output_ids", "dispatched_ns", "admitted_ns", "end_ns", "status", "finish_reason",
    "error", "replica", "device", "cached_tokens",
)  # fmt: skip


def recover(directory: Path) -> int:
    """Move what a killed run in `directory` left in its journal into its parquet files; how many requests that were.

    Raises:
        RecordError: the files cannot be read or written.
    """
    path = directory / NAME
    if not path.exists():
        return 0
    try:
        noted = list(_lines(path.read_text(encoding="utf-8")))
        manifest = json.loads((directory / "manifest.json").read_text(encoding="utf-8"))
        run_id, workload = manifest["run_id"], manifest["workload"]["sha256"]
        requests = [request_row(run_id, workload, *each) for each in noted]
        tokens = [row for key, _, completion in noted for row in token_rows(key, completion)]
        for name, rows, schema in (
            ("requests.parquet", requests, REQUEST_SCHEMA),
            ("tokens.parquet", tokens, TOKEN_SCHEMA),
        ):
            written = pq.read_table(directory / name, schema=schema)
            known = set(map(_identity, written.select(list(_IDENTITY)).to_pylist()))
            missing = [row for row in rows if _identity(row) not in known]  # the kill may fall between the two files
            table = pa.concat_tables([written, pa.Table.from_pylist(missing, schema=schema)])
            replace_file(directory / name, partial(pq.write_table, table))
    except OSError as error:
        raise RecordError(f"{directory} cannot be recovered: {error.strerror or error}.") from error
    except (ValueError, pa.ArrowException) as error:
        raise RecordError(f"{directory} cannot be recovered, a file is damaged: {error}.") from error
    path.unlink()
    return len(noted)


_IDENTITY = ("arm", "block", "round", "phase", "request_id")


def _identity(row: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(row[name] for name in _IDENTITY)


def _lines(text: str) -> Iterator[tuple[RowKey, int, Completion]]:
    """What was noted; the last line may have been cut off, as it then does not end."""
    for line in text.splitlines(keepends=True):
        if not line.endswith("\n"):
            return
        content = json.loads(line)
        flat = content.pop("chunks")
        chunks = tuple(Chunk(t_ns, n_tokens) for t_ns, n_tokens in zip(flat[::2], flat[1::2], strict=True))
        key, scheduled_ns = RowKey(**content.pop("key")), content.pop("scheduled_ns")
        yield key, scheduled_ns, Completion(chunks=chunks, **content | {"output_ids": tuple(content["output_ids"])})
