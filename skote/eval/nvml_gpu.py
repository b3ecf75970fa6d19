"""One GPU as NVML tells of it. Whatever the GPU or its driver does not tell is None, never zero."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import psutil

_INSTANT_POWER = 186  # NVML's field id of the power at this instant, in mW


class NvmlGpu:
    """Reads the GPU behind `handle`; `root` is the process whose descendants are ours.

    Columns come in three parts by what they cost and how fast they change. `instant_power` says whether power is the
    instant's; where the driver does not know that field it is `nvmlDeviceGetPowerUsage`'s, on recent GPUs a mean over
    the last second.
    """

    def __init__(self, module: Any, device: str, handle: Any, root: int) -> None:  # noqa: ANN401 (NVML's own)
        self._nvml, self._device, self._handle, self._root = module, device, handle, root
        self._ours: dict[int, bool] = {}
        self.instant_power = self._power_field() is not None

    def fast(self) -> dict[str, Any]:
        """A row of what is read at every sample, for some 0.1 ms of a core: power, SM clock, reasons for low clocks."""
        nvml = self._nvml
        power = self._power_field() if self.instant_power else self._ask(nvml.nvmlDeviceGetPowerUsage)
        return {
            "device": self._device,
            "power_w": None if power is None else power / 1000,
            "sm_clock_mhz": self._ask(nvml.nvmlDeviceGetClockInfo, nvml.NVML_CLOCK_SM),
            "throttle_reasons": self._ask(nvml.nvmlDeviceGetCurrentClocksEventReasons),
        }

    def slow(self) -> dict[str, Any]:
        """What changes slowly, to stand in the same row."""
        nvml = self._nvml
        memory = self._ask(nvml.nvmlDeviceGetMemoryInfo)
        return {
            "memory_clock_mhz": self._ask(nvml.nvmlDeviceGetClockInfo, nvml.NVML_CLOCK_MEM),
            "temperature_c": self._ask(nvml.nvmlDeviceGetTemperature, nvml.NVML_TEMPERATURE_GPU),
            "memory_used_bytes": None if memory is None else memory.used,
            "foreign_processes": self._foreign(),
        }

    def rare(self) -> dict[str, Any]:
        """What costs most, to stand in the same row: the energy counter takes 4 to 5 ms of a core on an H200."""
        energy = self._ask(self._nvml.nvmlDeviceGetTotalEnergyConsumption)
        return {"energy_j": None if energy is None else energy / 1000}

    def _power_field(self) -> int | None:
        [value] = self._ask(self._nvml.nvmlDeviceGetFieldValues, [_INSTANT_POWER]) or [None]
        told = value is not None and value.nvmlReturn == self._nvml.NVML_SUCCESS
        return int(value.value.uiVal) if told else None

    def _foreign(self) -> int | None:
        """Compute processes on the GPU that are not ours; None where none of ours is listed.

        A container sees its own process ids and NVML lists the host's: then nothing can be told.
        """
        running = self._ask(self._nvml.nvmlDeviceGetComputeRunningProcesses)
        if running is None:
            return None
        pids = {int(process.pid) for process in running}
        for pid in pids - self._ours.keys():
            self._ours[pid] = descends_from(pid, self._root)
        foreign = sum(not self._ours[pid] for pid in pids)
        return foreign if foreign < len(pids) else None

    def _ask(self, function: Callable[..., Any], *args: object) -> Any:  # noqa: ANN401 (whatever the function gives)
        try:
            return function(self._handle, *args)
        except self._nvml.NVMLError:  # not supported by this GPU, or not known to this driver
            return None


def descends_from(pid: int, root: int) -> bool:
    """Whether process `pid` is `root`, or was started by it or by one of its descendants that still live."""
    try:
        return pid == root or any(parent.pid == root for parent in psutil.Process(pid).parents())
    except psutil.Error:  # it ended, or belongs to somebody whose processes are hidden
        return False
