"""One GPU as NVML tells of it, in as few calls as it takes: each may cost a millisecond of a core.

Whatever the GPU or its driver does not tell is None, never zero.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import psutil

# NVML's field ids. Those of 269 and above have no name in the older releases of nvidia-ml-py.
_POWER, _ENERGY = 186, 83  # in mW, at this instant; in mJ
_HELD_DOWN = {74: 0x4, 76: 0x10, 269: 0x20, 270: 0x40, 271: 0x80}
"""Counters of the time that clocks were held down for a reason, and that reason's bit in `throttle_reasons`."""
_MEMBERS = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")  # of NVML's union, by value type

_DENSE_US = 100_000  # the driver's own samples serve where they come at 10 Hz or more,
_SPAN_US = 2_000_000  # and reach back to the last slow sample
_CURRENT_US = 1_000_000  # and, with stamps of the wall clock, up to now
_APART_US = 80_000  # of a faster buffer about ten samples a second are kept


class NvmlGpu:
    """Reads the GPU behind `handle`; `root` is the process whose descendants are ours.

    `sources` says for each column that has several which NVML function or field it comes from. Power, energy and the
    reasons for low clocks come from one call for all of them, where the driver knows the fields; clocks from the
    buffers that the driver fills anyway, where they are dense enough; each else from a call of its own.
    """

    def __init__(self, module: Any, device: str, handle: Any, root: int) -> None:  # noqa: ANN401 (NVML's own)
        self._nvml, self._device, self._handle, self._root = module, device, handle, root
        self._ours: dict[int, bool] = {}
        told = self._fields([_POWER, _ENERGY, *_HELD_DOWN])
        counted = told.keys() >= _HELD_DOWN.keys()
        self._held: dict[int, int] | None = {field: told[field] for field in _HELD_DOWN} if counted else None
        self._asked = [field for field in told if counted or field not in _HELD_DOWN]
        kinds = {"sm_clock_mhz": module.NVML_PROCESSOR_CLK_SAMPLES, "memory_clock_mhz": module.NVML_MEMORY_CLK_SAMPLES}
        self._seen_us: dict[str, int] = {}
        self._kinds = {column: kind for column, kind in kinds.items() if self._serves(column, kind)}
        clocks = {column: "samples" if column in self._kinds else "nvmlDeviceGetClockInfo" for column in kinds}
        self.sources = clocks | {
            "power_w": "field" if _POWER in told else "nvmlDeviceGetPowerUsage",
            "energy_j": "field" if _ENERGY in told else "nvmlDeviceGetTotalEnergyConsumption",
            "throttle_reasons": "field" if counted else "nvmlDeviceGetCurrentClocksEventReasons",
        }

    def fast(self) -> dict[str, Any]:
        """A row of what is read at every sample: power, energy, reasons for low clocks, an SM clock without buffer.

        Where reasons come from counters, a row has those that held clocks down at some time since the row before.
        """
        nvml = self._nvml
        told = self._fields(self._asked)
        power = told.get(_POWER) if _POWER in self._asked else self._ask(nvml.nvmlDeviceGetPowerUsage)
        energy = told.get(_ENERGY) if _ENERGY in self._asked else self._ask(nvml.nvmlDeviceGetTotalEnergyConsumption)
        row = {
            "device": self._device,
            "power_w": None if power is None else power / 1000,
            "energy_j": None if energy is None else energy / 1000,
            "throttle_reasons": self._reasons(told),
        }
        if "sm_clock_mhz" not in self._kinds:
            row["sm_clock_mhz"] = self._ask(nvml.nvmlDeviceGetClockInfo, nvml.NVML_CLOCK_SM)
        return row

    def slow(self) -> dict[str, Any]:
        """What is read now and then, to stand in the same row."""
        nvml = self._nvml
        memory = self._ask(nvml.nvmlDeviceGetMemoryInfo)
        row = {
            "temperature_c": self._ask(nvml.nvmlDeviceGetTemperature, nvml.NVML_TEMPERATURE_GPU),
            "memory_used_bytes": None if memory is None else memory.used,
            "foreign_processes": self._foreign(),
        }
        if "memory_clock_mhz" not in self._kinds:
            row["memory_clock_mhz"] = self._ask(nvml.nvmlDeviceGetClockInfo, nvml.NVML_CLOCK_MEM)
        return row

    def buffered(self) -> Iterator[dict[str, Any]]:
        """A row, with a `t_ns` of its own, for each clock that the driver has noted since the last call."""
        wall_offset_ns = time.time_ns() - time.monotonic_ns()  # the driver stamps with the wall clock
        for column, kind in self._kinds.items():
            for stamp_us, value in self._samples(kind, self._seen_us[column]):
                if stamp_us - self._seen_us[column] >= _APART_US:
                    self._seen_us[column] = stamp_us
                    yield {"t_ns": stamp_us * 1000 - wall_offset_ns, "device": self._device, column: value}

    def _reasons(self, told: dict[int, int]) -> int | None:
        if self._held is None:
            reasons: int | None = self._ask(self._nvml.nvmlDeviceGetCurrentClocksEventReasons)
            return reasons
        if not told.keys() >= _HELD_DOWN.keys():
            return None
        before, self._held = self._held, {field: told[field] for field in _HELD_DOWN}
        return sum(bit for field, bit in _HELD_DOWN.items() if told[field] > before[field])

    def _fields(self, fields: Sequence[int]) -> dict[int, int]:
        """The values of those of `fields` that the driver tells, from one call."""
        if not fields:
            return {}
        values = self._ask(self._nvml.nvmlDeviceGetFieldValues, list(fields)) or ()
        return {
            field: _number(value.valueType, value.value)
            for field, value in zip(fields, values, strict=False)
            if value.nvmlReturn == self._nvml.NVML_SUCCESS
        }

    def _serves(self, column: str, kind: int) -> bool:
        """Whether the driver's buffer of `kind` is dense, long and current; what it holds by now is left out."""
        stamps = [stamp_us for stamp_us, _ in self._samples(kind, 0)]
        if len(stamps) < 2:
            return False
        self._seen_us[column] = stamps[-1]
        span = stamps[-1] - stamps[0]
        current = abs(time.time_ns() // 1000 - stamps[-1]) <= _CURRENT_US
        return _SPAN_US <= span <= _DENSE_US * (len(stamps) - 1) and current

    def _samples(self, kind: int, after_us: int) -> list[tuple[int, int]]:
        """Stamp and value of each sample that the driver holds of those after `after_us`, in order."""
        kind_of_value, samples = self._ask(self._nvml.nvmlDeviceGetSamples, kind, after_us) or (0, ())
        return sorted(
            (sample.timeStamp, _number(kind_of_value, sample.sampleValue))
            for sample in samples
            if sample.timeStamp > after_us
        )

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


def _number(value_type: int, value: Any) -> int:  # noqa: ANN401 (NVML's union)
    number: int = getattr(value, _MEMBERS[value_type])
    return number
