"""What a device can read from its memory, in bytes a second: the ceiling of everything that streams weights."""

from __future__ import annotations

import mmap
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import psutil
import torch

CUDA_BYTES = 4 << 30
CPU_BYTES = 1 << 30  # larger than the last-level cache of all but a few processors
CPU_REPEATS = 5
CPU_MIN_BYTES = 256 << 20
_CACHE_TIMES = 8  # of a buffer this many times the L2 cache at most an eighth can come from there
_HUGE_PAGE = 2 << 20


def read_bandwidth(device: torch.device) -> float | None:
    """Bytes a second that a plain reduction reads on `device`, with the threads that this process has.

    The buffer takes at most half of the memory that is free. None where the device is neither a CPU nor CUDA, or where
    it has too little free memory for a buffer far larger than its cache.
    """
    if device.type == "cuda":
        with torch.cuda.device(device):
            return _cuda(min(CUDA_BYTES, torch.cuda.mem_get_info()[0] // 2))
    if device.type == "cpu":
        return _cpu(min(CPU_BYTES, psutil.virtual_memory().available // 2))
    return None


def replayed(run: Callable[[torch.Tensor], Any], copies: Sequence[torch.Tensor], replays: int = 15) -> float:
    """Median seconds of `run` over one of `copies`, all of which one captured graph of the current device goes through.

    Copies that together exceed the L2 cache make every byte come from memory.
    """
    run(copies[0])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for copy in copies:
            run(copy)
    times: list[float] = []
    for _ in range(replays):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3 / len(copies))
    return statistics.median(times)


def _cuda(size: int) -> float | None:
    from skote.kernels.read_sum_triton import BLOCK, read_sum

    if size < _CACHE_TIMES * torch.cuda.get_device_properties().L2_cache_size:
        return None
    programs = size // (2 * BLOCK)
    x = torch.ones(programs * BLOCK, dtype=torch.bfloat16, device="cuda")
    out = torch.empty(programs, device="cuda")
    return x.nbytes / replayed(partial(read_sum, out=out), [x])


def _cpu(size: int) -> float | None:
    if size < CPU_MIN_BYTES:
        return None
    memory = mmap.mmap(-1, size // _HUGE_PAGE * _HUGE_PAGE)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)  # as the weights lie: small pages can halve what is read
    # Eight bytes an addition: with fewer the additions, not the memory, are what is measured.
    x = torch.frombuffer(memory, dtype=torch.float64).fill_(1.0)
    times: list[float] = []
    for _ in range(CPU_REPEATS):
        start = time.perf_counter()
        x.sum()
        times.append(time.perf_counter() - start)
    return x.nbytes / statistics.median(times)
