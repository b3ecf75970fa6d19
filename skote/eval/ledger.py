"""The ledger of claims: every experiment file beside its committed run, as one HTML page and as README's table.

The command is `skote-report claims`.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from skote.eval.claims import NOT_TESTABLE, open_verdict
from skote.eval.record import read_run, write_text
from skote.eval.summary import summarize
from skote.eval.wording import environment, machine
from skote.types import ExitCode, RecordError, UsageError

NOT_RUN = "NOT RUN"
BEGIN, END = "<!-- claims: written by skote-report claims -->", "<!-- end of claims -->"
DEFAULTS: dict[str, Any] = {"subject": "Skotergy 2", "rules": [], "open": [], "needs": "cpu"}


@dataclass(frozen=True, slots=True)
class Entry:
    """An experiment's claim and, where it ran, what its files say of it, its manifest and the report's link.

    `left_out` says why a run that is there does not count; it has nothing else of that run.
    """

    name: str
    claim: dict[str, Any]
    judged: dict[str, Any] | None = None
    manifest: dict[str, Any] | None = None
    link: str | None = None
    left_out: str | None = None

    @property
    def verdict(self) -> str:
        """The run's verdict; without a run that counts what the file itself says, or NOT RUN."""
        if self.judged is not None:
            return str(self.judged["verdict"])
        if self.claim["needs"] == "two_cuda":
            return NOT_TESTABLE
        return NOT_RUN if self.claim["rules"] else open_verdict(self.claim["open"])[0]

    @property
    def reason(self) -> str:
        """The sentence behind the verdict; the command and the file's `needs` where it has not run."""
        if self.judged is not None:
            return str(self.judged["reason"])
        if self.claim["rules"]:
            needs = "a host with two GPUs" if self.claim["needs"] == "two_cuda" else self.claim["needs"]
            return f"Run it with python run.py -cd experiments -cn {self.name} (needs: {needs})."
        return open_verdict(self.claim["open"])[1]

    @property
    def rules(self) -> list[dict[str, Any]]:
        """The run's rules, judged; none where it has not run."""
        return [] if self.judged is None else list(self.judged["rules"])

    @property
    def setting(self) -> str:
        """Machine, model and dtype of the run."""
        if self.manifest is None:
            return ""
        return f"{machine(self.manifest['machine'])}; {self.manifest['model']['name']}, {self.manifest['dtype']}"


def read_claims(experiments: Path) -> dict[str, dict[str, Any]]:
    """The claim of every experiment file that has one, by the file's name, in the order of ids and names.

    Raises:
        UsageError: there is no such folder, or a file in it is no YAML.
    """
    if not experiments.is_dir():
        raise UsageError(f"There is no folder {experiments} with experiment files; name it with --experiments DIR.")
    claims = {path.stem: _claim_of(path) for path in sorted(experiments.glob("*.yaml"))}
    return {name: DEFAULTS | claim for name, claim in sorted(claims.items()) if claim.get("id")}


def read_ledger(experiments: Path, runs: Path) -> list[Entry]:
    """Every claim in `experiments`, with the run of that name in the folder `runs` where there is one.

    A run counts where its configuration is that of the file today (`skote.eval.experiment.deviation`). A file without a
    run of its own that extends another one, and measures just what that one does, is judged by that one's run, in
    `runs` or beside it: one run of a distribution has its median and its 95th percentile.

    Raises:
        UsageError: as `read_claims`, or the file of a run cannot be composed.
        RecordError: a run's files cannot be read.
    """
    claims = read_claims(experiments)
    return [_entry(experiments / f"{name}.yaml", claim, runs / name) for name, claim in claims.items()]


def ledger_html(entries: Sequence[Entry]) -> str:
    """The ledger as one page without network or script."""
    verdicts = [entry.verdict for entry in entries]
    counts = {verdict: verdicts.count(verdict) for verdict in dict.fromkeys(verdicts)}
    return environment().get_template("claims.html.j2").render(entries=entries, counts=counts)


