"""A run's directory: the rows of its parquet files, how they are written, and how they are read back.

Columns and clocks are those of metrics.md (`METRICS.md` in this repository). Times are `time.monotonic_ns`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from skote.types import Completion, RecordError

SCHEMA_VERSION = 1

REQUEST_SCHEMA = pa.schema(
    [
        ("run_id", pa.string()),
        ("arm", pa.string()),  # candidate | baseline
        ("engine", pa.string()),
        ("replica", pa.int32()),
        ("device", pa.string()),
        ("block", pa.int32()),
        ("round", pa.int32()),  # the pass's position in its block, 0 or 1
        ("phase", pa.string()),  # warmup | measure | drain
        ("request_id", pa.string()),
        ("scheduled_ns", pa.int64()),
        ("dispatched_ns", pa.int64()),
        ("admitted_ns", pa.int64()),
        ("first_token_ns", pa.int64()),
        ("last_token_ns", pa.int64()),
        ("end_ns", pa.int64()),
        ("input_tokens", pa.int32()),
        ("output_tokens", pa.int32()),
        ("first_chunk_tokens", pa.int32()),
        ("cached_tokens", pa.int32()),
        ("status", pa.string()),  # ok | error | cancelled
        ("finish_reason", pa.string()),
        ("error", pa.string()),
        ("workload_sha256", pa.string()),
        ("output_sha256", pa.string()),
    ]
)

TOKEN_SCHEMA = pa.schema(
    [
        ("arm", pa.string()),
        ("block", pa.int32()),
        ("round", pa.int32()),
        ("phase", pa.string()),
        ("request_id", pa.string()),
        ("index", pa.int32()),  # the chunk's position in its request
        ("t_ns", pa.int64()),
        ("n_tokens", pa.int32()),
    ]
)


@dataclass(frozen=True, slots=True)
class RowKey:
    """Where in a run a request ran."""

    arm: Literal["candidate", "baseline"]
    engine: str
    block: int
    round: int
    phase: Literal["warmup", "measure"]


@dataclass(frozen=True, slots=True)
class Run:
    """A run read back from its directory; the frames have the columns of `REQUEST_SCHEMA` and `TOKEN_SCHEMA`."""

    directory: Path
    requests: pd.DataFrame
    tokens: pd.DataFrame
    manifest: dict[str, Any]


def ids_sha256(ids: Iterable[int]) -> str:
    """SHA-256 of token ids, as little-endian int32."""
    digest = hashlib.sha256()
    for token in ids:
        digest.update(int(token).to_bytes(4, "little", signed=True))
    return digest.hexdigest()


class RunWriter:
    """Collects a run's rows and rewrites its parquet files whole, so that a killed run leaves readable files."""

    def __init__(self, directory: Path, run_id: str, workload_sha256: str) -> None:
        self.directory = directory
        self._run_id = run_id
        self._workload_sha256 = workload_sha256
        self._requests: list[dict[str, Any]] = []
        self._tokens: list[dict[str, Any]] = []

    def add(self, key: RowKey, scheduled_ns: int, completion: Completion) -> None:
        """Append one request's row, and a row for each of its chunks."""
        chunks = completion.chunks
        self._requests.append(
            {
                "run_id": self._run_id,
                "arm": key.arm,
                "engine": key.engine,
                "replica": completion.replica,
                "device": completion.device,
                "block": key.block,
                "round": key.round,
                "phase": key.phase,
                "request_id": completion.request_id,
                "scheduled_ns": scheduled_ns,
                "dispatched_ns": completion.dispatched_ns,
                "admitted_ns": completion.admitted_ns,
                "first_token_ns": chunks[0].t_ns if chunks else None,
                "last_token_ns": chunks[-1].t_ns if chunks else None,
                "end_ns": completion.end_ns,
                "input_tokens": completion.input_tokens,
                "output_tokens": len(completion.output_ids),
                "first_chunk_tokens": chunks[0].n_tokens if chunks else 0,
                "cached_tokens": completion.cached_tokens,
                "status": completion.status,
                "finish_reason": completion.finish_reason,
                "error": completion.error,
                "workload_sha256": self._workload_sha256,
                "output_sha256": ids_sha256(completion.output_ids),
            }
        )
        self._tokens.extend(
            {
                "arm": key.arm,
                "block": key.block,
                "round": key.round,
                "phase": key.phase,
                "request_id": completion.request_id,
                "index": index,
                "t_ns": chunk.t_ns,
                "n_tokens": chunk.n_tokens,
            }
            for index, chunk in enumerate(chunks)
        )

    def flush(self) -> None:
        """Write requests.parquet and tokens.parquet.

        Raises:
            RecordError: the disk is full or the folder cannot be written; the last flush's files stay as they were.
        """
        for name, rows, schema in (
            ("requests.parquet", self._requests, REQUEST_SCHEMA),
            ("tokens.parquet", self._tokens, TOKEN_SCHEMA),
        ):
            table = pa.Table.from_pylist(rows, schema=schema)
            _replace(self.directory / name, partial(pq.write_table, table))

    def write_json(self, name: str, content: dict[str, Any]) -> None:
        """Write `content` to `name` in the run's directory (manifest.json, metrics.json).

        Raises:
            RecordError: the file could not be written.
        """
        write_text(self.directory / name, json.dumps(content, indent=2, sort_keys=True, allow_nan=False) + "\n")


def write_text(path: Path, text: str) -> None:
    """Replace `path` by `text`, whole or not at all.

    Raises:
        RecordError: the file could not be written.
    """
    _replace(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def _replace(path: Path, write: Callable[[Path], object]) -> None:
    temporary = path.with_name(f".{path.name}.partial")
    try:
        write(temporary)
        temporary.replace(path)
    except OSError as error:
        raise RecordError(
            f"{path} could not be written ({error.strerror or error}): free some space, or choose another folder "
            "(for a run, hydra.run.dir=DIR)."
        ) from error
    finally:
        temporary.unlink(missing_ok=True)


def read_run(directory: Path) -> Run:
    """Read a run's directory.

    Raises:
        RecordError: a file is missing or unreadable, or was written by a newer version.
    """
    manifest = _read(directory / "manifest.json", lambda path: json.loads(path.read_text(encoding="utf-8")))
    requests, tokens = (_read(directory / name, pd.read_parquet) for name in ("requests.parquet", "tokens.parquet"))
    if manifest.get("schema_version") != SCHEMA_VERSION:
        raise RecordError(
            f"{directory} has schema version {manifest.get('schema_version')}, this Skotergy reads {SCHEMA_VERSION}."
        )
    if set(requests["run_id"]) - {manifest.get("run_id")}:
        raise RecordError(
            f"{directory} holds the requests of another run than its manifest's ({manifest.get('run_id')})."
        )
    return Run(directory, requests, tokens, manifest)


def _read(path: Path, read: Callable[[Path], Any]) -> Any:  # noqa: ANN401 (whatever the file holds)
    try:
        return read(path)
    except OSError as error:
        raise RecordError(f"{path} cannot be read: {error.strerror or error}.") from error
    except (ValueError, pa.ArrowException) as error:
        raise RecordError(f"{path} is damaged: {error}.") from error
