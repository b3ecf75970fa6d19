"""The files that hold a checkpoint's tensors: safetensors or PyTorch's own, one or in shards."""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from skote.model.config_file import read_json
from skote.types import CheckpointError

_SINGLE = ("model.safetensors", "pytorch_model.bin")


def located(local_dir: Path, names: Mapping[str, tuple[str, ...]]) -> dict[Path, dict[str, str]]:
    """Which file holds which of `names`, and what it is called there; `names` has the spellings that are tried.

    Raises:
        CheckpointError: no weights, a damaged index, or a tensor that no file holds.
    """
    held = _held(local_dir)
    by_file: dict[Path, dict[str, str]] = {}
    for name, spellings in names.items():
        spelled = next((each for each in spellings if each in held), None)
        if spelled is None:
            raise CheckpointError(f"{local_dir} has no tensor {name}, which its config.json asks for.")
        by_file.setdefault(held[spelled], {})[name] = spelled
    return by_file


def read_file(path: Path, names: Mapping[str, str]) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a file by our names for them, on the host: mapped from the file, not read before they are used.

    Files of PyTorch are read with weights_only, so that none can run code.

    Raises:
        CheckpointError: the file cannot be read, or is not one of tensors alone.
    """
    try:
        if path.suffix != ".safetensors":
            tensors = _unpickled(path)
            yield from ((name, tensors[spelled]) for name, spelled in names.items())
            return
        with safe_open(path, framework="pt") as file:
            for name, spelled in names.items():
                yield name, file.get_tensor(spelled)
    except KeyError as error:
        raise CheckpointError(f"{path} has no tensor {error.args[0]}, which its index names.") from error
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}): it is damaged or incomplete.") from error


def _held(local_dir: Path) -> dict[str, Path]:
    """The file of every tensor of the directory."""
    for file in _SINGLE:
        index, single = local_dir / f"{file}.index.json", local_dir / file
        if index.is_file():
            return _indexed(index)
        if single.is_file():
            return dict.fromkeys(_names_in(single), single)
    raise CheckpointError(
        f"{local_dir} has no weights: expected {' or '.join(_SINGLE)}, or an index such as {_SINGLE[0]}.index.json and "
        "its files."
    )


def _indexed(path: Path) -> dict[str, Path]:
    weight_map = read_json(path).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise CheckpointError(f"{path} is not an index of weight files: it needs a weight_map of names.")
    return {name: path.parent / file for name, file in weight_map.items()}


def _names_in(path: Path) -> list[str]:
    if path.suffix != ".safetensors":
        return list(_unpickled(path))
    try:
        with safe_open(path, framework="pt") as file:
            return list(file.keys())
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}): it is damaged or incomplete.") from error


def _unpickled(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of a PyTorch file, mapped where it is of the kind that can be (all since torch 1.6)."""
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except (pickle.UnpicklingError, RuntimeError, EOFError, OSError, ValueError, LookupError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise CheckpointError(
            f"{path} cannot be read as tensors alone ({reason}): it is damaged, or holds code; save it as safetensors."
        ) from error
    if not isinstance(content, dict) or not all(isinstance(each, torch.Tensor) for each in content.values()):
        raise CheckpointError(f"{path} does not hold a model's tensors by name.")
    return content
