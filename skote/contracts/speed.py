"""E15, E16 and E22 on CUDA: how fast the norm is, how well it is cut, and what is captured after the start."""

from __future__ import annotations

import statistics
import time
from functools import partial
from unittest import mock

import torch
import torch.nn.functional as F

from skote.contracts.check import Figures, Subject, need_cuda, prompts
from skote.types import Request

ROWS = 2048
SIZES = (576, 4096, 5120, 8192)
WARPS = (1, 2, 4, 8, 16)
EPS = 1e-5


def norm_speed(subject: Subject) -> Figures:
    """The Triton norm over 2,048 rows of four widths in bf16, by replays of a captured graph over cold rows.

    `over_eager`, `over_torch`: the smallest ratio to the formula in eager ops and to `F.rms_norm`. `copy_share`: the
    smallest share of the speed of a plain copy. `over_best_cut`: the largest ratio of its time to that of its best
    number of warps.
    """
    need_cuda("norm_speed", subject)
    from skote.kernels.read_bandwidth import replayed
    from skote.kernels.rms_norm import rms_norm_reference
    from skote.kernels.rms_norm_triton import launch_shape, rms_norm_kernel, rms_norm_triton

    eager, own, copy, cut = [], [], [], []
    with torch.cuda.device(subject.device):
        for hidden in SIZES:
            copies = [
                torch.randn(ROWS, hidden, device="cuda").bfloat16() for _ in range(max(2, 2**27 // ROWS // hidden))
            ]
            weight = torch.ones(hidden, dtype=torch.bfloat16, device="cuda")
            out = torch.empty_like(copies[0])
            ours = replayed(partial(rms_norm_triton, weight=weight, eps=EPS), copies)
            eager.append(replayed(partial(rms_norm_reference, weight=weight, eps=EPS), copies) / ours)
            own.append(replayed(partial(F.rms_norm, normalized_shape=(hidden,), weight=weight, eps=EPS), copies) / ours)
            copy.append(replayed(torch.clone, copies) / ours)
            block, chosen = launch_shape(hidden)

            def launch(x: torch.Tensor, warps: int) -> None:
                rms_norm_kernel[(ROWS,)](x, weight, out, hidden, EPS, BLOCK=block, num_warps=warps)  # noqa: B023

            times = {warps: replayed(partial(launch, warps=warps), copies) for warps in {*WARPS, chosen}}
            cut.append(times[chosen] / min(times.values()))
    return {"over_eager": min(eager), "over_torch": min(own), "copy_share": min(copy), "over_best_cut": max(cut)}


def captures(subject: Subject) -> Figures:
    """Thirty requests of ten lengths through an engine that was only loaded.

    `captures` of a graph and `allocations` of device memory meanwhile; `first_over_median`: the first request's
    latency a token of its prompt's length class, over the median of the others of that length.
    """
    need_cuda("captures", subject)
    from skote.runtime.engine import SkotergyEngine

    engine = SkotergyEngine(**subject.options(max_model_len=2048))
    lengths = (7, 33, 64, 100, 128, 200, 333, 512, 777, 1024)
    asked = prompts(256, lengths)
    captured = []
    begin = torch.cuda.CUDAGraph.capture_begin

    def counted(graph: torch.cuda.CUDAGraph, *arguments: object, **options: object) -> None:
        captured.append(graph)
        begin(graph, *arguments, **options)  # type: ignore[arg-type]

    def run(prompt: tuple[int, ...]) -> float:
        started = time.perf_counter()
        engine.generate([Request("timed", prompt, 16, ignore_eos=True)], lambda *_: None)
        return time.perf_counter() - started

    torch.cuda.synchronize(subject.device)
    before = torch.cuda.memory_stats(subject.device).get("num_device_alloc", 0)
    with mock.patch.object(torch.cuda.CUDAGraph, "capture_begin", counted):
        rounds = [[run(prompt) for prompt in asked] for _ in range(3)]
    after = torch.cuda.memory_stats(subject.device).get("num_device_alloc", 0)
    later = statistics.median(each[0] for each in rounds[1:])
    return {
        "captures": len(captured),
        "allocations": after - before,
        "first_over_median": rounds[0][0] / later,
    }
