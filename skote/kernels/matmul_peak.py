"""What a device can multiply, in floating-point operations a second: the ceiling of a prefill."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from skote.kernels.linear import matmul_onednn, onednn_available
from skote.kernels.read_bandwidth import replayed

CUDA_SIZE = 8192
CPU_SIZES = (384, 768, 1536)
CPU_ENOUGH_S = 0.02  # a product that takes longer is large enough; torch multiplies fp16 at 1 GFLOP/s on some CPUs
CPU_REPEATS = 5

Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def matmul_peak(device: torch.device, dtype: torch.dtype) -> float | None:
    """Operations a second (a multiplication and an addition are two) of the fastest square product on `device`.

    With the flags and threads that this process has. On a CPU the fastest way to a product that is at least as exact
    counts: torch's own, oneDNN's, and fp32 where `dtype` is narrower. None where the device is neither a CPU nor CUDA,
    or where three matrices of `CUDA_SIZE` would take more than half of its free memory.
    """
    if device.type == "cuda":
        with torch.cuda.device(device):
            if 3 * CUDA_SIZE**2 * dtype.itemsize > torch.cuda.mem_get_info()[0] // 2:
                return None
            return _cuda(dtype)
    if device.type == "cpu":
        return max(_cpu(each) for each in {dtype, torch.float32})
    return None


def _cuda(dtype: torch.dtype) -> float:
    # Random numbers: a product of zeros takes less power, and runs at clocks that real ones do not see.
    a, b, out = (torch.randn(CUDA_SIZE, CUDA_SIZE, device="cuda").to(dtype) for _ in range(3))
    return 2 * CUDA_SIZE**3 / replayed(lambda weight: torch.mm(a, weight, out=out), [b])


def _cpu(dtype: torch.dtype) -> float:
    peak = 0.0
    for size in CPU_SIZES:
        a, b = (torch.ones(size, size, dtype=dtype) for _ in range(2))
        products: list[Product] = [torch.mm, matmul_onednn] if onednn_available(b) else [torch.mm]
        seconds = min(_shortest(product, a, b) for product in products)
        peak = max(peak, 2 * size**3 / seconds)
        if seconds > CPU_ENOUGH_S:
            break
    return peak


def _shortest(product: Product, a: torch.Tensor, b: torch.Tensor) -> float:
    """Seconds of the fastest of `CPU_REPEATS` products, after one that is not counted."""
    product(a, b)
    times: list[float] = []
    for _ in range(CPU_REPEATS):
        start = time.perf_counter()
        product(a, b)
        times.append(time.perf_counter() - start)
    return min(times)
