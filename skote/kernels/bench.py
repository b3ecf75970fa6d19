"""Microbenchmarks of the kernels on one CUDA device: bytes, time, TB/s, share of what the device can do, beside torch.

`python -m skote.kernels.bench --shape 8b` prints a table. Each figure is the median over replays of a CUDA graph that
runs the op over copies of its weights or its cache, together larger than the L2 cache, so that every byte comes from
memory. Bytes are those that the op has to move: weights, keys and values, the rows of a norm.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from skote.kernels.add_rms_norm_triton import add_rms_norm
from skote.kernels.attention import decode_attention
from skote.kernels.bench_steps import Shape, multi_row_ops, single_row_ops
from skote.kernels.flash_decode_triton import flash_decode
from skote.kernels.launch import ROW_TILES
from skote.kernels.linear import matvec
from skote.kernels.read_bandwidth import read_bandwidth, replayed
from skote.kernels.rms_norm import rms_norm_reference
from skote.kernels.rms_norm_triton import rms_norm_triton
from skote.kernels.tiles import step_tiles

ROTATED_BYTES = 512 << 20
COPIED_BYTES = 2 << 30
EPS = 1e-5
SHAPES = {
    "8b": Shape(4096, 14336, 128256, heads=32, kv_heads=8, head_dim=128),
    "1b": Shape(2048, 8192, 128256, heads=32, kv_heads=8, head_dim=64),
    "135m": Shape(576, 1536, 49152, heads=9, kv_heads=3, head_dim=64),
}
POSITIONS = (1024, 8192, 32768)
NORM_SIZES = (576, 2048, 4096, 5120, 8192)
NORM_ROWS = 2048
Op = Callable[[torch.Tensor], Any]


class Ceiling(NamedTuple):
    """Bytes a second that `of` reaches, which shares are told of."""

    of: str
    rate: float


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; 4 where there is no CUDA device."""
    parser = argparse.ArgumentParser(prog="python -m skote.kernels.bench", description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="8b")
    parser.add_argument("--compile", action="store_true", help="also time torch.compile (minutes more)")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        sys.stderr.write("skote.kernels.bench: there is no CUDA device to measure.\n")
        return 4
    shape, compiled = SHAPES[options.shape], options.compile
    with torch.no_grad():
        rate = read_bandwidth(torch.device("cuda"))
        if rate is None:
            sys.stderr.write("skote.kernels.bench: too little free memory on the device; end what else runs there.\n")
            return 4
        reads, copies = Ceiling("read", rate), Ceiling("copy", copy_bandwidth())
        name = torch.cuda.get_device_name()
        sys.stdout.write(f"{name}: reads {reads.rate / 1e12:.2f} TB/s, copies {copies.rate / 1e12:.2f} TB/s\n")
        for batch in (1, ROW_TILES[0], ROW_TILES[-1]):
            ops = single_row_ops(shape, EPS) if batch == 1 else multi_row_ops(shape, batch)
            _head(reads)
            for op, rows, columns, run in ops:
                _projection(op, run, (rows, columns), batch, reads, compiled=compiled)
        _head(reads)
        for positions in POSITIONS:
            _attention(shape, positions, reads, compiled=compiled)
        _head(copies)
        for hidden in NORM_SIZES:
            _norm(hidden, copies, compiled=compiled)
    return 0


