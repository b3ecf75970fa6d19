"""Whether a run's files still say what the run found: hashes, rows, figures and the page, each computed again."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa

from skote.eval.cross_check import cross_differences
from skote.eval.derive import Measured
from skote.eval.page import report_html
from skote.eval.record import Run, file_hashes, outputs_sha256, read_run
from skote.eval.schema_version import SCHEMA_VERSION
from skote.eval.summary import summarize_measured
from skote.types import RecordError

OUTPUT = ("arm", "phase", "request_id", "output_sha256")
TOLERANCE = 1e-9  # relative: processors differ in the last digits of a logarithm


def differences(directory: Path) -> Iterator[str]:
    """What differs in the run in `directory`, a sentence each; nothing where all is as the run left it.

    Raises:
        RecordError: the run's files cannot be read.
    """
    run = read_run(directory)
    stored = _json(directory / "metrics.json")
    yield from _missing_hashes(run)
    yield from _files(run)
    yield from _rows(run)
    yield from cross_differences(run)
    measured = Measured(run)
    computed = summarize_measured(measured, run.manifest)
    yield from _figures("", stored, json.loads(json.dumps(computed)))
    yield from _page(run, report_html(run.manifest, computed, measured))


def has_hashes(directory: Path) -> bool:
    """Whether the manifest of the run in `directory` has hashes: not of one that was killed, nor of an old one.

    Raises:
        RecordError: the manifest cannot be read.
    """
    return _json(directory / "manifest.json").get("files") is not None


def _json(path: Path) -> dict[str, Any]:
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise RecordError(f"{path} cannot be read: {error.strerror or error}.") from error
    except ValueError as error:
        raise RecordError(f"{path} is damaged: {error}.") from error
    return content


def _missing_hashes(run: Run) -> Iterator[str]:
    """Of a run that came to its end, and whose version wrote hashes: version 1 did not."""
    written = _json(run.directory / "manifest.json")
    if written["schema_version"] == SCHEMA_VERSION and written["status"] == "complete":
        for name in ("files", "outputs"):
            if written.get(name) is None:
                yield f"manifest.json: {name} is missing, and every complete run has these hashes."


def _files(run: Run) -> Iterator[str]:
    stored: dict[str, str] | None = run.manifest.get("files")
    if stored is None:
        return
    found = file_hashes(run.directory)
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
    stored: dict[str, str] | None = run.manifest.get("outputs")
    if stored is None:
        return
    found = outputs_sha256(pa.Table.from_pandas(run.requests[list(OUTPUT)]).to_pylist())
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


def _page(run: Run, page: str) -> Iterator[str]:
    """Where report.html is not what the files give. Rendering is repeated rather than hashed: a hash proves only that
    the page is the one that was hashed, and whoever edits the page can hash it.
    """
    path = run.directory / "report.html"
    try:
        found = path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        if run.manifest["config"].get("report", {}).get("render", True):
            yield "report.html: it is gone, and skote-report RUN_DIR writes it anew."
        return
    except OSError as error:
        raise RecordError(f"{path} cannot be read: {error.strerror or error}.") from error
    if found != page:
        unequal = (place for place, pair in enumerate(zip(found, page, strict=False)) if pair[0] != pair[1])
        start = next(unequal, min(len(found), len(page)))
        line = page.count("\n", 0, start) + 1
        said, given = (_shown(text[max(start - 20, 0) : start + 60]) for text in (found, page))
        yield f"report.html: line {line} says {said}, the files give {given}."
