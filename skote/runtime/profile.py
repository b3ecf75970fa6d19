"""How long each kernel of a device runs, as torch's profiler sees it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, supported_activities


def kernel_times(run: Callable[[], object], *, repeats: int) -> list[dict[str, Any]]:
    """What `run` launches on CUDA devices, the longest first; empty where the profiler sees no kernel.

    Each entry has `kernel` (its name), `calls` (in one run), `us` (device microseconds of all of them in one run, the
    mean over the runs) and `own_us` (see `aggregate`). `run` is called `repeats` times, after one that is not counted.
    """
    if ProfilerActivity.CUDA not in supported_activities():  # type: ignore[no-untyped-call]
        return []
    run()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
        for _ in range(repeats):
            run()
        torch.cuda.synchronize()
    events = profiler.events() or []
    launches = [
        (event.name, float(event.time_range.start), float(event.time_range.end))
        for event in events
        if event.device_type.name == "CUDA"
    ]
    return aggregate(launches, repeats)


def aggregate(launches: Iterable[tuple[str, float, float]], repeats: int) -> list[dict[str, Any]]:
    """The entries of `kernel_times` from name, start and end (us) of each launch in `repeats` equal runs.

    With programmatic dependent launch a kernel starts, and waits, while those before it still run: its duration counts
    that time once more. `own_us` is by how much a launch puts off the end of all that was launched, so that own times
    add up to the time in which the device was busy.
    """
    spent: dict[str, list[tuple[float, float]]] = defaultdict(list)
    latest = float("-inf")
    for name, start, end in sorted(launches, key=lambda launch: launch[2]):
        spent[name].append((end - start, end - max(start, latest)))
        latest = end
    entries = [
        {
            "kernel": name,
            "calls": round(len(each) / repeats),
            "us": sum(us for us, _ in each) / repeats,
            "own_us": sum(own for _, own in each) / repeats,
        }
        for name, each in spent.items()
    ]
    return sorted(entries, key=lambda entry: -float(entry["own_us"]))
