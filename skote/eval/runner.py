"""`skote-eval` and `python run.py`: Hydra composes, a session runs, the exit code says how it went."""

from __future__ import annotations

import contextlib
import io
import logging
import re
import shlex
import sys
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException
from rich.console import Console

from skote.config import CONF_DIR, RunConfig, register_schema, to_settings
from skote.eval.comparison import render_comparison
from skote.eval.plan import plan_run
from skote.eval.progress import RunProgress
from skote.eval.session import Session
from skote.types import ExitCode, SkoteError

log = logging.getLogger(__name__)

_ASIDE = re.compile(
    r"\s*((full_key|object_type|reference_type)[:=]|See https|Set the environment variable|To append to|Key .* not in)"
)


class Runner:
    """The jobs of one command: one, or those of a sweep. Remembers how each ended."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._sweep_dir: Path | None = None
        self.jobs: list[Path] = []
        self.codes: list[ExitCode] = []

    def job(self, config: DictConfig) -> None:
        """Run one job. Its failures end in an exit code and a sentence, so that the rest of a sweep goes on."""
        hydra_config = HydraConfig.get()
        directory = Path(hydra_config.runtime.output_dir)
        overrides = list(hydra_config.overrides.task)
        if hydra_config.mode == RunMode.MULTIRUN:
            self._sweep_dir = Path(hydra_config.sweep.dir)
            self._console.rule(f"job {hydra_config.job.num}: {' '.join(overrides) or 'defaults'}")
        self.jobs.append(directory)
        self.codes.append(self._guarded(config, directory, overrides))

    def finish(self) -> ExitCode:
        """After the last job: the comparison of a sweep, and the worst of the codes."""
        if self._sweep_dir is not None:
            self._console.print(str(render_comparison(self.jobs, self._sweep_dir)), highlight=False, soft_wrap=True)
        return ExitCode.worst(self.codes)

    def _guarded(self, config: DictConfig, directory: Path, overrides: list[str]) -> ExitCode:
        try:
            return self._run(config, directory, overrides)
        except (SkoteError, OmegaConfBaseException) as error:
            log.exception("the run failed")
            self._complain(_sentence(str(error)))
            return error.exit_code if isinstance(error, SkoteError) else ExitCode.USAGE
        except KeyboardInterrupt:
            self._complain(f"Interrupted; the requests that had finished are in {directory}.")
            self.codes.append(ExitCode.INTERRUPTED)
            raise
        except Exception as error:  # the last door: whatever it was, the user gets a sentence and the log a trace
            log.exception("the run failed")
            self._complain(f"Unexpected {type(error).__name__}: {_sentence(str(error))} (trace in {directory}/run.log)")
            return ExitCode.FAILED

    def _run(self, config: DictConfig, directory: Path, overrides: list[str]) -> ExitCode:
        settings = to_settings(config)
        command = shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])
        with RunProgress(self._console) as progress:
            plan = plan_run(settings, directory, progress, compare=_compares(settings, overrides))
            return Session(plan, directory, progress, command, overrides).run()

    def _complain(self, sentence: str) -> None:
        print(f"skote-eval: {sentence}", file=sys.__stderr__)


def main() -> None:
    """Compose the configuration from the command line, run it, and exit with the code of design's table.

    0 done, 1 something failed, 2 the run is invalid, 4 wrong usage, 130 interrupted; of a sweep's codes the worst, in
    the order 130, 4, 2, 1.
    """
    register_schema()
    runner = Runner(Console(highlight=False))
    hydra_main = hydra.main(version_base="1.3", config_path=str(CONF_DIR), config_name="config")(runner.job)
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):  # Hydra reports its own errors over several lines and exits with 1
            hydra_main()
    except SystemExit as error:
        if error.code:
            print(f"skote-eval: {_sentence(said.getvalue())}{_neighbours(error)}", file=sys.stderr)  # noqa: T201
            sys.exit(ExitCode.worst([*runner.codes, ExitCode.USAGE]))
    except KeyboardInterrupt:
        sys.exit(ExitCode.worst([*runner.codes, ExitCode.INTERRUPTED]))
    try:
        sys.exit(runner.finish())
    except SkoteError as error:
        print(f"skote-eval: {error}", file=sys.stderr)  # noqa: T201
        sys.exit(ExitCode.worst([*runner.codes, error.exit_code]))


def _compares(settings: RunConfig, overrides: list[str]) -> bool:
    """Whether there is a second arm: one engine against itself only where `compare` was asked for by name."""
    if not settings.compare["name"]:
        return False
    asked = any(override.lstrip("+").startswith("compare=") for override in overrides)
    return asked or settings.compare["name"] != settings.engine["name"]


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
