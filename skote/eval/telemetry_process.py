"""The process that samples clocks, power, load and memory while a run is measured; its parent is `telemetry`.

A line of JSON a sample and device goes to a file, so that the parent has nothing to do meanwhile. The process ends when
its standard input does, and so with its parent; its last line says what it cost. It imports little, to start quickly.
"""

from __future__ import annotations

import json
import os
import select
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

import psutil

from skote.eval.nvml import Nvml, open_nvml

PERIOD_S = 0.098  # 10 Hz and more
SLOW_EVERY = 20
"""Samples from one slow sample to the next: what changes slowly is read every 2 s, and rows are written."""
RARE_EVERY = 15 * SLOW_EVERY
"""Samples from one rare sample to the next: what costs most is read every 30 s, and first and last."""
HOST = "host"
CLOCKS_READ = 4  # cores; on a large machine, reading the clock of every one would be most of the cost


class Host:
    """Reads the machine: load, memory, clock; what the system does not tell is None."""

    def __init__(self) -> None:
        clocks = sorted(Path("/sys/devices/system/cpu").glob("cpu[0-9]*/cpufreq/scaling_cur_freq"))
        self._clocks = clocks[:CLOCKS_READ]
        self._times = cpu_seconds()

    def read(self) -> dict[str, Any]:
        """The host's row; the busy share is of the CPU time since the last one."""
        busy, total = cpu_seconds()
        busy_before, total_before = self._times
        self._times = busy, total
        return {
            "device": HOST,
            "memory_used_bytes": psutil.virtual_memory().used,
            "load_1m": os.getloadavg()[0],
            "cpu_busy_share": (busy - busy_before) / (total - total_before) if total > total_before else None,
            "cpu_clock_mhz": self._clock(),
            # Wall and monotonic clock drift apart by parts in a million; a jump of one of them shows here.
            "wall_offset_ns": time.time_ns() - time.monotonic_ns(),
        }

    def _clock(self) -> float | None:
        if not self._clocks:
            return None
        return sum(int(path.read_text()) for path in self._clocks) / len(self._clocks) / 1000


def cpu_seconds() -> tuple[float, float]:
    """CPU seconds since the start that all cores together were busy, and that they offered."""
    times = psutil.cpu_times()._asdict()
    total = sum(times.values()) - times.get("guest", 0.0) - times.get("guest_nice", 0.0)  # in user and nice already
    return total - times["idle"] - times.get("iowait", 0.0), total


def sample(out: TextIO, gpus: Nvml | None, host: Host, stop: int) -> None:
    """Sample every `PERIOD_S` until the file descriptor `stop` can be read or is at its end, and once more then.

    Without GPUs there is nothing to read between the slow samples. A sample that comes late is not made up for.
    """
    every = SLOW_EVERY if gpus else 1
    period = PERIOD_S * SLOW_EVERY / every
    due, count, stopped = time.monotonic(), 0, False
    rows: list[dict[str, Any]] = []
    while True:
        slow, rare = (stopped or count % each == 0 for each in (every, RARE_EVERY))
        stamp = time.monotonic_ns()
        if gpus:
            rows.extend({"t_ns": stamp} | row for row in gpus.read(slow=slow, rare=rare))
        if slow:
            rows.append({"t_ns": stamp} | host.read())
            out.writelines(f"{json.dumps(row)}\n" for row in rows)
            out.flush()
            rows.clear()
        if stopped:
            return
        now = time.monotonic()
        due = due + period if due + period > now else now + period
        stopped = bool(select.select([stop], [], [], due - now)[0])
        count += 1


def main(argv: Sequence[str]) -> None:
    """`FILE UUIDS PACKAGE ROOT`: where lines go, the GPUs as a JSON object, NVML's module, the run's process id.

    Says on standard output that it is about to sample, in a line of JSON: `unavailable`, the sentence why GPUs are not
    read, `driver`, their driver's version, and `instant_power` of each (see `NvmlGpu`).
    """
    path, uuids, package, root = argv
    wanted: dict[str, str] = json.loads(uuids)
    gpus = open_nvml(wanted, int(root), package) if wanted else None
    facts: dict[str, Any] = {"unavailable": None, "driver": None, "instant_power": {}}
    if isinstance(gpus, str):
        facts["unavailable"] = gpus
    elif gpus is not None:
        facts |= {"unavailable": gpus.unavailable, "driver": gpus.driver, "instant_power": gpus.instant_power}
    host = Host()
    with Path(path).open("w", encoding="utf-8") as out:
        wall, cpu = time.monotonic(), time.process_time()
        sys.stdout.write(f"{json.dumps(facts)}\n")
        sys.stdout.flush()
        sample(out, gpus if isinstance(gpus, Nvml) else None, host, sys.stdin.fileno())
        cost = {"cpu_s": time.process_time() - cpu, "wall_s": time.monotonic() - wall}
        out.write(f"{json.dumps(cost)}\n")
