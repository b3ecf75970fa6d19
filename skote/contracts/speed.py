"""E15, E16 and E22 on CUDA: how fast the norm is, how well it is cut, and what is captured after the start."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from unittest import mock

import torch
import torch.nn.functional as F

from skote.contracts.check import REPEATS, Figures, Subject, need_cuda, prompts
from skote.types import Request

ROWS = 2048
SIZES = (576, 4096, 5120, 8192)
WARPS = (1, 2, 4, 8, 16)
EPS = 1e-5
LOADS = 6
"""Engines that `captures` loads, each of which has one first request; fewer have no interval."""

Op = Callable[[torch.Tensor], object]
Seconds = Mapping[str | int, float]


def norm_speed(subject: Subject) -> Figures:
    """The Triton norm over 2,048 rows of four widths in bf16, by replays of a captured graph over cold rows.

    `over_eager`, `over_torch`: the smallest ratio to the formula in eager ops and to `F.rms_norm`. `copy_share`: the
    smallest share of the speed of a plain copy. `over_best_cut`: the largest ratio of its time to that of its best
    number of warps. Each repeat times everything anew; smallest and largest are over the widths.
    """
    need_cuda("norm_speed", subject)
    from skote.kernels.read_bandwidth import replayed
    from skote.kernels.rms_norm_triton import launch_shape

    repeats: list[list[Seconds]] = [[] for _ in range(REPEATS)]
    with torch.cuda.device(subject.device):
        for hidden in SIZES:
            copies = [
                torch.randn(ROWS, hidden, device="cuda").bfloat16() for _ in range(max(2, 2**27 // ROWS // hidden))
            ]
            ops = _norms(copies[0])
            _, chosen = launch_shape(hidden)
            for widths in repeats:
                seconds = {name: replayed(op, copies) for name, op in ops.items()}
                widths.append({**seconds, "chosen": seconds[chosen]})
    return norm_figures(repeats)


def norm_figures(repeats: Sequence[Sequence[Seconds]]) -> Figures:
    """`norm_speed`'s figures, from each repeat's seconds by width.

    Those of `ours`, `eager`, `torch` and `copy`, and of the norm with each number of warps and with the `chosen` one.
    """
    return {
        "over_eager": [min(width["eager"] / width["ours"] for width in widths) for widths in repeats],
        "over_torch": [min(width["torch"] / width["ours"] for width in widths) for widths in repeats],
        "copy_share": [min(width["copy"] / width["ours"] for width in widths) for widths in repeats],
        "over_best_cut": [
            max(width["chosen"] / min(width[warps] for warps in WARPS) for width in widths) for widths in repeats
        ],
    }


def captures(subject: Subject) -> Figures:
    """Thirty requests of ten lengths through each of six engines that were only loaded.

    `captures` of a graph and `allocations` of device memory meanwhile, in all; `first_over_median`: each engine's first
    request over the median of its later ones of that length.
    """
    need_cuda("captures", subject)
    from skote.runtime.engine import SkotergyEngine

    lengths = (7, 33, 64, 100, 128, 200, 333, 512, 777, 1024)
    asked = prompts(256, lengths)
    captured = []
    begin = torch.cuda.CUDAGraph.capture_begin

    def counted(graph: torch.cuda.CUDAGraph, *arguments: object, **options: object) -> None:
        captured.append(graph)
        begin(graph, *arguments, **options)  # type: ignore[arg-type]

    def run(engine: SkotergyEngine, prompt: tuple[int, ...]) -> float:
        started = time.perf_counter()
        engine.generate([Request("timed", prompt, 16, ignore_eos=True)], lambda *_: None)
        return time.perf_counter() - started

    allocations = 0
    first_over_median = []
    for _ in range(LOADS):
        engine = SkotergyEngine(**subject.options(max_model_len=2048))
        torch.cuda.synchronize(subject.device)
        before = _allocations(subject.device)
        with mock.patch.object(torch.cuda.CUDAGraph, "capture_begin", counted):
            rounds = [[run(engine, prompt) for prompt in asked] for _ in range(3)]
        allocations += _allocations(subject.device) - before
        first_over_median.append(rounds[0][0] / statistics.median(each[0] for each in rounds[1:]))
        del engine  # two engines need not fit beside each other
    return {"captures": len(captured), "allocations": allocations, "first_over_median": first_over_median}


def _norms(row: torch.Tensor) -> dict[str | int, Op]:
    """What is timed over tensors like `row`: ours, its counterparts by name, ours again by number of warps."""
    from skote.kernels.rms_norm import rms_norm_reference
    from skote.kernels.rms_norm_triton import launch_shape, rms_norm_kernel, rms_norm_triton

    hidden = row.shape[1]
    weight = torch.ones(hidden, dtype=torch.bfloat16, device="cuda")
    out = torch.empty_like(row)
    block, _ = launch_shape(hidden)

    def launch(x: torch.Tensor, warps: int) -> None:
        rms_norm_kernel[(ROWS,)](x, weight, out, hidden, EPS, BLOCK=block, num_warps=warps)

    return {
        "ours": partial(rms_norm_triton, weight=weight, eps=EPS),
        "eager": partial(rms_norm_reference, weight=weight, eps=EPS),
        "torch": partial(F.rms_norm, normalized_shape=(hidden,), weight=weight, eps=EPS),
        "copy": torch.clone,
        **{warps: partial(launch, warps=warps) for warps in WARPS},
    }


def _allocations(device: str) -> int:
    count: int = torch.cuda.memory_stats(device).get("num_device_alloc", 0)
    return count
