"""What the decode kernels share: the checks at a launcher's door, and the tiles that they are cut into.

Their rules for programmatic dependent launch, which `tests/kernels/test_sm90.py` reads in the machine code:

- a kernel lets its successor start at once, so that the successor's weights are on their way while it still computes;
- every program waits before its first dependent read and before its first write, also one with nothing to do;
- what is read before the wait is constant within a step: weights (`evict_first`, they are not read again), tables,
  position, and the cache's older slots. What depends on a kernel of the step is read after it, with `evict_last`;
- a pipelined loop comes after the wait, all of it: the compiler moves such a loop's reads ahead of a wait inside it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton

MAX_COLUMNS = 32768
"""Longest row of a weight matrix: a matrix-vector program holds whole rows in registers."""

MAX_ROWS = 16
"""Rows of a multi-row step, all of them always computed: one shape of every product, so one rounding of every row."""

ROW_TILES = (MAX_ROWS, 32, 64, 128)
"""Rows that a multi-row kernel takes: those of a step, or the tokens of a short prompt."""

PIECE = 16
"""Bytes of a matrix's row that a thread reads at once."""

MMA_COLUMNS = PIECE // torch.bfloat16.itemsize
"""What a row's length is a multiple of where a lane's pieces go whole into the matrix instruction."""

DTYPES = (torch.float32, torch.float16, torch.bfloat16)

MAX_OFFSET = 2**31 - 1
"""Highest element that a kernel reaches where it computes offsets with 32 bits."""


class Tile(NamedTuple):
    """How a matrix-vector kernel is cut: `rows` of the matrix at once (a power of two), and a program's warps.

    Where the kernel knows it: so many `turns` a program takes, each of `rows` rows, and whether it multiplies by the
    matrix instruction, which takes bf16.
    """

    rows: int
    warps: int
    turns: int = 1
    mma: bool = False

    def chunk(self, dtype: torch.dtype) -> int:
        """Columns at once: a piece of 16 bytes of this `dtype` for every thread."""
        return self.warps * 32 * PIECE // dtype.itemsize


class GemmTile(NamedTuple):
    """How a multi-row kernel is cut: `rows` of the matrix a program (a power of two of at least 16), `block` columns at
    once (a power of two), of which `stages` blocks are in flight, its warps, and into how many parts columns are split.

    In fp32 a block is half as many columns, which are as many bytes.
    """

    rows: int
    block: int
    stages: int
    warps: int
    splits: int = 1

    def columns(self, dtype: torch.dtype) -> int:
        """Columns at once of a matrix of this `dtype`."""
        return self.block // 2 if dtype == torch.float32 else self.block


def check_tensors(op: str, **tensors: torch.Tensor) -> None:
    """Check that all `tensors` lie contiguous on one CUDA device.

    Raises:
        TypeError, ValueError: what `check_cuda` and `check_contiguous` refuse.
    """
    check_cuda(op, **tensors)
    check_contiguous(op, **tensors)


def check_cuda(op: str, **tensors: torch.Tensor) -> None:
    """Raises:
    TypeError: one of `tensors` is not on CUDA.
    ValueError: they lie on several devices.
    """
    for name, tensor in tensors.items():
        if tensor.device.type != "cuda":
            raise TypeError(f"{op}: {name} is on {tensor.device}; the kernel takes CUDA tensors alone.")
    devices = {str(tensor.device) for tensor in tensors.values()}
    if len(devices) > 1:
        raise ValueError(f"{op}: the tensors lie on several devices ({', '.join(sorted(devices))}).")


def check_contiguous(op: str, **tensors: torch.Tensor) -> None:
    """Raises:
    ValueError: one of `tensors` is not contiguous.
    """
    for name, tensor in tensors.items():
        if not tensor.is_contiguous():
            raise ValueError(f"{op}: {name} is not contiguous; call .contiguous() first.")


def check_dtype(op: str, dtype: torch.dtype, **tensors: torch.Tensor) -> None:
    """Raises:
    TypeError: one of `tensors` is not of `dtype`.
    """
    for name, tensor in tensors.items():
        if tensor.dtype != dtype:
            raise TypeError(f"{op}: {name} is {tensor.dtype}; the kernel takes {dtype}.")


def check_float(op: str, **tensors: torch.Tensor) -> None:
    """Raises:
    TypeError: one of `tensors` is of none of `DTYPES`.
    """
    for name, tensor in tensors.items():
        if tensor.dtype not in DTYPES:
            raise TypeError(f"{op}: {name} is {tensor.dtype}; the kernel takes fp32, fp16 and bf16.")


def check_rank(op: str, rank: int, **tensors: torch.Tensor) -> None:
    """Raises:
    ValueError: one of `tensors` has not `rank` dimensions.
    """
    for name, tensor in tensors.items():
        if tensor.ndim != rank:
            raise ValueError(f"{op}: {name} has shape {tuple(tensor.shape)}, expected {rank} dimensions.")


def check_shape(op: str, shape: tuple[int, ...], **tensors: torch.Tensor) -> None:
    """Raises:
    ValueError: one of `tensors` has not this `shape`.
    """
    for name, tensor in tensors.items():
        if tensor.shape != shape:
            raise ValueError(f"{op}: {name} has shape {tuple(tensor.shape)}, expected {shape}.")


