"""`skote-eval` and `python run.py`: Hydra composes the jobs, sessions run them, the exit code says how it went."""

from __future__ import annotations

import contextlib
import io
import logging
import logging.config
import shlex
import signal
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import env_override
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from rich.console import Console

from skote.config import CONF_DIR, RunConfig, recorded_settings, register_schema, to_settings
from skote.eval.capacity import CapacitySearch
from skote.eval.check import check_limits
from skote.eval.comparison import read_comparison, render_comparison
from skote.eval.plan import WITHOUT_MODEL, Plan, plan_run
from skote.eval.progress import RunProgress
from skote.eval.record import Run, read_run
from skote.eval.resume import take_resume
from skote.eval.session import Session
from skote.eval.stand_in import stand_in
from skote.eval.sweep import SEARCH, Cell, Sweep, cell_key, finished_code, shuffled
from skote.eval.turn import machine_turn
from skote.eval.usage import refusal, sentence
from skote.eval.verify import differences
from skote.types import ExitCode, RecordError, SkoteError, UsageError

log = logging.getLogger(__name__)

T = TypeVar("T")

BESIDE_REPRODUCE = {"check", "against", "report", "report.render", "model.path", "model.cache_dir"}
"""Options that may stand beside check=reproduce: what they change is not what is measured."""


@dataclass(frozen=True, slots=True)
class Job:
    """What Hydra composed: a configuration, its directory and overrides, and what Hydra would set up around it.

    `compare` is the option of that group, which is not part of the configuration. `folders` hold its primary file, of
    that `name`.
    """

    config: DictConfig
    directory: Path
    overrides: list[str]
    compare: str
    logging: dict[str, Any]
    environment: dict[str, str]
    name: str
    folders: list[Path]


@dataclass(frozen=True, slots=True)
class Ready:
    """A job that can run: its plan, what identifies it (`cell_key`), and the run that it repeats."""

    plan: Plan
    key: str
    against: Run | None


@dataclass(frozen=True, slots=True)
class Failure:
    """How a job ended that did not come to its end, in a sentence."""

    code: ExitCode
    sentence: str


