"""What NVML tells of the GPUs of a run, through the functions of the nvidia-ml-py package; no torch.

Whatever a GPU or its driver does not tell is None, never zero.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

import psutil

PACKAGE = "pynvml"  # the module of nvidia-ml-py


class Nvml:
    """Reads the GPUs with these UUIDs ("GPU-..."), which `uuids` gives by their torch name.

    `root` is the process whose descendants are ours. `driver` is the version of the driver; `unavailable` a sentence
    about the devices that NVML does not know, None where it knows all.
    """

    def __init__(self, module: Any, uuids: Mapping[str, str], root: int) -> None:  # noqa: ANN401 (NVML's own module)
        self._nvml = module
        self._root = root
        self._ours: dict[int, bool] = {}
        found = {device: self._told(module.nvmlDeviceGetHandleByUUID, uuid.encode()) for device, uuid in uuids.items()}
        self._handles = {device: handle for device, handle in found.items() if handle is not None}
        self.driver: str | None = self._told(module.nvmlSystemGetDriverVersion)
        unknown = ", ".join(sorted(found.keys() - self._handles.keys()))
        self.unavailable = (
            f"GPU telemetry is not available for {unknown}: NVML does not know the device." if unknown else None
        )

    def read(self, *, slow: bool) -> list[dict[str, Any]]:
        """A row a GPU: `device`, SM clock, power, energy and throttle reasons; with `slow` the other columns too."""
        return [
            self._fast(device, handle) | (self._slow(handle) if slow else {})
            for device, handle in self._handles.items()
        ]

    def _fast(self, device: str, handle: Any) -> dict[str, Any]:  # noqa: ANN401 (NVML's handle)
        nvml, told = self._nvml, self._told
        power = told(nvml.nvmlDeviceGetPowerUsage, handle)
        energy = told(nvml.nvmlDeviceGetTotalEnergyConsumption, handle)
        return {
            "device": device,
            "sm_clock_mhz": told(nvml.nvmlDeviceGetClockInfo, handle, nvml.NVML_CLOCK_SM),
            "power_w": None if power is None else power / 1000,
            "energy_j": None if energy is None else energy / 1000,
            "throttle_reasons": told(nvml.nvmlDeviceGetCurrentClocksEventReasons, handle),
        }

    def _slow(self, handle: Any) -> dict[str, Any]:  # noqa: ANN401 (NVML's handle)
        nvml, told = self._nvml, self._told
        memory = told(nvml.nvmlDeviceGetMemoryInfo, handle)
        return {
            "memory_clock_mhz": told(nvml.nvmlDeviceGetClockInfo, handle, nvml.NVML_CLOCK_MEM),
            "temperature_c": told(nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU),
            "memory_used_bytes": None if memory is None else memory.used,
            "foreign_processes": self._foreign(handle),
        }

    def _foreign(self, handle: Any) -> int | None:  # noqa: ANN401 (NVML's handle)
        """Compute processes on the GPU that are not ours; None where none of ours is listed.

        A container sees its own process ids and NVML lists the host's: then nothing can be told.
        """
        running = self._told(self._nvml.nvmlDeviceGetComputeRunningProcesses, handle)
        if running is None:
            return None
        pids = {int(process.pid) for process in running}
        for pid in pids - self._ours.keys():
            self._ours[pid] = descends_from(pid, self._root)
        foreign = sum(not self._ours[pid] for pid in pids)
        return foreign if foreign < len(pids) else None

    def _told(self, ask: Callable[..., Any], *args: object) -> Any:  # noqa: ANN401 (whatever the function gives)
        try:
            return ask(*args)
        except self._nvml.NVMLError:  # not supported by this GPU, or not known to this driver
            return None


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


def descends_from(pid: int, root: int) -> bool:
    """Whether process `pid` is `root`, or was started by it or by one of its descendants that still live."""
    try:
        return pid == root or any(parent.pid == root for parent in psutil.Process(pid).parents())
    except psutil.Error:  # it ended, or belongs to somebody whose processes are hidden
        return False
