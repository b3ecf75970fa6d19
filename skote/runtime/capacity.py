"""Whether a model fits, asked before anything is loaded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import psutil
import torch

from skote.flags import TORCH_DTYPES
from skote.model.spec import DecoderSpec
from skote.types import CapacityError

HEADROOM = 1.10  # activations, the interpreter, and the copy of one tensor that loading holds for a moment


def check_memory(
    spec: DecoderSpec, dtype: str, devices: Sequence[str], *, arms: int, positions: int, reference: bool = False
) -> None:
    """Check that weights and KV cache of `arms` arms, one replica of each on every device, fit side by side.

    `reference` adds the fp32 weights that rounded dtypes are compared with, on the first device.

    Raises:
        CapacityError: they do not; the sentence says what is needed and what there is.
    """
    element: int = getattr(torch, TORCH_DTYPES[dtype]).itemsize
    replica = (spec.parameters + spec.kv_bytes_per_token(1) * positions) * element * HEADROOM
    for device, replicas in Counter(devices).items():
        beside = spec.parameters * 4 * HEADROOM if reference and device == devices[0] else 0.0
        needed = replica * replicas * arms + beside
        there = available_bytes(device)
        if there is not None and needed > there:
            third = ", an fp32 reference" if beside else ""
            raise CapacityError(
                f"The model does not fit: {needed / 1e9:.1f} GB ({dtype} weights and cache of {arms} arm(s) with "
                f"{replicas} replica(s){third}) on {device}, which has {there / 1e9:.1f} GB; use fewer layers "
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
