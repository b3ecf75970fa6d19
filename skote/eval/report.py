"""A run's report.html and metrics.json, rebuilt from its files; `skote-report` on the command line."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skote.eval import figures
from skote.eval.comparison import read_comparison, render_comparison
from skote.eval.derive import METRICS, Measured
from skote.eval.journal import recover
from skote.eval.ledger import claims_command
from skote.eval.record import read_run, release_memory, write_text
from skote.eval.rerun import rerun_command
from skote.eval.summary import PERCENTILES, PRIMARY, summarize_measured
from skote.eval.verify import differences, unverified
from skote.eval.wording import arm_labels, environment, verdict_sentence
from skote.types import ExitCode, SkoteError

KEY_METRICS = (
    ("e2el_ms", "p50", "End to end p50", "ms, dispatch to last token"),
    ("e2el_ms", "p95", "End to end p95", "ms"),
    ("ttft_ms", "p50", "TTFT p50", "ms, dispatch to first token"),
    ("ttft_ms", "p95", "TTFT p95", "ms"),
    ("tpot_ms", "p50", "TPOT p50", "ms a token after the first"),
    ("tpot_ms", "p95", "TPOT p95", "ms"),
)
METHODS = {"t": "t interval", "bootstrap": "paired bootstrap"}


@dataclass(frozen=True, slots=True)
class Cell:
    """One arm's figure in the main table; `refused` says why there is no interval."""

    value: float | str | None
    interval: list[float | str] | None
    refused: str


@dataclass(frozen=True, slots=True)
class Row:
    """A line of the main table: one figure in each arm, and the difference where two arms ran."""

    label: str
    note: str
    cells: list[Cell]
    delta: dict[str, Any] | None
    primary: bool


def render_run(directory: Path) -> tuple[Path, dict[str, Any]]:
    """Write metrics.json and report.html of the run in `directory`; the report's path and the metrics.

    Raises:
        RecordError: the run's files cannot be read, or the two cannot be written.
    """
    recover(directory)
    run = read_run(directory)
    measured, manifest = Measured(run), run.manifest
    del run  # its row a token is the largest thing here
    release_memory()
    metrics = summarize_measured(measured, manifest)
    page = report_html(manifest, metrics, measured)
    write_text(directory / "metrics.json", json.dumps(metrics, indent=2, sort_keys=True, allow_nan=False) + "\n")
    write_text(directory / "report.html", page)
    return directory / "report.html", metrics


