from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from skote.kernels import matmul_peak as module
from skote.kernels.matmul_peak import matmul_peak

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_cpu_s_figure_is_of_this_world(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    monkeypatch.setattr(module, "CPU_SIZES", (96,))
    peak = matmul_peak(CPU, dtype)

    assert peak is not None
    assert 1e8 < peak < 1e15


def test_the_shortest_of_several_products_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock by which the repeats take 5, 3, 2, 4 and 6 s, in either way to a product."""
    monkeypatch.setattr(module, "CPU_SIZES", (8, 16))  # 2 s are more than enough: 16 is not reached
    ticks = iter([tick for length in (5.0, 3.0, 2.0, 4.0, 6.0) * 2 for tick in (0.0, length)])
    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: next(ticks)))

    assert matmul_peak(CPU, torch.float32) == 2 * 8**3 / 2.0


def test_a_narrow_dtype_may_be_multiplied_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_cpu", {torch.float16: 1e9, torch.float32: 4e11}.__getitem__)

    assert matmul_peak(CPU, torch.float16) == 4e11


def test_other_devices_are_not_measured() -> None:
    assert matmul_peak(torch.device("meta"), torch.float32) is None


@pytest.mark.gpu
def test_a_gpu_multiplies_bf16_faster_than_fp32() -> None:
    fp32, bf16 = (matmul_peak(torch.device("cuda:0"), dtype) for dtype in (torch.float32, torch.bfloat16))

    assert fp32 is not None
    assert bf16 is not None
    assert 1e12 < fp32 < bf16 < 1e16
