"""What NVML tells of the GPUs of a run, through the functions of the nvidia-ml-py package; no torch."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from skote.eval.nvml_gpu import NvmlGpu

PACKAGE = "pynvml"  # the module of nvidia-ml-py


class Nvml:
    """Reads the GPUs with these UUIDs ("GPU-..."), which `uuids` gives by their torch name.

    `root` is the process whose descendants are ours. `driver` is the version of the driver; `unavailable` a sentence
    about the devices that NVML does not know, None where it knows all; `instant_power` is each `NvmlGpu`'s, by device.
    """

    def __init__(self, module: Any, uuids: Mapping[str, str], root: int) -> None:  # noqa: ANN401 (NVML's own module)
        self._gpus: list[NvmlGpu] = []
        self.instant_power: dict[str, bool] = {}
        unknown = []
        for device, uuid in sorted(uuids.items()):
            try:
                handle = module.nvmlDeviceGetHandleByUUID(uuid.encode())
            except module.NVMLError:
                unknown.append(device)
                continue
            gpu = NvmlGpu(module, device, handle, root)
            self._gpus.append(gpu)
            self.instant_power[device] = gpu.instant_power
        self.unavailable = (
            f"GPU telemetry is not available for {', '.join(unknown)}: NVML does not know the device."
            if unknown
            else None
        )
        self.driver = _driver(module)

    def read(self, *, slow: bool, rare: bool) -> list[dict[str, Any]]:
        """A row a GPU: the fast columns, with `slow` also what changes slowly, with `rare` also what costs most."""
        return [gpu.fast() | (gpu.slow() if slow else {}) | (gpu.rare() if rare else {}) for gpu in self._gpus]


def open_nvml(uuids: Mapping[str, str], root: int, package: str = PACKAGE) -> Nvml | str:
    """A reader of the GPUs in `uuids`, or a sentence that says why there is none."""
    try:
        module = importlib.import_module(package)
    except ModuleNotFoundError:
        return f"GPU telemetry is not available: install nvidia-ml-py ({package} is missing)."
    try:
        module.nvmlInit()
    except module.NVMLError as error:
        return f"GPU telemetry is not available: NVML says {error}."
    return Nvml(module, uuids, root)


def _driver(module: Any) -> str | None:  # noqa: ANN401 (NVML's own module)
    try:
        version: str = module.nvmlSystemGetDriverVersion()
    except module.NVMLError:
        return None
    return version