def check_columns(op: str, columns: int, most: int = MAX_COLUMNS) -> None:
    """Raises:
    ValueError: rows of `columns` elements are empty, or longer than `most`.
    """
    if not 1 <= columns <= most:
        raise ValueError(f"{op}: rows of {columns} elements; the kernel takes 1 to {most}.")


def check_offsets(op: str, **elements: int) -> None:
    """Raises:
    ValueError: one of the numbers of `elements` is beyond the kernel's 32-bit offsets.
    """
    for name, count in elements.items():
        if count > MAX_OFFSET:
            raise ValueError(f"{op}: {name} has {count} elements; the kernel's offsets reach {MAX_OFFSET}.")


def check_window(op: str, window: int | None) -> None:
    """Raises:
    ValueError: a `window` of positions that is empty.
    """
    if window is not None and window < 1:
        raise ValueError(f"{op}: a window of {window} positions; it must have at least one.")


def check_matrix(op: str, weight: torch.Tensor, rows: int | None, columns: int) -> None:
    """Check that `weight` is a matrix of `rows` (None: any number) by `columns` that a kernel takes.

    Raises:
        TypeError: not fp32, fp16 or bf16.
        ValueError: another shape, or rows longer than `MAX_COLUMNS`.
    """
    check_float(op, weight=weight)
    if weight.ndim != 2 or weight.shape[1] != columns or rows not in (None, weight.shape[0]):
        raise ValueError(f"{op}: weight has shape {tuple(weight.shape)}, expected ({rows or 'any'}, {columns}).")
    check_columns(op, columns)


def check_norm(op: str, columns: int, **norms: torch.Tensor) -> None:
    """Raises:
    TypeError: the weight of one of `norms` is not fp32, fp16 or bf16.
    ValueError: it has not one element for each of `columns`.
    """
    check_float(op, **norms)
    check_shape(op, (columns,), **norms)


def check_best(op: str, shape: tuple[int, ...], *, best: torch.Tensor, first: torch.Tensor) -> None:
    """Check that `best` is fp32 and `first` int32, both of `shape`: a maximum's first stage.

    Raises:
        TypeError, ValueError: another dtype or shape.
    """
    check_dtype(op, torch.float32, best=best)
    check_dtype(op, torch.int32, first=first)
    check_shape(op, shape, best=best, first=first)


def check_bias(op: str, bias: torch.Tensor | None, weight: torch.Tensor) -> None:
    """Check that `bias`, where there is one, is a vector with an element for each row of `weight`, beside it.

    Raises:
        TypeError: another dtype, or a tensor that is not on CUDA.
        ValueError: another shape, not contiguous, or on another device.
    """
    if bias is None:
        return
    check_tensors(op, weight=weight, bias=bias)
    check_operand(op, weight, bias=bias)
    check_shape(op, (weight.shape[0],), bias=bias)


def check_rows(op: str, rows: int, **tensors: torch.Tensor) -> None:
    """Check that a multi-row kernel takes `rows` rows, and that all `tensors` have as many.

    Raises:
        ValueError: `rows` is none of `ROW_TILES`, or a tensor has another number.
    """
    if rows not in ROW_TILES:
        raise ValueError(f"{op}: {rows} rows; the kernel takes {', '.join(map(str, ROW_TILES))}.")
    for name, tensor in tensors.items():
        if tensor.ndim == 0 or tensor.shape[0] != rows:
            raise ValueError(f"{op}: {name} has shape {tuple(tensor.shape)}, expected {rows} rows.")


def check_operand(op: str, weight: torch.Tensor, **operand: torch.Tensor) -> None:
    """Raises:
    TypeError: the `operand` that a matrix instruction multiplies `weight` with is of another dtype.
    """
    for name, tensor in operand.items():
        if tensor.dtype != weight.dtype:
            raise TypeError(f"{op}: {name} is {tensor.dtype}, the weight {weight.dtype}; they must be alike.")


def check_unsplit(op: str, tile: GemmTile) -> None:
    """Raises:
    ValueError: `tile` splits the columns; only `split_gemm` does.
    """
    if tile.splits != 1:
        raise ValueError(f"{op}: the tile splits the columns in {tile.splits}; the kernel takes a tile with splits=1.")


def check_tile(op: str, tile: Tile | GemmTile, rows: int) -> None:
    """Raises:
    ValueError: `rows` rows are not a whole number of tiles.
    """
    if rows % tile.rows:
        raise ValueError(f"{op}: {rows} rows are not a multiple of the tile's {tile.rows}.")


def check_turns(op: str, tile: Tile, rows: int, weight: torch.Tensor, columns: int) -> None:
    """Check that `tile` cuts `rows` rows of `columns` elements of the `weight`'s dtype.

    Raises:
        TypeError: it asks for the matrix instruction, and `weight` is not bf16.
        ValueError: the rows are not a whole number of programs, or too odd for the matrix instruction.
    """
    if tile.mma and weight.dtype != torch.bfloat16:
        raise TypeError(f"{op}: the weight is {weight.dtype}; a tile with mma takes bf16.")
    if tile.mma and columns % MMA_COLUMNS:
        raise ValueError(f"{op}: rows of {columns} elements; a tile with mma takes a multiple of {MMA_COLUMNS}.")
    if rows % (tile.rows * tile.turns):
        raise ValueError(f"{op}: {rows} rows are not a multiple of the tile's {tile.rows} x {tile.turns}.")


def padded(columns: int) -> int:
    """The power of two that covers a row of `columns` elements."""
    return int(triton.next_power_of_2(columns))
