"""comparison.html: several runs side by side, each with its own paired verdict; never a verdict across runs."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from skote.eval.figures import Bar, Chart, bars
from skote.eval.record import read_run, write_text
from skote.eval.summary import PRIMARY, summarize
from skote.eval.wording import arm_labels, devices, environment, machine
from skote.types import RecordError, SkoteError


@dataclass(frozen=True, slots=True)
class Entry:
    """One run of a comparison: what ran, and its figures as in its metrics.json."""

    number: int
    directory: Path
    link: str | None
    manifest: dict[str, Any]
    metrics: dict[str, Any]
    labels: dict[str, str]

    @property
    def delta(self) -> dict[str, Any] | None:
        """The primary difference, where two arms ran."""
        deltas = self.metrics["deltas"]
        return deltas[PRIMARY[0]][PRIMARY[1]] if deltas else None


@dataclass(frozen=True, slots=True)
class Unreadable:
    """A directory without a readable run, and why."""

    directory: Path
    reason: str


def render_comparison(directories: Sequence[Path], out_dir: Path, name: str = "comparison.html") -> Path:
    """Write a page that compares the runs in `directories` to `out_dir / name`; its path.

    A directory that cannot be read is listed with the reason.

    Raises:
        RecordError: no directory holds a readable run, or the page cannot be written.
    """
    entries: list[Entry] = []
    unreadable: list[Unreadable] = []
    for directory in directories:
        try:
            run = read_run(directory)
            metrics = summarize(run)
        except SkoteError as error:
            unreadable.append(Unreadable(directory, str(error)))
            continue
        labels = arm_labels(run.manifest)
        entries.append(Entry(len(entries) + 1, directory, _link(directory, out_dir), run.manifest, metrics, labels))
    if not entries:
        reasons = " ".join(bad.reason for bad in unreadable[:1])
        raise RecordError(f"None of the {len(directories)} directories holds a readable run: {reasons}")
    page = (
        environment()
        .get_template("comparison.html.j2")
        .render(
            entries=entries,
            unreadable=unreadable,
            notes=_notes(entries),
            charts=[_latency(entries), _throughput(entries)],
        )
    )
    write_text(out_dir / name, page)
    return out_dir / name


def _link(directory: Path, out_dir: Path) -> str | None:
    report = directory / "report.html"
    return quote(Path(os.path.relpath(report, out_dir)).as_posix()) if report.exists() else None


def _notes(entries: Sequence[Entry]) -> list[str]:
    """What keeps the rows from being comparable, in sentences."""
    notes = []
    workloads = {entry.manifest["workload"]["sha256"] for entry in entries}
    if len(workloads) > 1:
        notes.append(
            f"{len(workloads)} different workloads: the runs did not get the same requests, so their figures do not "
            "compare."
        )
    machines = sorted({machine(entry.manifest["machine"]) for entry in entries})
    if len(machines) > 1:
        notes.append(f"{len(machines)} different machines ({'; '.join(machines)}): only the deltas within a run hold.")
    return notes


def _latency(entries: Sequence[Entry]) -> Chart | None:
    found = []
    for entry in entries:
        for arm, content in entry.metrics["arms"].items():
            median = content["metrics"]["e2el_ms"]["p50"]
            if median["value"] is not None:
                low, high = median["interval"] or (None, None)
                found.append(Bar(_bar_label(entry, arm), arm, median["value"], low, high))
    caption = "Median end-to-end latency of each run's arms, with its 95 % interval; shorter is faster."
    return bars(found, "bars-e2el", "E2EL p50 (ms)", caption)


def _throughput(entries: Sequence[Entry]) -> Chart | None:
    found = [
        Bar(_bar_label(entry, arm), arm, content["throughput"]["output_tok_s"])
        for entry in entries
        for arm, content in entry.metrics["arms"].items()
        if content["throughput"]["output_tok_s"] is not None
    ]
    caption = "Output tokens a second over each arm's measured passes; longer is faster."
    return bars(found, "bars-tok-s", "output throughput (tok/s)", caption)


def _bar_label(entry: Entry, arm: str) -> str:
    manifest = entry.manifest
    return f"{entry.number}  {entry.labels[arm]}, {manifest['dtype']}, {devices(manifest['devices'])}"