def copy_bandwidth() -> float:
    """Bytes a second, read and written, of a plain copy of `COPIED_BYTES`."""
    x = torch.ones(COPIED_BYTES // 2, dtype=torch.bfloat16, device="cuda")
    return 2 * COPIED_BYTES / replayed(torch.empty_like(x).copy_, [x])


def _projection(op: str, ours: Op, shape: tuple[int, int], batch: int, ceiling: Ceiling, *, compiled: bool) -> None:
    rows, columns = shape
    size = 2 * rows * columns
    copies = _copies(size, lambda: torch.randn(rows, columns, device="cuda").bfloat16())
    x = torch.randn(1, batch, columns, device="cuda").bfloat16()
    ways: dict[str, Op] = {"triton": ours, "torch": partial(F.linear, x)}
    if compiled:
        ways["torch.compile"] = partial(torch.compile(matvec if batch == 1 else F.linear, dynamic=False), x)
    _compare(f"{op} {rows}x{columns}" + (f" x{batch}" if batch > 1 else ""), size, ways, copies, ceiling)


def _attention(shape: Shape, positions: int, ceiling: Ceiling, *, compiled: bool) -> None:
    """One new position over a cache of `positions`, beside SDPA over the same keys and values."""
    heads, kv_heads, head_dim = shape.heads, shape.kv_heads, shape.head_dim
    cut = step_tiles(shape.hidden, shape.intermediate, shape.head_dim, torch.bfloat16).attention
    size = 2 * 2 * kv_heads * positions * head_dim
    copies = _copies(size, lambda: torch.randn(2, kv_heads, positions, head_dim, device="cuda").bfloat16())
    q = torch.randn(1, heads, head_dim, device="cuda").bfloat16()
    out = torch.empty_like(q)
    newest = torch.tensor([positions - 1], dtype=torch.int32, device="cuda")
    table = torch.arange(positions // cut.page, dtype=torch.int32, device="cuda")[None]
    splits = -(-positions // cut.split(positions))
    sums = torch.empty(1, splits, heads, head_dim, device="cuda")
    stats = torch.empty(1, splits, 2, heads, device="cuda")
    rows, mask = q[:, :, None], torch.zeros(1, positions, device="cuda")

    def ours(cache: torch.Tensor) -> None:
        flash_decode(q, cache[0], cache[1], newest, table, out, sums, stats, positions=positions, cut=cut, pdl=True)

    ways: dict[str, Op] = {
        "triton": ours,
        "torch": lambda cache: F.scaled_dot_product_attention(rows, cache[:1], cache[1:], enable_gqa=True),
    }
    if compiled:
        reference = torch.compile(decode_attention, dynamic=False)
        ways["torch.compile"] = lambda cache: reference(rows, cache[:1], cache[1:], mask)
    _compare(f"flash_decode {positions}", size, ways, copies, ceiling)


def _norm(hidden: int, ceiling: Ceiling, *, compiled: bool) -> None:
    """RMSNorm over many rows in bf16: each element read and written once; with the residual add three times as much.

    `torch` is the formula in eager ops, as models write it; `copy` is what a plain copy of the same rows takes.
    """
    size = 2 * 2 * NORM_ROWS * hidden
    copies = _copies(size, lambda: torch.randn(NORM_ROWS, hidden, device="cuda").bfloat16())
    weight = torch.ones(hidden, dtype=torch.bfloat16, device="cuda")
    wide, out = torch.randn(NORM_ROWS, hidden, device="cuda"), torch.empty_like(copies[0])
    eager = partial(rms_norm_reference, weight=weight, eps=EPS)
    ways: dict[str, Op] = {
        "triton": partial(rms_norm_triton, weight=weight, eps=EPS),
        "torch": eager,
        "F.rms_norm": lambda x: F.rms_norm(x, (hidden,), weight, EPS),
        "copy": torch.clone,
    }
    if compiled:
        ways["torch.compile"] = partial(torch.compile(rms_norm_reference, dynamic=False), weight=weight, eps=EPS)
    _compare(f"rms_norm {NORM_ROWS}x{hidden}", size, ways, copies, ceiling)
    add: dict[str, Op] = {
        "triton": lambda delta: add_rms_norm(wide, delta, weight, out, eps=EPS, pdl=False),
        "torch": lambda delta: out.copy_(eager(wide.add_(delta))),
    }
    _compare(f"add_rms_norm {NORM_ROWS}x{hidden}", 3 * size, add, copies, ceiling)


def _copies(size: int, make: Callable[[], torch.Tensor]) -> list[torch.Tensor]:
    return [make() for _ in range(max(-(-ROTATED_BYTES // size), 2))]


def _head(ceiling: Ceiling) -> None:
    share = f"of {ceiling.of}"
    sys.stdout.write(f"\n{'op':28} {'by':14} {'MB':>8} {'us':>8} {'TB/s':>6} {share:>8} {'x torch':>8}\n")


def _compare(op: str, size: int, ways: dict[str, Op], copies: Sequence[torch.Tensor], ceiling: Ceiling) -> None:
    """Print a line a way; `x torch` is how many times as fast as the way of that name it is."""
    seconds = {way: replayed(run, copies) for way, run in ways.items()}
    for way, taken in seconds.items():
        rate = size / taken
        sys.stdout.write(
            f"{op:28} {way:14} {size / 1e6:8.1f} {taken * 1e6:8.1f} {rate / 1e12:6.2f} {rate / ceiling.rate:8.1%} "
            f"{seconds['torch'] / taken:8.2f}\n"
        )


if __name__ == "__main__":
    sys.exit(main())
