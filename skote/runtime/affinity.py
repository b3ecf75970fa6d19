"""Which CPU cores a replica keeps to: those near its GPU, or a part of its own where CPU replicas share the machine."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from skote.flags import NumericFlags, set_flags
from skote.types import device_parts

Cores = tuple[int, ...]

PCI = Path("/sys/bus/pci/devices")


def cores_of(devices: Sequence[str], pci: Path = PCI) -> list[Cores | None]:
    """The cores of each of `devices`, a torch name a replica; None where it may use them all.

    CPU replicas get equal parts of this process's cores, in their order; a CUDA replica those of this process that the
    system calls local to its GPU (`pci`/ADDRESS/local_cpulist), where it says so.
    """
    if not hasattr(os, "sched_getaffinity"):
        return [None] * len(devices)
    ours = sorted(os.sched_getaffinity(0))
    shared = [index for index, device in enumerate(devices) if device == "cpu"]
    parts: dict[int, Cores] = {}
    if 1 < len(shared) <= len(ours):
        each = len(ours) // len(shared)
        parts = {index: tuple(ours[place * each : (place + 1) * each]) for place, index in enumerate(shared)}
    return [parts.get(index) if device == "cpu" else _near(device, ours, pci) for index, device in enumerate(devices)]


def prepare(flags: NumericFlags, cores: Cores | None) -> None:
    """Set up a replica's process: keep it, and every thread that it starts, to `cores`; then `set_flags`."""
    if cores is not None:
        os.sched_setaffinity(0, cores)
    set_flags(flags)


def parse_cores(text: str) -> set[int]:
    """The numbers of a Linux CPU list such as "0-3,8"."""
    cores: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cores.update(range(int(first), int(last or first) + 1))
    return cores


def _near(device: str, ours: Sequence[int], pci: Path) -> Cores | None:
    if not device.startswith("cuda"):
        return None
    import torch

    first = device_parts(device)[0]  # whose replica's process launches on the others, too
    facts: Any = torch.cuda.get_device_properties(first)  # torch's stubs lack the PCI address
    address = f"{facts.pci_domain_id:04x}:{facts.pci_bus_id:02x}:{facts.pci_device_id:02x}.0"
    listed = pci / address / "local_cpulist"
    near = parse_cores(listed.read_text(encoding="ascii")) & set(ours) if listed.exists() else set()
    return tuple(sorted(near)) if 0 < len(near) < len(ours) else None
