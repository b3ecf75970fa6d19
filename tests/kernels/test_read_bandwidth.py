"""Read bandwidth: what bounds it can be checked without knowing the machine, and its figure on a GPU."""

from __future__ import annotations

from types import SimpleNamespace

import psutil
import pytest
import torch

from skote.kernels import read_bandwidth as module
from skote.kernels.read_bandwidth import read_bandwidth

CPU = torch.device("cpu")


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A buffer that is quickly filled, on a machine that lends it."""
    monkeypatch.setattr(module, "CPU_BYTES", 32 << 20)
    monkeypatch.setattr(module, "CPU_MIN_BYTES", 16 << 20)


@pytest.mark.usefixtures("small")
def test_a_cpu_reads_as_many_bytes_as_it_has_summed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that gives each of the repeats its length: 32 MiB in the median of 1, 2, 3, 4 and 100 s."""
    lengths = [100.0, 1.0, 3.0, 4.0, 2.0]
    ticks = iter([tick for length in lengths for tick in (0.0, length)])
    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: next(ticks)))

    assert read_bandwidth(CPU) == (32 << 20) / 3.0


@pytest.mark.usefixtures("small")
def test_a_cpu_s_figure_is_of_this_world() -> None:
    bandwidth = read_bandwidth(CPU)

    assert bandwidth is not None
    assert 1e8 < bandwidth < 1e13


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(("available", "measured"), [(32 << 20, True), (30 << 20, False)])
def test_at_most_half_of_the_free_memory_is_taken(
    monkeypatch: pytest.MonkeyPatch, available: int, *, measured: bool
) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=available))

    assert (read_bandwidth(CPU) is not None) == measured


def test_other_devices_are_not_measured() -> None:
    assert read_bandwidth(torch.device("meta")) is None


@pytest.mark.gpu
def test_a_gpu_reads_from_memory_and_not_from_its_cache() -> None:
    bandwidth = read_bandwidth(torch.device("cuda:0"))

    assert bandwidth is not None
    assert 2e11 < bandwidth < 2e13


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_what_is_read_is_summed(dtype: torch.dtype) -> None:
    from skote.kernels.read_sum_triton import BLOCK, read_sum, read_sum_reference

    x = torch.randn(5, BLOCK, device="cuda").to(dtype)
    out, expected = torch.full((2, 5), torch.nan, device="cuda").unbind()
    read_sum(x, out)
    read_sum_reference(x, expected)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=2e-3)
