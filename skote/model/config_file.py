"""The JSON files of a checkpoint directory: config.json, and what generation_config.json says of ends."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from skote.types import CheckpointError


def read_config(local_dir: Path) -> dict[str, Any]:
    """The config.json of a checkpoint directory.

    Raises:
        CheckpointError: the directory or the file is missing, or it is not a JSON object.
    """
    path = local_dir / "config.json"
    if not local_dir.is_dir():
        raise CheckpointError(f"There is no model directory {local_dir}.")
    if not path.is_file():
        raise CheckpointError(f"{local_dir} has no config.json: it is not a checkpoint directory.")
    return read_json(path)


def model_config(local_dir: Path) -> dict[str, Any]:
    """As `read_config`, with the end-of-sequence ids of generation_config.json, which decides them where it exists.

    Raises:
        CheckpointError: as `read_config`.
    """
    config = read_config(local_dir)
    generation = local_dir / "generation_config.json"
    if not generation.is_file():
        return config
    return config | {"eos_token_id": read_json(generation).get("eos_token_id")}


def eos_ids(config: Mapping[str, Any]) -> tuple[int, ...]:
    """The tokens that end a text: a config's `eos_token_id` is null, a number, or a list."""
    value = config.get("eos_token_id")
    if value is None:
        return ()
    return tuple(int(token) for token in value) if isinstance(value, list) else (int(value),)


def read_json(path: Path) -> dict[str, Any]:
    """A file of a checkpoint directory that holds one JSON object.

    Raises:
        CheckpointError: the file cannot be read, or is not a JSON object.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} is not readable JSON: {error}.") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} must hold a JSON object.")
    return content
