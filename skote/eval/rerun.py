"""The command that repeats a run, from its manifest."""

from __future__ import annotations

import shlex
from typing import Any

STARTS = {"skote-eval": ["skote-eval"], "runner.py": ["python", "-m", "skote.eval.runner"]}
WITH_VALUE = ("--config-dir", "-cd", "--config-name", "-cn", "--config-path", "-cp")


def rerun_command(manifest: dict[str, Any]) -> str:
    """A shell command for the run of `manifest`; of a sweep's job, for that job alone. It goes to a new directory."""
    program, *arguments = shlex.split(manifest["command"])
    start = STARTS.get(program, ["python", "run.py"])
    return shlex.join([*start, *_composition(arguments), *manifest["overrides"]])


def _composition(arguments: list[str]) -> list[str]:
    """The options that say which primary configuration Hydra starts from: the overrides do not hold them."""
    kept = []
    for index, argument in enumerate(arguments):
        if argument in WITH_VALUE:
            kept += arguments[index : index + 2]
        elif argument.startswith(tuple(f"{name}=" for name in WITH_VALUE)):
            kept.append(argument)
    return kept
