"""Microbenchmarks of the kernels on one CUDA device: bytes, time, TB/s, share of what the device can read.

`python -m skote.kernels.bench --shape 8b` prints a table. Each figure is the median over replays of a CUDA graph that
runs the op over copies of its weights, together larger than the L2 cache, so that every byte comes from memory.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from skote.kernels import read_sum_triton
from skote.kernels.add_rms_norm_triton import add_rms_norm
from skote.kernels.gate_up_gemv_triton import gate_up_gemv
from skote.kernels.head_gemv_triton import head_gemv
from skote.kernels.linear import matvec
from skote.kernels.residual_gemv_triton import residual_gemv
from skote.kernels.rms_norm import rms_norm_reference
from skote.kernels.rms_norm_triton import rms_norm_triton
from skote.kernels.tiles import step_tiles

ROTATED_BYTES = 512 << 20
READ_BYTES = 4 << 30
EPS = 1e-5
Op = Callable[[torch.Tensor], Any]


class Shape(NamedTuple):
    """The widths that decide the sizes of a model's matrices."""

    hidden: int
    intermediate: int
    vocab: int


SHAPES = {"8b": Shape(4096, 14336, 128256), "1b": Shape(2048, 8192, 128256), "135m": Shape(576, 1536, 49152)}
NORM_SIZES = (576, 2048, 4096, 5120, 8192)
NORM_ROWS = 2048


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; 4 where there is no CUDA device."""
    parser = argparse.ArgumentParser(prog="python -m skote.kernels.bench", description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="8b")
    parser.add_argument("--compile", action="store_true", help="also time torch.compile (tens of seconds more)")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        sys.stderr.write("skote.kernels.bench: there is no CUDA device to measure.\n")
        return 4
    with torch.no_grad():
        ceiling = read_bandwidth()
        sys.stdout.write(f"{torch.cuda.get_device_name()}: reads {ceiling / 1e12:.2f} TB/s\n")
        sys.stdout.write(f"{'op':26} {'by':14} {'MB':>8} {'us':>8} {'TB/s':>6} {'of read':>8}\n")
        _projections(SHAPES[options.shape], ceiling, compiled=options.compile)
        _norms(ceiling)
    return 0


def read_bandwidth() -> float:
    """Bytes a second that a plain reduction over `READ_BYTES` reads."""
    x = torch.ones(READ_BYTES // 2, dtype=torch.bfloat16, device="cuda")
    out = torch.empty(x.numel() // read_sum_triton.BLOCK, device="cuda")
    return READ_BYTES / replayed(partial(read_sum_triton.read_sum, out=out), [x])


def replayed(run: Op, copies: Sequence[torch.Tensor], replays: int = 15) -> float:
    """Median seconds of `run` over one of `copies`, all of which one captured graph goes through."""
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


def _projections(shape: Shape, ceiling: float, *, compiled: bool) -> None:
    """Matrix-vector kernels of a decode step in bf16, with programmatic dependent launch as in a step."""
    tiles = step_tiles(shape.hidden, shape.intermediate)
    x = torch.randn(shape.hidden, device="cuda")
    norm = torch.ones(shape.hidden, dtype=torch.bfloat16, device="cuda")
    h = torch.randn(shape.intermediate, device="cuda").bfloat16()
    attended = torch.randn(shape.hidden, device="cuda").bfloat16()
    logits = torch.empty(shape.vocab, device="cuda")
    programs = -(-shape.vocab // tiles.head.rows)
    best, first = torch.empty(programs, device="cuda"), torch.empty(programs, dtype=torch.int32, device="cuda")

    def o(weight: torch.Tensor) -> None:
        residual_gemv(x, attended, weight, tile=tiles.o, pdl=True)

    def gate_up(weight: torch.Tensor) -> None:
        gate_up_gemv(x, norm, weight, h, eps=EPS, tile=tiles.gate_up, pdl=True)

    def down(weight: torch.Tensor) -> None:
        residual_gemv(x, h, weight, tile=tiles.down, pdl=True)

    def head(weight: torch.Tensor) -> None:
        head_gemv(x, norm, weight, logits, best, first, eps=EPS, tile=tiles.head, pdl=True)

    _projection(o, shape.hidden, shape.hidden, ceiling, compiled)
    _projection(gate_up, 2 * shape.intermediate, shape.hidden, ceiling, compiled)
    _projection(down, shape.hidden, shape.intermediate, ceiling, compiled)
    _projection(head, shape.vocab, shape.hidden, ceiling, compiled)


def _projection(ours: Op, rows: int, columns: int, ceiling: float, compiled: bool) -> None:
    size = 2 * rows * columns
    copies = [torch.randn(rows, columns, device="cuda").bfloat16() for _ in range(-(-ROTATED_BYTES // size))]
    row = torch.randn(1, 1, columns, device="cuda").bfloat16()
    ways: dict[str, Op] = {"triton": ours, "torch": partial(F.linear, row)}
    if compiled:
        ways["torch.compile"] = partial(torch.compile(matvec, dynamic=False), row)
    for way, run in ways.items():
        _line(f"{ours.__name__} {rows}x{columns}", way, size, replayed(run, copies), ceiling)


def _norms(ceiling: float) -> None:
    """RMSNorm over many rows in bf16: each element read and written once; with the residual add three times each."""
    for hidden in NORM_SIZES:
        size = 2 * 2 * NORM_ROWS * hidden
        copies = [
            torch.randn(NORM_ROWS, hidden, device="cuda").bfloat16() for _ in range(max(ROTATED_BYTES // size, 2))
        ]
        weight = torch.ones(hidden, dtype=torch.bfloat16, device="cuda")
        wide, out = torch.randn(NORM_ROWS, hidden, device="cuda"), torch.empty_like(copies[0])
        op = f"rms_norm {NORM_ROWS}x{hidden}"
        _line(op, "triton", size, replayed(partial(rms_norm_triton, weight=weight, eps=EPS), copies), ceiling)
        _line(op, "torch", size, replayed(partial(rms_norm_reference, weight=weight, eps=EPS), copies), ceiling)
        add = partial(_add_rms_norm, wide, weight, out)
        _line(f"add_{op}", "triton", 3 * size, replayed(add, copies), ceiling)


def _add_rms_norm(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, delta: torch.Tensor) -> None:
    add_rms_norm(x, delta, weight, out, eps=EPS)


def _line(op: str, way: str, size: int, seconds: float, ceiling: float) -> None:
    rate = size / seconds
    sys.stdout.write(
        f"{op:26} {way:14} {size / 1e6:8.1f} {seconds * 1e6:8.1f} {rate / 1e12:6.2f} {rate / ceiling:8.1%}\n"
    )


if __name__ == "__main__":
    sys.exit(main())