class Runner:
    """The jobs of one command: one, or those of a sweep. Collects them first, then runs them.

    Args:
        console: where progress goes.
        resumed: the sweep, or the search, that this command goes on with.
        argv: the command, where it is not this process's own.
    """

    def __init__(self, console: Console, resumed: Sweep | None = None, argv: list[str] | None = None) -> None:
        self._console = console
        self._resumed = resumed
        self._argv = list(sys.argv) if argv is None else argv
        self._sweep_dir: Path | None = None
        self._jobs: list[Job] = []

    def collect(self, config: DictConfig) -> None:
        """Note a job that Hydra has composed; nothing of it runs before all are known."""
        hydra_config = HydraConfig.get()
        launcher = hydra_config.launcher["_target_"]
        if not launcher.endswith("BasicLauncher") and _launcher(self._argv) is None:
            raise UsageError(f"The launcher {launcher} has to be asked for on the command line: hydra/launcher=NAME.")
        if hydra_config.mode == RunMode.MULTIRUN:
            self._sweep_dir = Path(hydra_config.sweep.dir)
        self._jobs.append(
            Job(
                config,
                Path(hydra_config.runtime.output_dir),
                list(hydra_config.overrides.task),
                hydra_config.runtime.choices["compare"],
                _plain(hydra_config, "job_logging"),
                _plain(hydra_config, "job.env_set"),
                str(hydra_config.job.config_name),
                [Path(source.path) for source in hydra_config.runtime.config_sources if source.schema == "file"],
            )
        )

    def run(self) -> ExitCode:
        """Run what was collected, one after the other: the worst of the codes."""
        if self._sweep_dir is not None:
            return self._run_sweep(self._sweep_dir)
        if not self._jobs:  # Hydra has shown its help or the configuration, or a launcher has run all jobs
            return ExitCode.DONE
        return self.run_collected()

    def run_collected(self) -> ExitCode:
        """Run the one job that was collected, whether it is part of a sweep or not."""
        [job] = self._jobs
        outcome = self._guarded(job, self._run)
        return outcome.code if isinstance(outcome, Failure) else outcome

    def _run_sweep(self, directory: Path) -> ExitCode:
        seed = self._resumed.seed if self._resumed else int(self._jobs[0].config.get("seed") or 0)
        arguments = self._resumed.arguments if self._resumed else sys.argv[1:]
        jobs = shuffled(self._jobs, seed)
        cells = [Cell(str(job.directory.relative_to(directory.absolute())), job.overrides) for job in jobs]
        sweep = Sweep(directory, arguments, seed, cells)
        sweep.write()
        refused = self._check_sweep(sweep, jobs)
        if refused is not None:
            return refused
        for cell, job in zip(cells, jobs, strict=True):
            self._console.rule(f"job {cell.directory}: {' '.join(job.overrides) or 'defaults'}")
            outcome = self._guarded(job, self._run)
            cell.end(outcome.code if isinstance(outcome, Failure) else outcome, _said(outcome))
            sweep.write()
            if cell.state == "interrupted":
                self._console.print(f"Go on with resume={directory}", highlight=False, soft_wrap=True)
                return ExitCode.INTERRUPTED
        for cell in sweep.troubled():
            said = cell.sentence or "its report says why"
            self._console.print(
                f"job {cell.directory}: exit {cell.exit_code}: {said}", highlight=False, markup=False, soft_wrap=True
            )
        path = render_comparison(read_comparison([job.directory for job in self._jobs]), directory)
        self._console.print(str(path), highlight=False, soft_wrap=True)
        return sweep.worst()

    def _check_sweep(self, sweep: Sweep, jobs: list[Job]) -> ExitCode | None:
        """Plan every job before the first one runs; the code of a sweep that is refused, since some cannot run."""
        self._console.print(f"Checking all {len(jobs)} jobs before the first one runs")
        for cell, job in zip(sweep.cells, jobs, strict=True):
            outcome = self._guarded(job, self._check, f"job {sweep.name_of(cell)}: ")
            if isinstance(outcome, Failure):
                cell.end(outcome.code, outcome.sentence)
                if outcome.code == ExitCode.INTERRUPTED:
                    break
        sweep.write()
        bad = len(sweep.troubled())
        if not bad:
            return None
        print(  # noqa: T201
            f"skote-eval: Nothing was run: {bad} of the sweep's {len(jobs)} jobs cannot.", file=sys.stderr
        )
        return sweep.worst()

    def _guarded(self, job: Job, action: Callable[[Job], T], name: str = "") -> T | Failure:
        """What `action` makes of a job, or how it failed, printed after `name`, so that the rest of a sweep goes on."""
        logging.config.dictConfig(job.logging)
        try:
            with env_override(job.environment):
                return action(job)
        except (SkoteError, OmegaConfBaseException) as error:
            log.exception("the run failed")
            code = error.exit_code if isinstance(error, SkoteError) else ExitCode.USAGE
            said = sentence(str(error))
        except KeyboardInterrupt:
            code = ExitCode.INTERRUPTED
            said = f"Interrupted; the requests that had finished are in {job.directory}."
        except Exception as error:  # the last door: whatever it was, the user gets a sentence and the log a trace
            log.exception("the run failed")
            code = ExitCode.FAILED
            said = f"Unexpected {type(error).__name__}: {sentence(str(error))} (trace in {job.directory}/run.log)"
        print(f"skote-eval: {name}{said}", file=sys.stderr)  # noqa: T201
        return Failure(code, said)

    def _check(self, job: Job) -> None:
        if job.config.search.start is not None:
            raise UsageError("A search is many runs already: search.start has no place in a sweep.")
        with RunProgress(Console(quiet=True)) as progress:
            _prepare(job, progress)

    def _run(self, job: Job) -> ExitCode:
        command = shlex.join([Path(self._argv[0]).name, *self._argv[1:]])
        settings = to_settings(job.config)
        if settings.search.start is not None:
            compare = _compares(settings, job.compare)
            progress_of = partial(RunProgress, self._console)
            record = Sweep(job.directory, self._argv[1:], settings.seed, [], SEARCH)
            resumed = self._resumed is not None
            return CapacitySearch(settings, record, progress_of, command, job.overrides, compare, resumed).run()
        with RunProgress(self._console) as progress:
            ready = _prepare(job, progress)
            kept = finished_code(job.directory, ready.key) if self._resumed else None
            if kept is not None:
                progress.say(f"Done before: {job.directory}")
                return kept
            return Session(ready.plan, job.directory, progress, command, job.overrides, ready.key, ready.against).run()