def ledger_table(entries: Sequence[Entry], runs: str) -> str:
    """The ledger as a Markdown table whose links begin with `runs`."""
    lines = ["| claim | of | claimed | measured | verdict |", "|---|---|---|---|---|"]
    for entry in entries:
        claim = entry.claim
        figures = "; ".join(f"{rule['name']} {rule['measured_text']}" for rule in entry.rules)
        verdict = f"[{entry.verdict}]({runs}/{entry.link})" if entry.link else entry.verdict
        cells = (f"{claim['id']} {claim['statement']}", claim["subject"], claim["claimed"], figures, verdict)
        lines.append("| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines)


def write_between(path: Path, table: str) -> None:
    """Replace what stands between the two marks in `path`.

    Raises:
        RecordError: the file cannot be read or written.
        UsageError: it lacks a mark.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise RecordError(f"{path} cannot be read: {error.strerror}.") from error
    head, begin, rest = text.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise UsageError(f"{path} needs the lines {BEGIN!r} and {END!r}, between which the table goes.")
    write_text(path, f"{head}{BEGIN}\n{table}\n{END}{tail}")


def claims_command(argv: Sequence[str]) -> ExitCode:
    """`skote-report claims`: write index.html beside the runs, and the table into the README.

    Raises:
        SkoteError: a file cannot be read or written, or does not fit.
    """
    parser = argparse.ArgumentParser(prog="skote-report claims", description="Render the ledger of claims.")
    parser.add_argument("--experiments", metavar="DIR", type=Path, default=Path("experiments"), help="%(default)s")
    parser.add_argument("--runs", metavar="DIR", type=Path, default=Path("reports/claims"), help="%(default)s")
    parser.add_argument("--readme", metavar="FILE", type=Path, default=Path("README.md"), help="%(default)s")
    try:
        arguments = parser.parse_args(argv)
    except SystemExit as error:
        raise SystemExit(ExitCode.USAGE if error.code else ExitCode.DONE) from error
    entries = read_ledger(arguments.experiments, arguments.runs)
    arguments.runs.mkdir(parents=True, exist_ok=True)
    page = arguments.runs / "index.html"
    write_text(page, ledger_html(entries))
    write_between(arguments.readme, ledger_table(entries, arguments.runs.as_posix()))
    for entry in entries:
        if entry.left_out is not None:
            print(entry.left_out)  # noqa: T201
    print(page)  # noqa: T201
    return ExitCode.DONE


def _claim_of(path: Path) -> dict[str, Any]:
    """The claim of a file, over that of the files beside it that its defaults list names."""
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise UsageError(f"{path} cannot be read as YAML: {str(error).splitlines()[0]}.") from error
    claim: dict[str, Any] = {}
    for other in _siblings(path, tree):
        claim |= _claim_of(other)
    return claim | (tree.get("claim") or {})


def _siblings(path: Path, tree: dict[str, Any]) -> Iterator[Path]:
    for entry in tree.get("defaults", ()):
        other = path.with_name(f"{entry}.yaml")
        if isinstance(entry, str) and other.is_file():
            yield other


def _entry(experiment: Path, claim: dict[str, Any], directory: Path) -> Entry:
    from skote.eval.experiment import deviation  # brings Hydra, which no report needs

    name = experiment.stem
    if not directory.is_dir():
        return _judged_elsewhere(experiment, claim, directory.parent) or Entry(name, claim)
    run = read_run(directory)
    differs = deviation(experiment, run.manifest)
    if differs is not None:
        return Entry(name, claim, left_out=f"The run in {directory.name}/ is left out: {differs}")
    return Entry(name, claim, summarize(run)["claim"], run.manifest, _link(directory, directory.parent))


def _judged_elsewhere(experiment: Path, claim: dict[str, Any], runs: Path) -> Entry | None:
    """The claim, judged by a run of a file that `experiment` extends; None where none measured what it asks for."""
    from skote.eval.experiment import compose_experiment, deviation

    tree = yaml.safe_load(experiment.read_text(encoding="utf-8"))
    for other in _siblings(experiment, tree):
        for directory in (runs / other.stem, runs.parent / other.stem):
            if not directory.is_dir():
                continue
            run = read_run(directory)
            if deviation(experiment, run.manifest, judging=False) is None:
                config = run.manifest["config"] | {"claim": asdict(compose_experiment(experiment).claim)}
                judged = replace(run, manifest=run.manifest | {"config": config})
                return Entry(experiment.stem, claim, summarize(judged)["claim"], run.manifest, _link(directory, runs))
    return None


def _link(directory: Path, runs: Path) -> str | None:
    """From the ledger's page in `runs` to the report in `directory`, which lies in it or beside it."""
    above = "" if directory.parent == runs else "../"
    return f"{above}{directory.name}/report.html" if (directory / "report.html").is_file() else None
