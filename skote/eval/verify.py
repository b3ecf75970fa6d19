"""Whether a run's files still say what the run found: hashes, and every figure of metrics.json computed again."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa

from skote.eval.record import Run, file_hashes, outputs_sha256, read_run
from skote.eval.summary import summarize
from skote.types import RecordError

OUTPUT = ("arm", "phase", "request_id", "output_sha256")
TOLERANCE = 1e-9  # relative: processors differ in the last digits of a logarithm


def differences(directory: Path) -> Iterator[str]:
    """What differs in the run in `directory`, a sentence each; nothing where all is as the run left it.

    Raises:
        RecordError: the run's files cannot be read.
    """
    run = read_run(directory)
    try:
        stored = json.loads((directory / "metrics.json").read_text(encoding="utf-8"))
    except OSError as error:
        raise RecordError(f"{directory}/metrics.json cannot be read: {error.strerror or error}.") from error
    except ValueError as error:
        raise RecordError(f"{directory}/metrics.json is damaged: {error}.") from error
    yield from _files(run)
    yield from _rows(run)
    yield from _figures("", stored, json.loads(json.dumps(summarize(run))))


def unverified(directory: Path) -> list[str]:
    """What the manifest holds no hash of, a sentence each: of a run that was killed, or that is older than hashes."""
    manifest = read_run(directory).manifest
    return [] if manifest.get("files") else ["The manifest holds no hashes of the parquet files: they are not checked."]


def _files(run: Run) -> Iterator[str]:
    stored: dict[str, str] = run.manifest.get("files") or {}
    found = file_hashes(run.directory) if stored else {}
    for name in sorted(stored.keys() | found.keys()):
        if name not in found:
            yield f"{name}: the manifest has its hash, the file is gone."
        elif name not in stored:
            yield f"{name}: the manifest does not know this file."
        elif stored[name] != found[name]:
            yield f"{name}: SHA-256 is {found[name][:12]}, the manifest says {stored[name][:12]}."


def _rows(run: Run) -> Iterator[str]:
    workload = run.manifest["workload"]["sha256"]
    for other in sorted(set(run.requests["workload_sha256"]) - {workload}):
        yield f"requests.parquet: rows of the workload {other[:12]}, the manifest says {workload[:12]}."
    stored: dict[str, str] = run.manifest.get("outputs") or {}
    found = outputs_sha256(pa.Table.from_pandas(run.requests[list(OUTPUT)]).to_pylist()) if stored else {}
    for arm in sorted(stored.keys() | found.keys()):
        if stored.get(arm) != found.get(arm):
            yield f"requests.parquet: the outputs of the {arm} are not those that the manifest has the hash of."


def _figures(place: str, stored: Any, computed: Any) -> Iterator[str]:  # noqa: ANN401 (JSON values)
    """Where two JSON values differ, as `place: metrics.json says X, the files give Y.`"""
    if isinstance(stored, dict) and isinstance(computed, dict):
        for key in sorted(stored.keys() | computed.keys()):
            inner = f"{place}.{key}" if place else key
            if key not in computed:
                yield f"{inner}: metrics.json has it, the files do not give it."
            elif key not in stored:
                yield f"{inner}: the files give it, metrics.json does not have it."
            else:
                yield from _figures(inner, stored[key], computed[key])
    elif isinstance(stored, list) and isinstance(computed, list) and len(stored) == len(computed):
        for index, (one, other) in enumerate(zip(stored, computed, strict=True)):
            yield from _figures(f"{place}[{index}]", one, other)
    elif not _same(stored, computed):
        yield f"{place}: metrics.json says {_shown(stored)}, the files give {_shown(computed)}."


def _same(stored: Any, computed: Any) -> bool:  # noqa: ANN401
    if isinstance(stored, float) and isinstance(computed, float):
        return math.isclose(stored, computed, rel_tol=TOLERANCE)
    return type(stored) is type(computed) and bool(stored == computed)


def _shown(value: Any) -> str:  # noqa: ANN401
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
