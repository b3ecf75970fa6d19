"""comparison.html: several runs side by side, each with its own paired verdict, and what may be said between them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

from skote.eval.across import Across, Candidate, candidate_of, compare_candidates, same_weights
from skote.eval.derive import Measured
from skote.eval.figures import Bar, Chart, bars
from skote.eval.finding import SEVERITIES, requests
from skote.eval.options import differing_options
from skote.eval.record import read_run, write_text
from skote.eval.summary import PRIMARY, summarize_measured
from skote.eval.wording import arm_labels, devices, environment, hardware, machine
from skote.types import ExitCode, RecordError, SkoteError


@dataclass(frozen=True, slots=True)
class Entry:
    """One run of a comparison: what ran, its figures as in its metrics.json, and the `options` that not all share."""

    number: int
    directory: Path
    link: str | None
    manifest: dict[str, Any]
    metrics: dict[str, Any]
    labels: dict[str, str]
    across: Across | None = None
    options: tuple[str, ...] = ()

    @property
    def findings(self) -> tuple[str, str] | None:
        """The worst severity of its findings and how many there are of each, in words; None without findings."""
        found = [finding["severity"] for finding in self.metrics["findings"]]
        counts = [f"{found.count(each)} {_plural(each, found.count(each))}" for each in SEVERITIES if each in found]
        return (min(found, key=SEVERITIES.index), ", ".join(counts)) if found else None

    @property
    def threads(self) -> str:
        """The CPU threads of each of its candidate's replicas; empty where the engine has not said."""
        replicas = self.metrics["arms"] and self.manifest["arms"][next(iter(self.labels))]["replicas"]
        known = sorted({flags["threads"] for each in replicas or () if (flags := each["info"].get("flags"))})
        return f"{' or '.join(map(str, known))} thread{'s' * (known != [1])}" if known else ""

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

    @property
    def exit_code(self) -> ExitCode:
        """0 where every run has its verdict against the first, else the worst reason for which one has none."""
        return ExitCode.worst(entry.across.code for entry in self.entries if entry.across)


def read_comparison(directories: Sequence[Path], *, across_machines: bool = False) -> Comparison:
    """Read the runs in `directories` and compare each with the first.

    A verdict between two runs takes the same requests, the same weights and, unless `across_machines`, the same kind of
    hardware, and that both are valid and came to their end. A directory that cannot be read is listed with the reason.

    Raises:
        RecordError: no directory holds a readable run.
    """
    entries: list[Entry] = []
    candidates: list[Candidate] = []
    unreadable: list[Unreadable] = []
    for directory in directories:
        try:
            run = read_run(directory)
            measured = Measured(run)
            metrics = summarize_measured(measured, run.manifest)
        except SkoteError as error:
            unreadable.append(Unreadable(directory, str(error)))
            continue
        candidates.append(candidate_of(measured, run.manifest, metrics))
        entries.append(Entry(len(entries) + 1, directory, None, run.manifest, metrics, arm_labels(run.manifest)))
    options = differing_options([entry.manifest for entry in entries])
    entries = [replace(entry, options=tuple(own)) for entry, own in zip(entries, options, strict=True)]
    if not entries:
        reasons = " ".join(bad.reason for bad in unreadable[:1])
        raise RecordError(f"None of the {len(directories)} directories holds a readable run: {reasons}")
    for number, each in enumerate(candidates[1:], start=1):
        across = compare_candidates(each, candidates[0], across_machines=across_machines)
        entries[number] = replace(entries[number], across=across)
    return Comparison(entries, unreadable, _notes(entries, across_machines), _remarks(entries))


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


def _plural(severity: str, count: int) -> str:
    return severity if severity == "invalid" else f"{'note' if severity == 'info' else severity}{'s' * (count > 1)}"


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
    first, *others = entries
    notes += [
        f"Run {entry.number} had other weights than run 1 ({_weights(entry)}, and {_weights(first)} there): it did "
        "other work."
        for entry in others
        if same_weights(entry.manifest, first.manifest) is False
    ]
    for entry in entries:
        if not entry.metrics["verdict"]["valid"]:
            notes.append(f"Run {entry.number} is invalid, and its report says why: its figures must not be believed.")
        elif entry.manifest["status"] != "complete":
            notes.append(f"Run {entry.number} did not come to its end, so that its outputs were not judged.")
    return notes


def _weights(entry: Entry) -> str:
    model = entry.manifest["model"]
    sha256 = model["weights_sha256"]
    return f"{model['name']}, {model['parameters']:,} parameters, {'no hash' if sha256 is None else sha256[:12]}"


def _remarks(entries: Sequence[Entry]) -> list[str]:
    """What else differs between the runs than what they are about, in sentences."""
    remarks = []
    dtypes = sorted({entry.manifest["dtype"] for entry in entries})
    if len(dtypes) > 1:
        remarks.append(f"The runs computed in different dtypes ({', '.join(dtypes)}): that is in their difference.")
    unknown = [e.number for e in entries[1:] if same_weights(e.manifest, entries[0].manifest) is None]
    if unknown:
        remarks.append(
            f"That run {' and '.join(map(str, unknown))} had the weights of run 1 is assumed, not checked: there are "
            "no hashes of both in one dtype."
        )
    remarks += [
        f"{requests(entry.across.left_out)} that only one of run {entry.number} and run 1 finished are left out of "
        "their difference."
        for entry in entries
        if entry.across and entry.across.left_out
    ]
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
