"""Whether a model, a context and a request fit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import psutil
import torch

from skote.flags import TORCH_DTYPES
from skote.model.facts import ModelFacts
from skote.types import CapacityError, Request, UsageError

HEADROOM = 1.10  # activations, the interpreter, and the copy of one tensor that loading holds for a moment
KEPT_FREE = 0.10  # of the device, by a context that takes what is left
DEFAULT_MAX_MODEL_LEN = 8192


def check_memory(
    spec: ModelFacts, dtype: str, devices: Sequence[str], *, caches: Sequence[int], reference: bool = False
) -> None:
    """Check that weights and KV cache of all arms, one replica of each on every device, fit side by side.

    `caches` has the positions of each arm's cache, of all its rows. `reference` adds the fp32 weights that rounded
    dtypes and sampled outputs are compared with, on the first device.

    Raises:
        CapacityError: they do not; the sentence says what is needed and what there is.
    """
    element: int = getattr(torch, TORCH_DTYPES[dtype]).itemsize
    together = (len(caches) * spec.parameters + spec.kv_bytes_per_token(1) * sum(caches)) * element * HEADROOM
    for device, replicas in Counter(devices).items():
        beside = spec.parameters * 4 * HEADROOM if reference and device == devices[0] else 0.0
        needed = together * replicas + beside
        there = available_bytes(device)
        if there is not None and needed > there:
            third = ", an fp32 reference" if beside else ""
            raise CapacityError(
                f"The model does not fit: {needed / 1e9:.1f} GB ({dtype} weights and cache of {len(caches)} arm(s) "
                f"with {replicas} replica(s){third}) on {device}, which has {there / 1e9:.1f} GB; use fewer layers "
                "(model.layers=N), a smaller dtype, one arm (compare=none) or a larger device."
            )


def available_bytes(device: str) -> int | None:
    """Memory that `device` can give: free host memory for a CPU, all of a CUDA device's; None where unknown."""
    kind = torch.device(device).type
    if kind == "cpu":
        return int(psutil.virtual_memory().available)
    if kind == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return None


def check_context(max_model_len: int | str | None, facts: ModelFacts) -> None:
    """Check `max_model_len`, before weights are loaded: null, "auto", or a number of positions.

    Raises:
        UsageError: it is none of these.
        CapacityError: a number that the model does not have.
    """
    if max_model_len is None or max_model_len == "auto":
        return
    if not isinstance(max_model_len, int):
        raise UsageError(f"engine.max_model_len={max_model_len} must be a whole number of positions, auto or null.")
    if not 1 <= max_model_len <= facts.max_positions:
        raise CapacityError(
            f"engine.max_model_len={max_model_len} must lie between 1 and the model's {facts.max_positions}."
        )


def longest_context(max_model_len: int | str | None, facts: ModelFacts) -> int:
    """The positions that a request may take at most, whatever memory there is; as `context_length`."""
    if isinstance(max_model_len, int):
        return max_model_len
    return facts.max_positions if max_model_len == "auto" else min(facts.max_positions, DEFAULT_MAX_MODEL_LEN)


def context_length(
    max_model_len: int | str | None, facts: ModelFacts, *, rows: int, element_size: int, device: torch.device
) -> int:
    """The positions a row that a checked `max_model_len` stands for on `device`, which holds the weights by now.

    "auto" is as many as memory has room for beside a tenth of the device, null at most 8192; neither exceeds the model.

    Raises:
        CapacityError: "auto" where free memory is unknown, or has no room for one position a row.
    """
    if max_model_len != "auto":
        return longest_context(max_model_len, facts)
    memory = free_bytes(device)
    if memory is None:
        raise CapacityError(f"The free memory of {device} is unknown: give engine.max_model_len a number.")
    free, total = memory
    positions = int(free - KEPT_FREE * total) // (facts.kv_bytes_per_token(element_size) * rows)
    if positions < 1:
        raise CapacityError(
            f"{device} has {free / 1e9:.1f} GB of {total / 1e9:.1f} GB left beside the weights, a tenth of it stays "
            "free: there is no room for a KV cache; use fewer layers, a smaller dtype or a larger device."
        )
    return min(positions, facts.max_positions)


def cache_positions(facts: ModelFacts, capacity: int, *, rows: int, element_size: int, device: torch.device) -> int:
    """Positions of a cache that `rows` rows of up to `capacity` positions share, beside the weights on `device`.

    Enough for all of them at their longest, or what memory has room for, of which a tenth stays free.

    Raises:
        CapacityError: there is no room for one row.
    """
    wanted, memory = rows * capacity, free_bytes(device)
    if memory is None:
        return wanted
    free, total = memory
    room = int(free - KEPT_FREE * total) // facts.kv_bytes_per_token(element_size)
    if room < capacity:
        raise CapacityError(
            f"{device} has room for a KV cache of {max(room, 0)} positions beside the weights, a request may take "
            f"{capacity}: lower engine.max_model_len, or use fewer layers, a smaller dtype or a larger device."
        )
    return min(wanted, room)


def check_request(request: Request, *, capacity: int, vocab: int) -> None:
    """Check that `request` fits a context of `capacity` positions and a vocabulary of `vocab` tokens.

    Raises:
        CapacityError: it does not.
    """
    prompt_tokens, new_tokens = len(request.input_ids), request.max_new_tokens
    # The last token is returned and never fed back, so it takes no position.
    needed = prompt_tokens + new_tokens - 1
    if needed > capacity:
        raise CapacityError(
            f"Request {request.request_id!r} needs {needed} positions ({prompt_tokens} prompt tokens and {new_tokens} "
            f"new ones, the last of which takes none), the context holds {capacity}: shorten the prompt or ask for "
            "fewer tokens."
        )
    if not 0 <= min(request.input_ids) <= max(request.input_ids) < vocab:
        raise CapacityError(f"Request {request.request_id!r} has a token id outside the vocabulary of {vocab}.")


def free_bytes(device: torch.device) -> tuple[int, int] | None:
    """Memory that is free now, and all of it, of a CPU's host or a CUDA device; None where unknown."""
    if device.type == "cpu":
        memory = psutil.virtual_memory()
        return int(memory.available), int(memory.total)
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return free + unused, total
    return None


def gpu_uuids(devices: Sequence[str]) -> dict[str, str]:
    """NVIDIA's UUID ("GPU-...") of each CUDA device among `devices`, by its name."""
    return {
        device: f"GPU-{torch.cuda.get_device_properties(device).uuid}"
        for device in devices
        if torch.device(device).type == "cuda"
    }


def describe_accelerators() -> list[dict[str, str | int]]:
    """Name and memory of each accelerator, for the manifest."""
    found: list[dict[str, str | int]] = []
    for backend in (torch.cuda, torch.xpu):
        if backend.is_available():
            for index in range(backend.device_count()):
                properties = backend.get_device_properties(index)
                found.append({"name": properties.name, "memory_bytes": properties.total_memory})
    if torch.backends.mps.is_available():
        found.append({"name": "MPS"})
    return found
