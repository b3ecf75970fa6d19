"""How much of the machine's CPU time went to somebody else while a pass ran."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass

import psutil

SHORTEST_S = 1.0


@dataclass(frozen=True, slots=True)
class CpuSample:
    """Seconds of CPU time since the machine (`total`, `busy`, `steal`) or the processes (`own`) started.

    `total` counts every CPU, idle or not; `steal` is None where the platform does not count it. `idle_arm` is the part
    of `own` that belongs to arms that should be idle.
    """

    total: float
    busy: float
    steal: float | None
    own: float
    idle_arm: float = 0.0


@dataclass(frozen=True, slots=True)
class CpuNoise:
    """Shares, 0 to 1, of the CPU time that all CPUs of the machine offered; None where it could not be told.

    Attributes:
        foreign_cpu_share: used by processes that are neither ours nor started by ours.
        steal_share: taken away by the hypervisor.
        idle_arm_share: used by the processes of arms that are not being measured.
    """

    foreign_cpu_share: float | None
    steal_share: float | None
    idle_arm_share: float | None


class CpuMeter:
    """Compares two samples: one taken when it is made, one at `read`. A sample takes about a millisecond.

    `idle_pids` are the processes of arms that should be idle meanwhile.
    """

    def __init__(self, idle_pids: Sequence[int] = ()) -> None:
        self._idle_pids = idle_pids
        self._before = sample_cpu(idle_pids)

    def read(self) -> CpuNoise:
        """The noise since this meter was made."""
        return cpu_noise(self._before, sample_cpu(self._idle_pids))


def sample_cpu(idle_pids: Sequence[int] = ()) -> CpuSample:
    """Read the machine's counters, those of this process and all its descendants, and of `idle_pids` and theirs."""
    times = psutil.cpu_times()._asdict()
    # Linux counts a guest's time as user time already.
    total = sum(times.values()) - times.get("guest", 0.0) - times.get("guest_nice", 0.0)
    steal = times.get("steal")
    not_busy = times["idle"] + times.get("iowait", 0.0) + (steal or 0.0)
    idle_arm = sum(_seconds(pid) for pid in idle_pids)
    return CpuSample(total, total - not_busy, steal, _seconds(), idle_arm)


def _seconds(pid: int | None = None) -> float:
    """CPU seconds of a process (None: this one) and its descendants, with the ended children that were waited for.

    A child that ends between two samples moves from its own counters to its parent's, so its time stays in the sum.
    """
    seconds = 0.0
    try:
        root = psutil.Process(pid)
        processes = [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return seconds
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            seconds += times.user + times.system + times.children_user + times.children_system
    return seconds


def cpu_noise(before: CpuSample, after: CpuSample) -> CpuNoise:
    """What lies between two samples.

    All shares are None where less than a second of CPU time lies between: a tick of the counters, 10 ms, would be more
    than 1 % of it. They are None, too, where the platform does not keep the counters.
    """
    total = after.total - before.total
    if total < SHORTEST_S:
        return CpuNoise(None, None, None)
    foreign = (after.busy - before.busy) - (after.own - before.own)
    steal = None if before.steal is None or after.steal is None else (after.steal - before.steal) / total
    # The two counters tick apart, so a machine that is all ours may come out slightly below 0.
    return CpuNoise(max(0.0, foreign / total), steal, max(0.0, (after.idle_arm - before.idle_arm) / total))
