"""The numeric flags of a process: set once, through one call, the same for every arm; readable, and restorable."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from skote.types import UsageError

TORCH_DTYPES = {"fp32": "float32", "tf32": "float32", "bf16": "bfloat16", "fp16": "float16"}
"""Our names of what weights are kept in, and torch's. `tf32` is fp32 weights with TF32 products."""


@dataclass(frozen=True, slots=True)
class NumericFlags:
    """What torch lets fp32 matrix products round to, whether cuDNN may autotune, and the CPU threads of an engine."""

    tf32: bool = False
    matmul_precision: str = "highest"
    cudnn_autotune: bool = False
    threads: int | None = None  # None keeps torch's own choice


def flags_for(dtype: str, threads: int | None = None) -> NumericFlags:
    """The flags that `dtype` stands for: `tf32` is TF32 on and precision "high", all others keep fp32 exact.

    Raises:
        UsageError: an unknown dtype.
    """
    if dtype not in TORCH_DTYPES:
        raise UsageError(f"dtype {dtype!r} is not known; choose one of {', '.join(TORCH_DTYPES)}.")
    fast = dtype == "tf32"
    return NumericFlags(tf32=fast, matmul_precision="high" if fast else "highest", threads=threads)


def read_flags() -> NumericFlags:
    """The flags as torch has them now."""
    import torch

    return NumericFlags(
        tf32=torch.backends.cudnn.allow_tf32,
        matmul_precision=torch.get_float32_matmul_precision(),
        cudnn_autotune=torch.backends.cudnn.benchmark,
        threads=torch.get_num_threads(),
    )


def set_flags(flags: NumericFlags) -> None:
    """Give torch these flags, for the rest of the process. `threads` None leaves the thread count alone."""
    import torch

    torch.set_float32_matmul_precision(flags.matmul_precision)
    torch.backends.cudnn.allow_tf32 = flags.tf32
    torch.backends.cudnn.benchmark = flags.cudnn_autotune
    if flags.threads is not None:
        torch.set_num_threads(flags.threads)


@contextmanager
def applied(flags: NumericFlags) -> Iterator[None]:
    """Set `flags` for a block, and restore what was there before."""
    before = read_flags()
    set_flags(flags)
    try:
        yield
    finally:
        set_flags(before)


def flags_record() -> dict[str, Any]:
    """The flags as torch has them now, for the manifest."""
    return asdict(read_flags())