def report_html(manifest: dict[str, Any], metrics: dict[str, Any], measured: Measured) -> str:
    """The page of the run that all three are of, `metrics` from `summarize`: one file, no network, no script."""
    labels = arm_labels(manifest)
    deltas = metrics["deltas"]
    primary = deltas[PRIMARY[0]][PRIMARY[1]] if deltas else None
    arms = list(metrics["arms"])
    return (
        environment()
        .get_template("report.html.j2" if arms or "claim" not in metrics else "contract.html.j2")
        .render(
            manifest=manifest,
            metrics=metrics,
            labels=labels,
            arms=arms,
            headline=" against ".join(labels.values()),
            primary=primary,
            method=METHODS.get(primary["method"]) if primary else None,
            verdict_word=metrics["verdict"]["label"] or ("MEASURED" if arms else "NOTHING MEASURED"),
            sentence=verdict_sentence(metrics, labels),
            key_rows=_key_rows(metrics, PRIMARY),
            steady_rows=_key_rows(metrics["steady"], None) if metrics["steady"] else [],
            charts=_charts(measured, labels),
            metric_names=list(metrics["arms"][arms[0]]["metrics"]) if arms else [],
            percentiles=PERCENTILES,
            definitions=METRICS,
            bandwidth=(metrics["roofline"] or {}).get("read_bandwidth_bytes_per_s"),
            peak=(metrics["roofline"] or {}).get("matmul_peak_flops_per_s"),
            workload=_workload(manifest["workload"]),
            git=_git(manifest["machine"]["git"]),
            packages=", ".join(
                f"{name} {version}" for name, version in sorted(manifest["machine"]["packages"].items())
            ),
        )
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Rebuild each run's report, and compare them where there are several.

    `skote-report verify RUN_DIR...` checks hashes and computes every figure again; `skote-report rerun RUN_DIR` prints
    the command that repeats the run; `skote-report claims` renders the ledger of claims.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    command = COMMANDS.get(arguments[0]) if arguments else None
    try:
        code = _rebuild(arguments) if command is None else command(arguments[1:])
    except SkoteError as error:
        print(error, file=sys.stderr)  # noqa: T201
        code = error.exit_code
    raise SystemExit(code)


def _parse(parser: argparse.ArgumentParser, argv: Sequence[str]) -> argparse.Namespace:
    parser.add_argument(
        "runs", metavar="RUN_DIR", nargs="+", type=Path, help="a run's directory, with its parquet files"
    )
    try:
        return parser.parse_args(argv)
    except SystemExit as error:
        raise SystemExit(ExitCode.USAGE if error.code else ExitCode.DONE) from error


def _rebuild(argv: Sequence[str]) -> ExitCode:
    parser = argparse.ArgumentParser(prog="skote-report", description=main.__doc__)
    parser.add_argument(
        "--out",
        metavar="FILE",
        type=Path,
        default=Path("comparison.html"),
        help="where the comparison of several runs goes (default: %(default)s)",
    )
    parser.add_argument(
        "--across-machines",
        action="store_true",
        help="give a verdict between runs of different hardware, too",
    )
    arguments = _parse(parser, argv)
    codes = []
    for directory in arguments.runs:
        try:
            print(render_run(directory)[0])  # noqa: T201
        except SkoteError as error:
            print(error, file=sys.stderr)  # noqa: T201
            codes.append(error.exit_code)
    if len(arguments.runs) > 1:
        comparison = read_comparison(arguments.runs, across_machines=arguments.across_machines)
        for note in comparison.notes:
            print(f"NOT COMPARABLE: {note}", file=sys.stderr)  # noqa: T201
        print(render_comparison(comparison, arguments.out.parent, arguments.out.name))  # noqa: T201
    return ExitCode.worst(codes)


def _verify(argv: Sequence[str]) -> ExitCode:
    parser = argparse.ArgumentParser(
        prog="skote-report verify", description="Check the hashes of runs and compute every figure again."
    )
    code = ExitCode.DONE
    for directory in _parse(parser, argv).runs:
        try:
            found = list(differences(directory))
        except SkoteError as error:
            found = [str(error)]
        else:
            for sentence in unverified(directory):
                print(f"{directory}: {sentence}")  # noqa: T201
        for sentence in found:
            print(f"{directory}: {sentence}", file=sys.stderr)  # noqa: T201
        count = f"{len(found)} difference{'s' * (len(found) > 1)}" if found else "verified"
        print(f"{directory}: {count}")  # noqa: T201
        code = ExitCode.FAILED if found else code
    return code


def _rerun(argv: Sequence[str]) -> ExitCode:
    parser = argparse.ArgumentParser(prog="skote-report rerun", description="Print the command that repeats a run.")
    for directory in _parse(parser, argv).runs:
        print(rerun_command(read_run(directory).manifest))  # noqa: T201
    return ExitCode.DONE


COMMANDS: dict[str, Callable[[Sequence[str]], ExitCode]] = {
    "verify": _verify,
    "rerun": _rerun,
    "claims": claims_command,
}


def _key_rows(metrics: dict[str, Any], primary: tuple[str, str] | None) -> list[Row]:
    """The main table of the whole run, or of its steady state; `primary` is what the verdict is about."""
    arms, deltas = metrics["arms"], metrics["deltas"]
    rows = []
    for name, q, label, note in KEY_METRICS:
        figures_ = [content["metrics"][name][q] for content in arms.values()]
        cells = [Cell(f["value"], f["interval"], f"{q} refused: {f['reason']}") for f in figures_]
        delta = deltas[name][q] if deltas else None
        rows.append(Row(label, note, cells, delta, (name, q) == primary))
    cells = [Cell(content["throughput"]["output_tok_s"], None, "") for content in arms.values()]
    delta = deltas["output_tok_s"] if deltas else None
    rows.append(Row("Output throughput", "tok/s", cells, delta, primary=False))
    return rows


def _charts(measured: Measured, labels: dict[str, str]) -> dict[str, Any]:
    chosen = {metric.name: metric for metric in METRICS}
    return {
        "ecdf": [figures.ecdf(measured, chosen[name], labels) for name in ("e2el_ms", "ttft_ms", "tpot_ms")],
        "gaps": figures.token_gaps(measured, labels),
        "timeline": [figures.timeline(measured, arm, labels[arm]) for arm in measured.arms],
    }


def _workload(workload: dict[str, Any]) -> str:
    load = "all at once" if workload["load"] == "burst" else f"closed loop, concurrency {workload['concurrency']}"
    limit = workload["max_new_tokens"]
    return (
        f"{workload['name']}: {workload['blocks']} blocks of {workload['requests_per_block']} requests, {load}"
        f"{'' if limit is None else f', {limit} new tokens each'}, {'greedy' if workload['greedy'] else 'sampled'}"
    )


def _git(git: dict[str, Any] | None) -> str:
    if git is None:
        return "not a checkout"
    return f"{git['commit']}{', with uncommitted changes' if git['dirty'] else ''}"
