"""The experiment that runs in the place of one that asks for more accelerators than there are.

Part of the composition root.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from skote.config import RunConfig
from skote.eval.experiment import compose_experiment
from skote.runtime.devices import resolve_devices
from skote.types import UsageError


@dataclass(frozen=True, slots=True)
class StandIn:
    """What runs instead: its configuration, the name of the experiment that was asked for, and why, in a sentence."""

    settings: RunConfig
    experiment: str
    sentence: str

    @property
    def stands_for(self) -> dict[str, str]:
        """The manifest's entry."""
        return {"experiment": self.experiment, "sentence": self.sentence}


def stand_in(
    settings: RunConfig, experiment: str, folders: Sequence[Path], overrides: Sequence[str], say: Callable[[str], None]
) -> StandIn | None:
    """The file `settings.instead` in one of `folders`, with `overrides`, in the place of `experiment`; or None.

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
    sentence = (
        f"This machine has {len(there)} of the {settings.devices} accelerator(s) that {experiment} asks for: {name} "
        "runs instead"
    )
    say(sentence)
    return StandIn(compose_experiment(path, overrides), experiment, f"{sentence}.")
