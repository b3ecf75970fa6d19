"""`skote-eval` and `python run.py`: Hydra composes the jobs, sessions run them, the exit code says how it went."""

from __future__ import annotations

import contextlib
import io
import logging
import logging.config
import re
import shlex
import signal
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import env_override
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException
from rich.console import Console

from skote.config import CONF_DIR, RunConfig, recorded_settings, register_schema, to_settings
from skote.eval.check import check_limits
from skote.eval.comparison import read_comparison, render_comparison
from skote.eval.plan import Plan, plan_run
from skote.eval.progress import RunProgress
from skote.eval.record import Run, read_run
from skote.eval.session import Session
from skote.eval.sweep import Cell, Sweep, cell_key, finished_code, read_sweep, shuffled
from skote.types import ExitCode, RecordError, SkoteError, UsageError

log = logging.getLogger(__name__)

BESIDE_REPRODUCE = {"check", "against", "report", "report.render", "model.path", "model.cache_dir"}
"""Options that may stand beside check=reproduce: what they change is not what is measured."""

_ASIDE = re.compile(
    r"\s*((full_key|object_type|reference_type)[:=]|See https|Set the environment variable|To append to|Key .* not in)"
)


@dataclass(frozen=True, slots=True)
class Job:
    """What Hydra composed: a configuration, its directory and overrides, and what Hydra would set up around it.

    `compare` is the option of that group, which is not part of the configuration.
    """

    config: DictConfig
    directory: Path
    overrides: list[str]
    compare: str
    logging: dict[str, Any]
    environment: dict[str, str]


class Runner:
    """The jobs of one command: one, or those of a sweep. Collects them first, then runs them.

    Args:
        console: where progress goes.
        resumed: the sweep that this command goes on with.
    """

    def __init__(self, console: Console, resumed: Sweep | None = None) -> None:
        self._console = console
        self._resumed = resumed
        self._sweep_dir: Path | None = None
        self._jobs: list[Job] = []

    def collect(self, config: DictConfig) -> None:
        """Note a job that Hydra has composed; nothing of it runs before all are known."""
        hydra_config = HydraConfig.get()
        launcher = hydra_config.launcher["_target_"]
        if not launcher.endswith("BasicLauncher"):
            raise UsageError(f"hydra/launcher must be basic, got {launcher}: jobs are timed one after the other.")
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
            )
        )

    def run(self) -> ExitCode:
        """Run what was collected, one after the other: the worst of the codes."""
        if self._sweep_dir is None:
            return ExitCode.worst(self._guarded(job)[0] for job in self._jobs)
        return self._run_sweep(self._sweep_dir)

    def _run_sweep(self, directory: Path) -> ExitCode:
        seed = self._resumed.seed if self._resumed else int(self._jobs[0].config.get("seed") or 0)
        arguments = self._resumed.arguments if self._resumed else sys.argv[1:]
        jobs = shuffled(self._jobs, seed)
        cells = [Cell(str(job.directory.relative_to(directory.absolute())), job.overrides) for job in jobs]
        sweep = Sweep(directory, arguments, seed, cells)
        sweep.write()
        for cell, job in zip(cells, jobs, strict=True):
            self._console.rule(f"job {cell.directory}: {' '.join(job.overrides) or 'defaults'}")
            code, cell.sentence = self._guarded(job)
            cell.exit_code = int(code)
            cell.state = "interrupted" if code == ExitCode.INTERRUPTED else "failed" if cell.sentence else "done"
            sweep.write()
            if code == ExitCode.INTERRUPTED:
                self._console.print(f"Go on with resume={directory}", highlight=False, soft_wrap=True)
                return code
        for cell in sweep.troubled():
            said = cell.sentence or "its report says why"
            self._console.print(
                f"job {cell.directory}: exit {cell.exit_code}: {said}", highlight=False, markup=False, soft_wrap=True
            )
        path = render_comparison(read_comparison([job.directory for job in self._jobs]), directory)
        self._console.print(str(path), highlight=False, soft_wrap=True)
        return ExitCode.worst(cell.exit_code or 0 for cell in cells)

    def _guarded(self, job: Job) -> tuple[ExitCode, str | None]:
        """Run one job: its code, and the sentence where it failed, so that the rest of a sweep goes on."""
        logging.config.dictConfig(job.logging)
        try:
            with env_override(job.environment):
                return self._run(job), None
        except (SkoteError, OmegaConfBaseException) as error:
            log.exception("the run failed")
            code = error.exit_code if isinstance(error, SkoteError) else ExitCode.USAGE
            sentence = _sentence(str(error))
        except KeyboardInterrupt:
            code = ExitCode.INTERRUPTED
            sentence = f"Interrupted; the requests that had finished are in {job.directory}."
        except Exception as error:  # the last door: whatever it was, the user gets a sentence and the log a trace
            log.exception("the run failed")
            code = ExitCode.FAILED
            sentence = f"Unexpected {type(error).__name__}: {_sentence(str(error))} (trace in {job.directory}/run.log)"
        print(f"skote-eval: {sentence}", file=sys.stderr)  # noqa: T201
        return code, sentence

    def _run(self, job: Job) -> ExitCode:
        settings = to_settings(job.config)
        if settings.resume is not None:
            raise UsageError("resume=DIR belongs on the command line: a configuration cannot hold it.")
        against = _against(settings, job.overrides)
        if against is not None:
            settings = _repeated(settings, against)
            compare = "baseline" in against.manifest["arms"]
        else:
            compare = _compares(settings, job.compare)
        check_limits(settings.check, two_arms=compare)
        command = shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])
        with RunProgress(self._console) as progress:
            plan = plan_run(settings, job.directory, progress, compare=compare)
            key = cell_key(asdict(settings), plan.workload.sha256)
            if against is not None:
                plan = _same_blocks(plan, against)
            kept = finished_code(job.directory, key) if self._resumed else None
            if kept is not None:
                progress.say(f"Done before: {job.directory}")
                return kept
            return Session(plan, job.directory, progress, command, job.overrides, key, against).run()


