"""An experiment file as Hydra composes it, and what a run differs in from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from skote.config import CONF_DIR, RunConfig, recorded_settings, register_schema, to_settings
from skote.eval.options import leaves
from skote.types import UsageError

FREE = {
    *("model.path", "model.cache_dir", "engine.environment", "compare.environment"),  # where things lie
    *("devices", "report.render", "measure.start_timeout_s"),  # devices: see `_devices_differ`
    *("claim.statement", "claim.claimed", "claim.source", "claim.open"),  # words
    "claim.weights",  # see `_other_weights`
}
"""Options that a run may have otherwise than its file: they are not what is measured or judged."""


def compose_experiment(path: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """The whole configuration of the experiment file `path`, with `overrides` as on the command line.

    Raises:
        UsageError: Hydra cannot compose it.
    """
    register_schema()
    try:
        with initialize_config_dir(version_base="1.3", config_dir=str(path.parent.absolute())):
            return to_settings(compose(path.stem, overrides=[f"hydra.searchpath=['file://{CONF_DIR}']", *overrides]))
    except (HydraException, OmegaConfBaseException) as error:
        raise UsageError(f"{path} cannot be composed: {str(error).splitlines()[0].rstrip('.')}.") from error


JUDGING = ("claim.id", "claim.needs", "claim.rules")
"""What a claim may have otherwise than the claim, or the plain experiment, whose run it is judged by."""


def deviation(path: Path, manifest: Mapping[str, Any], *, judging: bool = True) -> str | None:
    """What a run with `manifest` has otherwise than the experiment file `path`, as one sentence; None where nothing.

    Compared is every option but those in `FREE`, and where `judging` is off those in `JUDGING`: the claim's rules,
    checks and subject, and all that is measured. Of the devices only number and kind, and that they are CUDA devices
    where the claim needs them. Weights from another place must be those that the file means (`claim.weights`).

    Raises:
        UsageError: the file cannot be composed.
    """
    wanted = compose_experiment(path)
    try:
        recorded = recorded_settings(manifest["config"])
    except UsageError as error:
        return str(error)
    file, run = (dict(leaves(asdict(each), whole=FREE)) for each in (wanted, recorded))
    differing = [key for key in file | run if key not in FREE and file.get(key) != run.get(key)]
    if not judging:
        differing = [key for key in differing if not key.startswith(JUDGING)]
    said = [f"{key} is {_shown(run, key)} in the run and {_shown(file, key)} in {path.name}" for key in differing]
    said += _other_weights(wanted, recorded, manifest["model"]["weights_sha256"], path.name)
    if _devices_differ(wanted, manifest["devices"]):
        said.append(f"it ran on {', '.join(manifest['devices'])}, which {path.name} does not ask for")
    if not said:
        return None
    return said[0] + (f", and {len(said) - 1} more do not match." if len(said) > 1 else ".")


def _shown(leaves: Mapping[str, Any], key: str) -> str:
    return repr(leaves[key]) if key in leaves else "not there"


def _other_weights(wanted: RunConfig, run: RunConfig, sha256: str | None, name: str) -> list[str]:
    """What is wrong with the weights of a run, whose hash is `sha256`; one whose engines load none has no hash."""
    meant, moved = wanted.claim.weights, run.model.path != wanted.model.path
    if moved and not meant:
        unsaid = f"{name} does not say which weights it means: claim.weights"
        return [f"model.path is {run.model.path!r} in the run, and {unsaid}"]
    if meant and sha256 != meant and (moved or sha256 is not None):
        found = "no hash" if sha256 is None else f"the SHA-256 {sha256}"
        return [f"its weights have {found}, and {name} means {meant} (claim.weights)"]
    return []


def _devices_differ(wanted: RunConfig, ran: list[str]) -> bool:
    kinds = [device.partition(":")[0] for device in ran]
    if wanted.claim.needs in ("cuda", "two_cuda") and set(kinds) != {"cuda"}:
        return True
    if isinstance(wanted.devices, int):
        return len(ran) != wanted.devices
    names = [wanted.devices] if isinstance(wanted.devices, str) else list(wanted.devices)
    return [name.partition(":")[0] for name in names] != kinds
