"""A run's directory: the rows of its parquet files, how they are written, and how they are read back.

Columns and clocks are those of metrics.md (`METRICS.md` in this repository). Times are `time.monotonic_ns`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from skote.eval.schema_version import migrate
from skote.types import Completion, RecordError

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

TELEMETRY_SCHEMA = pa.schema(
    [
        ("t_ns", pa.int64()),  # time.monotonic_ns
        ("device", pa.string()),  # host | cuda:0 ...; a row a sample and device
        ("sm_clock_mhz", pa.int32()),
        ("memory_clock_mhz", pa.int32()),
        ("power_w", pa.float64()),
        ("energy_j", pa.float64()),  # since the driver was loaded
        ("temperature_c", pa.int32()),
        ("throttle_reasons", pa.int64()),  # NVML's bits
        ("foreign_processes", pa.int32()),
        ("memory_used_bytes", pa.int64()),
        ("load_1m", pa.float64()),
        ("cpu_busy_share", pa.float64()),
        ("cpu_clock_mhz", pa.float64()),
        ("wall_offset_ns", pa.int64()),
    ]
)


def no_telemetry() -> pd.DataFrame:
    """A frame with the columns of telemetry.parquet and no row: of a run that was not sampled."""
    frame: pd.DataFrame = TELEMETRY_SCHEMA.empty_table().to_pandas()
    return frame


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
    """A run read back from its directory; the frames have the columns of the three schemas."""

    directory: Path
    requests: pd.DataFrame
    tokens: pd.DataFrame
    manifest: dict[str, Any]
    telemetry: pd.DataFrame = field(default_factory=no_telemetry)


def ids_sha256(ids: Iterable[int]) -> str:
    """SHA-256 of token ids, as little-endian int32."""
    digest = hashlib.sha256()
    for token in ids:
        digest.update(int(token).to_bytes(4, "little", signed=True))
    return digest.hexdigest()


def request_row(
    run_id: str, workload_sha256: str, key: RowKey, scheduled_ns: int, completion: Completion
) -> dict[str, Any]:
    """A row of requests.parquet."""
    chunks = completion.chunks
    return {
        "run_id": run_id,
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
        "workload_sha256": workload_sha256,
        "output_sha256": ids_sha256(completion.output_ids),
    }


def token_rows(key: RowKey, completion: Completion) -> list[dict[str, Any]]:
    """A request's rows of tokens.parquet, one a chunk."""
    return [
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
        for index, chunk in enumerate(completion.chunks)
    ]


def clear_run(directory: Path) -> None:
    """Remove what an earlier run has left in `directory`: none of it may pass for this one's.

    Raises:
        RecordError: a file cannot be removed.
    """
    for pattern in ("*.parquet", "metrics.json", "report.html", "junit.xml", "summary.md", "unflushed.jsonl"):
        for path in directory.glob(pattern):
            try:
                path.unlink()
            except OSError as error:
                raise RecordError(f"{path} of an earlier run cannot be removed: {error.strerror or error}.") from error


def file_hashes(directory: Path) -> dict[str, str]:
    """SHA-256 of each parquet file in `directory`, by name."""
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(directory.glob("*.parquet"))}


def manifest_sha256(manifest: dict[str, Any]) -> str:
    """SHA-256 of a manifest's content, as JSON with sorted keys: however the file is indented."""
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def outputs_sha256(rows: Iterable[dict[str, Any]]) -> dict[str, str]:
    """SHA-256 over what each arm put out when it was measured: lines of request id and output hash, sorted."""
    lines: dict[str, list[str]] = {}
    for row in rows:
        if row["phase"] == "measure":
            lines.setdefault(row["arm"], []).append(f"{row['request_id']} {row['output_sha256']}\n")
    return {arm: hashlib.sha256("".join(sorted(each)).encode()).hexdigest() for arm, each in lines.items()}


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
        self._requests.append(request_row(self._run_id, self._workload_sha256, key, scheduled_ns, completion))
        self._tokens.extend(token_rows(key, completion))

    def extend_workload(self, sha256: str) -> None:
        """The run measures more than the workload of before: all of its rows are of the one with this hash."""
        self._workload_sha256 = sha256
        for row in self._requests:
            row["workload_sha256"] = sha256

    def hashes(self) -> dict[str, dict[str, str]]:
        """The manifest's entries "files" and "outputs": of the parquet files as they lie there, and of the outputs."""
        return {"files": file_hashes(self.directory), "outputs": outputs_sha256(self._requests)}

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
            replace_file(self.directory / name, partial(pq.write_table, table))

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
    replace_file(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def replace_file(path: Path, write: Callable[[Path], object]) -> None:
    """Replace `path` by what `write` writes to the path that it is given, whole or not at all.

    Raises:
        RecordError: the file could not be written.
    """
    temporary = path.with_name(f".{path.name}.partial")
    try:
        write(temporary)
        temporary.replace(path)
    except OSError as error:
        raise unwritten(path, error) from error
    finally:
        temporary.unlink(missing_ok=True)


def unwritten(path: Path, error: OSError) -> RecordError:
    """What to raise where `path` could not be written for `error`."""
    return RecordError(
        f"{path} could not be written ({error.strerror or error}): free some space, or choose another folder "
        "(for a run, hydra.run.dir=DIR)."
    )


def read_run(directory: Path) -> Run:
    """Read a run's directory.

    Raises:
        RecordError: a file is missing or unreadable, or was written by a newer version.
    """
    manifest = _read(directory / "manifest.json", lambda path: json.loads(path.read_text(encoding="utf-8")))
    requests = _read(directory / "requests.parquet", pd.read_parquet)
    tokens = _read(directory / "tokens.parquet", _read_tokens)
    manifest = migrate(manifest, str(directory))
    if set(requests["run_id"]) - {manifest.get("run_id")}:
        raise RecordError(
            f"{directory} holds the requests of another run than its manifest's ({manifest.get('run_id')})."
        )
    sampled = directory / "telemetry.parquet"
    return Run(
        directory, requests, tokens, manifest, _read(sampled, pd.read_parquet) if sampled.exists() else no_telemetry()
    )


def _read_tokens(path: Path) -> pd.DataFrame:
    """The rows of tokens.parquet, in as little memory as they take: there may be many millions.

    The same few strings in all rows become categories, and one column after the other is read and converted.
    """
    file = pq.ParquetFile(path, read_dictionary=[field.name for field in TOKEN_SCHEMA if field.type == pa.string()])
    columns = {name: file.read([name]).column(name).to_pandas() for name in TOKEN_SCHEMA.names}
    release_memory()
    return pd.DataFrame(columns, copy=False)


def release_memory() -> None:
    """Give the memory of runs that were read and are no longer needed back to the system, which Arrow would keep."""
    pa.default_memory_pool().release_unused()


def _read(path: Path, read: Callable[[Path], Any]) -> Any:  # noqa: ANN401 (whatever the file holds)
    try:
        return read(path)
    except FileNotFoundError as error:  # pyarrow's says its path and no more
        raise RecordError(f"{path} cannot be read: No such file or directory.") from error
    except OSError as error:
        raise RecordError(f"{path} cannot be read: {error.strerror or error}.") from error
    except (ValueError, pa.ArrowException) as error:
        raise RecordError(f"{path} is damaged: {str(error).rstrip('.')}.") from error
