"""The experiment that runs in the place of one that asks for more accelerators than there are.

Part of the composition root.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from skote.config import RunConfig
from skote.eval.experiment import compose_experiment
from skote.runtime.devices import resolve_devices
from skote.types import UsageError


def stand_in(
    settings: RunConfig, folders: Sequence[Path], overrides: Sequence[str], say: Callable[[str], None]
) -> RunConfig | None:
    """The configuration of the file `settings.instead` in one of `folders`, with `overrides`, or None.

    It is needed where this machine has fewer accelerators than the number `settings.devices`; `say` is told.

    Raises:
        UsageError: there is no such file, or the overrides do not fit it.
    """
    there = [name for name in resolve_devices("all") if name != "cpu"]
    if not isinstance(settings.devices, int) or settings.devices <= len(there):
        return None
    name = f"{settings.instead}.yaml"
    path = next((folder / name for folder in folders if (folder / name).is_file()), None)
    if path is None:
        raise UsageError(f"instead={settings.instead}: there is no {name} in {', '.join(map(str, folders))}.")
    say(f"This machine has {len(there)} of the {settings.devices} accelerator(s) asked for: {name} runs instead")
    return compose_experiment(path, overrides)
