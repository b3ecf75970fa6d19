"""comparison.html: several runs side by side, each with its own paired verdict, and what may be said between them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

from skote.eval.derive import METRICS, Measured
from skote.eval.figures import Bar, Chart, bars
from skote.eval.record import read_run, write_text
from skote.eval.stats import Effect, Floats, Verdict, percentile_effect
from skote.eval.summary import PRIMARY, summarize_measured
from skote.eval.wording import arm_labels, devices, environment, hardware, machine
from skote.types import RecordError, SkoteError


@dataclass(frozen=True, slots=True)
class Across:
    """A run's candidate against the first run's: the effect over the blocks that both ran, its verdict, or why none."""

    effect: Effect | None
    verdict: Verdict | None
    refused: str = ""

    @property
    def interval_pct(self) -> list[float] | None:
        """The effect's 95 % interval, in percent."""
        interval = self.effect.interval if self.effect else None
        return [100 * interval.low, 100 * interval.high] if interval else None


@dataclass(frozen=True, slots=True)
class Entry:
    """One run of a comparison: what ran, and its figures as in its metrics.json.

    `blocks` are the candidate's samples of the primary metric by block.
    """

    number: int
    directory: Path
    link: str | None
    manifest: dict[str, Any]
    metrics: dict[str, Any]
    labels: dict[str, str]
    blocks: dict[int, Floats]
    across: Across | None = None

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


@dataclass(frozen=True, slots=True)
class Comparison:
    """Runs side by side: `notes` say what keeps them from being comparable, `remarks` what else differs."""

    entries: list[Entry]
    unreadable: list[Unreadable]
    notes: list[str]
    remarks: list[str]


def read_comparison(directories: Sequence[Path], *, across_machines: bool = False) -> Comparison:
    """Read the runs in `directories` and compare each with the first.

    A verdict between two runs takes the same requests and, unless `across_machines`, the same kind of hardware. A
    directory that cannot be read is listed with the reason.

    Raises:
        RecordError: no directory holds a readable run.
    """
    entries: list[Entry] = []
    unreadable: list[Unreadable] = []
    for directory in directories:
        try:
            run = read_run(directory)
            measured = Measured(run)
            metrics = summarize_measured(measured, run.manifest)
        except SkoteError as error:
            unreadable.append(Unreadable(directory, str(error)))
            continue
        metric = next(metric for metric in METRICS if metric.name == PRIMARY[0])
        blocks = measured.samples("candidate", metric).by_block()
        labels = arm_labels(run.manifest)
        entries.append(Entry(len(entries) + 1, directory, None, run.manifest, metrics, labels, blocks))
    if not entries:
        reasons = " ".join(bad.reason for bad in unreadable[:1])
        raise RecordError(f"None of the {len(directories)} directories holds a readable run: {reasons}")
    first, *others = entries
    compared = [replace(each, across=_across(each, first, across_machines=across_machines)) for each in others]
    return Comparison([first, *compared], unreadable, _notes(entries, across_machines), _remarks(entries))


def render_comparison(comparison: Comparison, out_dir: Path, name: str = "comparison.html") -> Path:
    """Write the page of `comparison` to `out_dir / name`; its path.

    Raises:
        RecordError: it cannot be written.
    """
    entries = [replace(entry, link=_link(entry.directory, out_dir)) for entry in comparison.entries]
    page = (
        environment()
        .get_template("comparison.html.j2")
        .render(
            entries=entries,
            unreadable=comparison.unreadable,
            notes=comparison.notes,
            remarks=comparison.remarks,
            charts=[_latency(entries), _throughput(entries)],
        )
    )
    write_text(out_dir / name, page)
    return out_dir / name


def _across(entry: Entry, first: Entry, *, across_machines: bool) -> Across:
    if entry.manifest["workload"]["sha256"] != first.manifest["workload"]["sha256"]:
        return Across(None, None, "other requests")
    if not across_machines and hardware(entry.manifest["machine"]) != hardware(first.manifest["machine"]):
        return Across(None, None, "other hardware")
    if not (entry.metrics["verdict"]["valid"] and first.metrics["verdict"]["valid"]):
        return Across(None, None, "a run is invalid")
    common = sorted(entry.blocks.keys() & first.blocks.keys())
    effect = percentile_effect(entry.blocks, first.blocks, common, float(PRIMARY[1][1:]), int(first.manifest["seed"]))
    return Across(effect, effect.verdict())


def _link(directory: Path, out_dir: Path) -> str | None:
    report = directory / "report.html"
    return quote(Path(os.path.relpath(report, out_dir)).as_posix()) if report.exists() else None


def _notes(entries: Sequence[Entry], across_machines: bool) -> list[str]:
    """What keeps the rows from being comparable, in sentences."""
    notes = []
    workloads = {entry.manifest["workload"]["sha256"] for entry in entries}
    if len(workloads) > 1:
        notes.append(
            f"{len(workloads)} different workloads: the runs did not get the same requests, so their figures do not "
            "compare."
        )
    kinds = {hardware(entry.manifest["machine"]): machine(entry.manifest["machine"]) for entry in entries}
    if len(kinds) > 1:
        between = (
            "a verdict between them was asked for, and judges the machines as much as the engines"
            if across_machines
            else "only the differences within a run hold"
        )
        notes.append(f"{len(kinds)} different machines ({'; '.join(sorted(kinds.values()))}): {between}.")
    return notes


def _remarks(entries: Sequence[Entry]) -> list[str]:
    """What else differs between the runs than what they are about, in sentences."""
    remarks = []
    machines = [entry.manifest["machine"] for entry in entries]
    packages = sorted({name for each in machines for name in each["packages"]})
    versions = {name: sorted({each["packages"].get(name, "none") for each in machines}) for name in packages}
    differing = [f"{name} {' and '.join(found)}" for name, found in versions.items() if len(found) > 1]
    if differing:
        remarks.append(f"The runs used different versions: {', '.join(differing)}.")
    states = {(git["commit"], git["dirty_sha256"]) for each in machines if (git := each["git"]) is not None}
    if len(states) > 1:
        commits = sorted({commit[:12] for commit, _ in states})
        remarks.append(f"The runs are of {len(states)} states of the code ({', '.join(commits)}).")
    return remarks


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
