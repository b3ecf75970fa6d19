"""Every form of `devices`, on machines with and without accelerators."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from skote.runtime import devices as module
from skote.runtime.devices import resolve_devices, threads_per_replica
from skote.types import CapacityError, UsageError


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`machine(cuda=, xpu=, mps=, cores=)`: what torch and the scheduler say is there."""

    def set_up(*, cuda: int = 0, xpu: int = 0, mps: bool = False, cores: int = 4) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: cuda)
        monkeypatch.setattr(torch.xpu, "is_available", lambda: xpu > 0)
        monkeypatch.setattr(torch.xpu, "device_count", lambda: xpu)
        monkeypatch.setattr(torch.backends.mps, "is_available", lambda: mps)
        monkeypatch.setattr(module.os, "sched_getaffinity", lambda pid: set(range(cores)), raising=False)

    return set_up


@pytest.mark.parametrize(
    ("there", "devices", "resolved"),
    [
        ({}, 1, ["cpu"]),
        ({}, None, ["cpu"]),
        ({}, 4, ["cpu"] * 4),
        ({}, "2", ["cpu"] * 2),
        ({}, "all", ["cpu"]),
        ({}, "cpu", ["cpu"]),
        ({}, ["cpu", "cpu"], ["cpu", "cpu"]),
        ({"cuda": 3}, 1, ["cuda:0"]),
        ({"cuda": 3}, None, ["cuda:0"]),
        ({"cuda": 3}, 2, ["cuda:0", "cuda:1"]),
        ({"cuda": 3}, "all", ["cuda:0", "cuda:1", "cuda:2"]),
        ({"cuda": 3}, "cpu", ["cpu"]),
        ({"cuda": 3}, "cuda", ["cuda:0"]),
        ({"cuda": 3}, "cuda:1", ["cuda:1"]),
        ({"cuda": 3}, ["cuda:0", "cuda:2"], ["cuda:0", "cuda:2"]),
        ({"cuda": 3}, ("cuda:2", "cuda:0"), ["cuda:2", "cuda:0"]),
        ({"cuda": 3}, ["cuda:1", "cpu"], ["cuda:1", "cpu"]),
        ({"cuda": 1, "xpu": 2}, "all", ["cuda:0"]),
        ({"xpu": 2}, "all", ["xpu:0", "xpu:1"]),
        ({"xpu": 2}, "xpu", ["xpu:0"]),
        ({"mps": True}, 1, ["mps"]),
        ({"mps": True}, "mps", ["mps"]),
    ],
)
def test_forms(machine: Any, there: dict[str, Any], devices: Any, resolved: list[str]) -> None:
    machine(**there)

    assert resolve_devices(devices) == resolved


@pytest.mark.parametrize(
    ("there", "devices", "sentence"),
    [
        ({}, 5, r"devices=5 .* 4 CPU core\(s\) and no accelerator"),
        ({"cuda": 2}, 3, r"devices=3 .* 2 accelerator\(s\)"),  # never a fall-back to CPU
        ({"mps": True}, 2, r"devices=2 .* 1 accelerator\(s\)"),
        ({}, "cuda:0", "'cuda:0' is not on this machine; there is cpu"),
        ({"cuda": 2}, "cuda:2", "'cuda:2' is not on this machine; there is cpu, cuda:0, cuda:1"),
        ({"cuda": 2}, ["cuda:0", "xpu:0"], "'xpu:0' is not on this machine"),
        ({}, "gpu", "'gpu' is not on this machine"),
        ({}, [0], "'0' is not on this machine"),
    ],
)
def test_what_is_not_there(machine: Any, there: dict[str, Any], devices: Any, sentence: str) -> None:
    machine(**there)

    with pytest.raises(CapacityError, match=sentence):
        resolve_devices(devices)


@pytest.mark.parametrize(
    ("devices", "sentence"),
    [
        (0, "devices=0 must be at least 1"),
        (-1, "devices=-1 must be at least 1"),
        ([], r"devices=\[\] names no devices"),
        (True, "devices=True names no devices"),
        (1.5, "devices=1.5 names no devices"),
        ({"cuda": 0}, "names no devices"),
        (["cuda:0", "cuda"], "cuda:0 more than once"),
    ],
)
def test_what_means_nothing(machine: Any, devices: Any, sentence: str) -> None:
    machine(cuda=2)

    with pytest.raises(UsageError, match=sentence):
        resolve_devices(devices)


def test_a_digit_that_is_no_number(machine: Any) -> None:
    machine()

    with pytest.raises(UsageError, match="'²' is not on this machine"):
        resolve_devices("²")


@pytest.mark.parametrize(
    ("devices", "cores", "threads"),
    [
        (["cpu"], 4, 4),
        (["cpu", "cpu"], 4, 2),
        (["cpu"] * 3, 4, 1),
        (["cpu"] * 4, 2, 1),
        (["cuda:0", "cpu"], 4, 4),
        (["cuda:0"], 4, None),
    ],
)
def test_replicas_split_the_cores(machine: Any, devices: list[str], cores: int, threads: int | None) -> None:
    machine(cores=cores)

    assert threads_per_replica(devices) == threads
