"""The families that the lean decoder runs: a module of `skote.model.families` each, named after its model_type."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from skote.model import families
from skote.model.adapter import NotComputedError
from skote.model.config_file import model_config
from skote.model.spec import DecoderSpec
from skote.types import CheckpointError

FAMILIES = tuple(sorted(module.name for module in pkgutil.iter_modules(families.__path__)))
"""The model_type of each, as config.json has it."""


def models_of(model_type: str) -> str:
    """The models that the adapter of one of `FAMILIES` names as its own."""
    return str(_adapter(model_type).MODELS)


def spec_of(config: Mapping[str, Any]) -> DecoderSpec:
    """The spec that a config.json describes.

    Raises:
        NotComputedError: a family without an adapter, a feature that the lean decoder lacks, or a key that is missing.
        CheckpointError: a value of the wrong kind.
    """
    model_type = config.get("model_type")
    if model_type not in FAMILIES:
        raise NotComputedError(f"model_type {model_type!r} has no adapter in skote.model.families")
    if config.get("quantization_config") is not None:
        raise NotComputedError("its weights are quantised")
    try:
        spec: DecoderSpec = _adapter(str(model_type)).spec(config)
    except KeyError as error:
        raise NotComputedError(
            f"config.json lacks {error.args[0]!r}, which a model of type {model_type!r} must state"
        ) from error
    except (AttributeError, TypeError, ValueError) as error:
        raise CheckpointError(f"config.json holds a value of the wrong type: {error}.") from error
    return spec


def adapter_refusal(config: Mapping[str, Any]) -> str | None:
    """Why the lean decoder does not compute the model of a config.json, or None.

    Raises:
        CheckpointError: as `spec_of`.
    """
    try:
        spec_of(config)
    except NotComputedError as error:
        return str(error)
    return None


def load_spec(local_dir: Path, layers: int | None = None) -> DecoderSpec:
    """The spec of a checkpoint directory; `layers` cuts it to its first layers.

    Raises:
        CheckpointError: no readable config.json, a family without an adapter, or a feature that the decoder lacks.
    """
    spec = spec_of(model_config(local_dir))
    if layers is None:
        return spec
    if not 1 <= layers <= spec.layers:
        raise CheckpointError(f"layers must lie between 1 and {spec.layers}, got {layers}.")
    return spec.with_layers(layers)


def _adapter(model_type: str) -> ModuleType:
    return importlib.import_module(f"{families.__name__}.{model_type}")