def main() -> None:
    """Compose the configuration from the command line, run it, and exit with the code of design's table.

    0 done, 1 something failed or a check did, 2 the run is invalid, 3 a check is inconclusive, 4 wrong usage, 130
    interrupted; of a sweep's codes the worst, in the order 130, 4, 2, 1, 3.
    """
    register_schema()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a time limit ends a run as Ctrl-C does
    said = io.StringIO()
    try:
        runner = Runner(Console(highlight=False), _take_resume())
        compose = hydra.main(version_base="1.3", config_path=str(CONF_DIR), config_name="config")(runner.collect)
        try:
            with contextlib.redirect_stderr(said):  # Hydra reports its own errors over several lines and exits with 1
                compose()
        except SystemExit as error:
            if error.code:
                raise UsageError(f"{_sentence(said.getvalue())}{_neighbours(error)}") from error
        code = runner.run()
    except SkoteError as error:
        print(f"skote-eval: {error}", file=sys.stderr)  # noqa: T201
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(ExitCode.INTERRUPTED)
    sys.exit(code)


def _take_resume() -> Sweep | None:
    """The sweep that `resume=DIR` names: the command line becomes that sweep's own, with its directory.

    Raises:
        UsageError: there is no sweep in DIR, or the rest of the command line is another one's.
    """
    values = [argument.partition("=")[2].strip("'\"") for argument in sys.argv[1:] if argument.startswith("resume=")]
    if not values or values[-1] in ("", "null"):
        return None
    sweep = read_sweep(Path(values[-1]))
    own = [argument for argument in sweep.arguments if not argument.startswith("hydra.sweep.dir=")]
    given = [argument for argument in sys.argv[1:] if not argument.startswith(("resume=", "hydra.sweep.dir="))]
    if given and sorted(given) != sorted(own):
        raise UsageError(
            f"resume={values[-1]} goes on with a sweep whose command was {shlex.join(own)!r}: repeat that, or give "
            "resume=DIR alone."
        )
    quoted = str(sweep.directory).replace("\\", "\\\\").replace("'", "\\'")
    sys.argv[1:] = [*own, f"hydra.sweep.dir='{quoted}'"]
    return sweep


def _against(settings: RunConfig, overrides: list[str]) -> Run | None:
    """The run that `check=reproduce` repeats.

    Raises:
        UsageError: there is no such run, or the command line asks for something else than to repeat it.
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

    One engine against itself only where the option was chosen, on the command line or in an experiment's file.
    """
    if not settings.compare["name"]:
        return False
    return option != "default" or settings.compare["name"] != settings.engine["name"]


def _sentence(text: str) -> str:
    """What Hydra, OmegaConf or argparse said, as one line, without usage, hints about traces, and internals."""
    lines = text.rpartition(": error: ")[2].splitlines()
    lines = [line for line in lines if line.strip() and not _ASIDE.match(line)]
    if lines and lines[0].startswith("Traceback"):  # of the file system, when Hydra makes the run's directory
        lines = lines[-1:]
    said = ""
    for line in lines:
        if line.startswith("Config search path"):
            break
        listed = line.startswith("\t") and not said.endswith(":")
        ended = not said or said[-1] in ".:,;!?"
        said += (", " if listed else " " if ended else ". ") + line.strip()
    return said.strip() or "The command line could not be understood; see --help."


def _neighbours(error: BaseException | None) -> str:
    """Where `error` came from an option that is not there: a sentence with those that are."""
    while error is not None:
        if isinstance(error, ConfigKeyError | ConfigAttributeError) and isinstance(error.parent_node, DictConfig):
            place = (error.full_key or "").rpartition(".")[0] or "the top"
            return f" There is no such option; {place} has {', '.join(map(str, error.parent_node))}."
        error = error.__cause__ or error.__context__
    return ""
