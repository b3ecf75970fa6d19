from __future__ import annotations

from pathlib import Path

import pytest
import torch

from skote.kernels.cache_size import cache_size

CPU = torch.device("cpu")


@pytest.fixture
def cpus(tmp_path: Path) -> Path:
    """Two cores with an L1 for data and one for instructions each, and an L3 that they share."""
    for core in (0, 1):
        for index, (level, kind, shared, size) in enumerate(
            [
                ("1", "Data", str(core), "32K"),
                ("1", "Instruction", str(core), "64K"),
                ("3", "Unified", "0-1", "16M"),
            ]
        ):
            cache = tmp_path / f"cpu{core}" / "cache" / f"index{index}"
            cache.mkdir(parents=True)
            for name, text in (("level", level), ("type", kind), ("shared_cpu_list", shared), ("size", size)):
                (cache / name).write_text(f"{text}\n")
    return tmp_path


def test_every_data_cache_counts_once(cpus: Path) -> None:
    assert cache_size(CPU, cpus) == 2 * (32 << 10) + (16 << 20)


def test_what_is_not_told_is_unknown(tmp_path: Path) -> None:
    assert cache_size(CPU, tmp_path) is None
    assert cache_size(torch.device("meta")) is None


@pytest.mark.gpu
def test_a_gpu_s_l2() -> None:
    size = cache_size(torch.device("cuda:0"))

    assert size is not None
    assert 1 << 20 < size < 1 << 30
