"""Which devices replicas run on: `2`, `all`, `cpu`, `cuda:1`, `[cuda:0,cuda:2]`, resolved on this machine."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch

from skote.types import CapacityError, UsageError

Devices = int | str | Sequence[str] | None


def resolve_devices(devices: Devices) -> list[str]:
    """One torch device name a replica.

    A number takes the first accelerators (CUDA, XPU, MPS, in this order), or, on a machine without one, as many
    replicas that share the CPU's cores. `all` takes every accelerator, or one CPU replica. None is 1.

    Raises:
        UsageError: what was given names no devices.
        CapacityError: more devices than there are, or a name that is not on this machine.
    """
    accelerators = _accelerators()
    if devices is None:
        devices = 1
    if isinstance(devices, str) and devices.isdecimal():
        devices = int(devices)
    if isinstance(devices, bool) or not isinstance(devices, (int, str, Sequence)):
        raise UsageError(
            f"devices={devices!r} names no devices; use a number, all, cpu, cuda:1 or a list of such names."
        )
    if isinstance(devices, int):
        return _first(devices, accelerators)
    if devices == "all":
        return accelerators or ["cpu"]
    names = [devices] if isinstance(devices, str) else list(devices)
    if not names:
        raise UsageError("devices=[] names no devices; name at least one.")
    resolved = [_check_name(name, accelerators) for name in names]
    twice = {name for name in resolved if name != "cpu" and resolved.count(name) > 1}
    if twice:
        raise UsageError(f"devices names {', '.join(sorted(twice))} more than once; a device holds one replica.")
    return resolved


def threads_per_replica(devices: Sequence[str]) -> int | None:
    """CPU threads for each CPU replica, the cores split evenly; None for a set without CPU replicas."""
    replicas = sum(device == "cpu" for device in devices)
    return max(_cores() // replicas, 1) if replicas else None


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _accelerators() -> list[str]:
    if torch.cuda.is_available():
        return [f"cuda:{index}" for index in range(torch.cuda.device_count())]
    if torch.xpu.is_available():
        return [f"xpu:{index}" for index in range(torch.xpu.device_count())]
    return ["mps"] if torch.backends.mps.is_available() else []


def _first(count: int, accelerators: list[str]) -> list[str]:
    if count < 1:
        raise UsageError(f"devices={count} must be at least 1.")
    if accelerators:
        if count > len(accelerators):
            raise CapacityError(f"devices={count} was asked for; this machine has {len(accelerators)} accelerator(s).")
        return accelerators[:count]
    if count > _cores():
        raise CapacityError(
            f"devices={count} was asked for; this machine has {_cores()} CPU core(s) and no accelerator."
        )
    return ["cpu"] * count


def _check_name(name: Any, accelerators: list[str]) -> str:  # noqa: ANN401 (whatever a configuration holds)
    text = str(name)
    if text == "cpu":
        return text
    full = f"{text}:0" if text in ("cuda", "xpu") else text
    if full not in accelerators:
        there = ", ".join(["cpu", *accelerators])
        raise CapacityError(f"The device {text!r} is not on this machine; there is {there}.")
    return full
