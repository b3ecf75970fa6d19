"""How long each kernel of a device runs, as torch's profiler sees it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, supported_activities


def kernel_times(run: Callable[[], object], *, repeats: int) -> list[dict[str, Any]]:
    """What `run` launches on CUDA devices, the longest first; empty where the profiler sees no kernel.

    Each entry has `kernel` (its name), `calls` (in one run) and `us` (device microseconds of all of them in one run,
    the mean over the runs). `run` is called `repeats` times, after one call that is not counted.
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
    launches = [(event.name, event.time_range.elapsed_us()) for event in events if event.device_type.name == "CUDA"]
    return aggregate(launches, repeats)


def aggregate(launches: Iterable[tuple[str, float]], repeats: int) -> list[dict[str, Any]]:
    """The entries of `kernel_times` from the name and microseconds of each launch in `repeats` equal runs."""
    durations: dict[str, list[float]] = defaultdict(list)
    for name, us in launches:
        durations[name].append(us)
    entries = [
        {"kernel": name, "calls": round(len(each) / repeats), "us": sum(each) / repeats}
        for name, each in durations.items()
    ]
    return sorted(entries, key=lambda entry: -float(entry["us"]))
