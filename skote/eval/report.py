"""A run's report.html and metrics.json, rebuilt from its files; `skote-report` on the command line."""

from __future__ import annotations

import argparse
import difflib
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from skote.eval.capacity_page import rebuild_capacity
from skote.eval.comparison import read_comparison, render_comparison
from skote.eval.derive import Measured
from skote.eval.journal import recover
from skote.eval.ledger import claims_command
from skote.eval.page import report_html
from skote.eval.record import read_run, release_memory, write_text
from skote.eval.rerun import rerun_command
from skote.eval.summary import summarize_measured
from skote.eval.verify import differences, has_hashes
from skote.types import ExitCode, SkoteError, UsageError


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


def main(argv: Sequence[str] | None = None) -> None:
    """Rebuild each run's report, and compare them where there are several: exit 3 where they do not compare.

    `skote-report verify RUN_DIR...` checks hashes and computes every figure again; `skote-report rerun RUN_DIR` prints
    the command that repeats the run; `skote-report claims` renders the ledger of claims; `skote-report capacity DIR`
    rebuilds the page of a search.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    command = COMMANDS.get(arguments[0]) if arguments else None
    try:
        if command is None and arguments:
            _check_word(arguments[0])
        code = _rebuild(arguments) if command is None else command(arguments[1:])
    except SkoteError as error:
        print(error, file=sys.stderr)  # noqa: T201
        code = error.exit_code
    raise SystemExit(code)


def _check_word(word: str) -> None:
    """Refuse a first argument that can only be meant for a command; a path with a folder in it is meant for a run."""
    if word.startswith("-") or Path(word).name != word or Path(word).exists():
        return
    meant = difflib.get_close_matches(word, COMMANDS, n=1)
    hint = f" Did you mean {meant[0]}?" if meant else ""
    raise UsageError(
        f"skote-report: {word} is neither a command ({', '.join(COMMANDS)}) nor the directory of a run.{hint}"
    )


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
    codes: list[ExitCode] = []
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
        for remark in comparison.remarks:
            print(f"Note: {remark}", file=sys.stderr)  # noqa: T201
        print(render_comparison(comparison, arguments.out.parent, arguments.out.name))  # noqa: T201
        codes.append(comparison.exit_code)
    return ExitCode.worst(codes)


def _verify(argv: Sequence[str]) -> ExitCode:
    parser = argparse.ArgumentParser(
        prog="skote-report verify",
        description="Check hashes and rows of runs, compute every figure and the page again.",
    )
    code = ExitCode.DONE
    for directory in _parse(parser, argv).runs:
        try:
            found = list(differences(directory))
            passed = "verified" if has_hashes(directory) else "figures verified; no hashes"
        except SkoteError as error:
            found, passed = [str(error)], ""
        for sentence in found:
            print(f"{directory}: {sentence}", file=sys.stderr)  # noqa: T201
        count = f"{len(found)} difference{'s' * (len(found) > 1)}"
        print(f"{directory}: {count if found else passed}")  # noqa: T201
        code = ExitCode.FAILED if found else code
    return code


def _rerun(argv: Sequence[str]) -> ExitCode:
    parser = argparse.ArgumentParser(prog="skote-report rerun", description="Print the command that repeats a run.")
    for directory in _parse(parser, argv).runs:
        print(rerun_command(read_run(directory).manifest))  # noqa: T201
    return ExitCode.DONE


def _capacity(argv: Sequence[str]) -> ExitCode:
    parser = argparse.ArgumentParser(
        prog="skote-report capacity", description="Rebuild the page of a capacity search from the runs of its probes."
    )
    for directory in _parse(parser, argv).runs:
        print(rebuild_capacity(directory))  # noqa: T201
    return ExitCode.DONE


COMMANDS: dict[str, Callable[[Sequence[str]], ExitCode]] = {
    "verify": _verify,
    "rerun": _rerun,
    "claims": claims_command,
    "capacity": _capacity,
}


if __name__ == "__main__":
    main()