def run_launched(argv: list[str], config: DictConfig) -> None:
    """The task of a sweep whose launcher is not Hydra's own: one job, at once, in a process that the launcher started.

    `argv` is the sweep's command. Jobs that land on one machine are timed one after the other.

    Raises:
        SkoteError: it did not end with 0; its `exit_code` is the job's, its sentence names the directory.
    """
    register_schema()
    runner = Runner(Console(highlight=False), argv=argv)
    runner.collect(config)
    with machine_turn():
        code = runner.run_collected()
    if code != ExitCode.DONE:
        directory = HydraConfig.get().runtime.output_dir
        error = SkoteError(f"The job in {directory} ended with exit code {code}: its run.log and its report say why.")
        error.exit_code = code
        raise error


def _launcher(arguments: list[str]) -> str | None:
    """The launcher that the command line asks for in place of Hydra's own, which runs jobs in this process."""
    chosen = [each.partition("=")[2] for each in arguments if each.startswith("hydra/launcher=")]
    return chosen[-1] if chosen and chosen[-1] != "basic" else None


def main() -> None:
    """Compose the configuration from the command line, run it, and exit with the code of design's table.

    0 done, 1 something failed or a check did, 2 the run is invalid, 3 a check is inconclusive, 4 wrong usage, 130
    interrupted; of a sweep's codes the worst, in the order 130, 4, 2, 1, 3.
    """
    register_schema()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a time limit ends a run as Ctrl-C does
    said = io.StringIO()
    try:
        runner = Runner(Console(highlight=False), take_resume())
        launched = _launcher(sys.argv[1:])
        task = partial(run_launched, list(sys.argv)) if launched else runner.collect
        compose = hydra.main(version_base="1.3", config_path=str(CONF_DIR), config_name="config")(task)
        try:
            with contextlib.redirect_stderr(said):  # Hydra reports its own errors over several lines and exits with 1
                compose()
        except SystemExit as error:
            if error.code:
                if launched and isinstance(error.__context__, SkoteError):  # that of a job
                    raise error.__context__ from None
                schema = OmegaConf.structured(RunConfig)
                raise UsageError(refusal(said.getvalue(), error, sys.argv[1:], schema)) from error
        code = runner.run()
    except SkoteError as error:
        print(f"skote-eval: {error}", file=sys.stderr)  # noqa: T201
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(ExitCode.INTERRUPTED)
    sys.exit(code)


def _prepare(job: Job, progress: RunProgress) -> Ready:
    """Check everything about a job that can be checked before an engine starts.

    Raises:
        UsageError: an option, a path or a prompt that cannot be served.
    """
    settings = to_settings(job.config)
    if settings.resume is not None:
        raise UsageError("resume=DIR belongs on the command line: a configuration cannot hold it.")
    compare, other = _compares(settings, job.compare), None
    if settings.instead is not None:
        other = stand_in(settings, job.name, job.folders, job.overrides, progress.say)
        if other is not None:
            settings, compare = other.settings, bool(other.settings.compare["name"])
    against = _against(settings, job.overrides)
    if against is not None:
        settings = _repeated(settings, against)
        compare = "baseline" in against.manifest["arms"]
    check_limits(settings.check, two_arms=compare)
    plan = replace(plan_run(settings, job.directory, progress, compare=compare), stand_in=other)
    key = cell_key(asdict(settings), plan.workload.sha256)
    return Ready(plan if against is None else _same_blocks(plan, against), key, against)


