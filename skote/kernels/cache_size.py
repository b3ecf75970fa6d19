"""How much of what a device reads can come from its caches instead of its memory."""

from __future__ import annotations

from pathlib import Path

import torch

_CPUS = Path("/sys/devices/system/cpu")
_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def cache_size(device: torch.device, cpus: Path = _CPUS) -> int | None:
    """Bytes of all data caches of `device`: of a GPU its L2; of a CPU all levels of all cores, as Linux lists them.

    None where that is unknown.
    """
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).L2_cache_size)
    if device.type != "cpu":
        return None
    caches = {
        tuple(_read(cache / name) for name in ("level", "type", "shared_cpu_list", "size"))
        for cache in cpus.glob("cpu[0-9]*/cache/index[0-9]*")
        if _read(cache / "type") != "Instruction"
    }
    return sum(int(size[:-1]) * _UNITS[size[-1]] for *_, size in caches) or None


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8").strip()