def _said(outcome: ExitCode | Failure) -> str | None:
    return outcome.sentence if isinstance(outcome, Failure) else None


def _against(settings: RunConfig, overrides: list[str]) -> Run | None:
    """The run that `check=reproduce` repeats.

    Raises:
        UsageError: there is no such run, its files are not as it left them, or the command line asks for something else
            than to repeat it.
    """
    if settings.check.name != "reproduce":
        if settings.against is not None:
            raise UsageError("against=RUN_DIR says which run check=reproduce repeats: add check=reproduce.")
        return None
    if settings.against is None:
        raise UsageError("check=reproduce needs against=RUN_DIR, the directory of the run to repeat.")
    foreign = [each for each in overrides if each.lstrip("+~").partition("=")[0] not in BESIDE_REPRODUCE]
    if foreign:
        raise UsageError(
            f"check=reproduce repeats the configuration of {settings.against}: leave out {' '.join(foreign)}."
        )
    try:
        run = read_run(Path(settings.against))
    except RecordError as error:
        raise UsageError(f"against={settings.against} is not the directory of a run: {error}") from error
    if run.manifest["status"] != "complete":
        raise UsageError(f"The run in {settings.against} is {run.manifest['status']}: there is nothing to reproduce.")
    try:
        first = next(differences(run.directory), None)
    except RecordError as error:
        raise UsageError(f"against={settings.against} cannot be verified: {error}") from error
    if first is not None:
        raise UsageError(
            f"The run in {settings.against} is not as it was left: {first} (skote-report verify says all that differs, "
            "and of metrics.json and report.html skote-report writes new ones.)"
        )
    return run


def _repeated(settings: RunConfig, against: Run) -> RunConfig:
    """The configuration of `against`, with what `settings` may say beside it."""
    repeated = recorded_settings(against.manifest["config"])
    repeated.check, repeated.against, repeated.report = settings.check, settings.against, settings.report
    repeated.model.path = settings.model.path or repeated.model.path
    repeated.model.cache_dir = settings.model.cache_dir or repeated.model.cache_dir
    return repeated


def _same_blocks(plan: Plan, against: Run) -> Plan:
    """`plan` with exactly the blocks that `against` came to, however it chose their number."""
    add = against.manifest["workload"]["blocks"] - len(plan.workload.blocks)
    return replace(plan, workload=plan.workload.extended(add) if add > 0 else plan.workload, stop=None)


def _plain(hydra_config: Any, key: str) -> dict[str, Any]:  # noqa: ANN401 (HydraConf by its type, DictConfig in fact)
    """A part of Hydra's own configuration, resolved while Hydra's configuration is that of the job."""
    container = OmegaConf.to_container(OmegaConf.select(hydra_config, key), resolve=True)
    if not isinstance(container, dict):
        raise TypeError(f"hydra.{key} is a {type(container).__name__}, not a mapping")
    return {str(name): value for name, value in container.items()}


def _compares(settings: RunConfig, option: str) -> bool:
    """Whether there is a second arm, by the `option` of the group `compare`.

    One engine against itself, and one without a model against another, only where the option was chosen, on the command
    line or in an experiment's file.
    """
    if not settings.compare["name"] or option != "default":
        return bool(settings.compare["name"])
    itself: bool = settings.compare["name"] == settings.engine["name"]
    return not itself and settings.engine["_target_"] not in WITHOUT_MODEL
