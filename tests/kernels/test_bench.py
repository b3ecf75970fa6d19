"""The microbenchmarks without a device: what they launch passes the launchers' checks, and what the table says."""

from __future__ import annotations

import csv
import importlib
import io
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

pytest.importorskip("triton")

from skote.kernels import bench, launch
from skote.kernels.bench_table import Ceiling, Line, Table
from skote.types import UsageError

MODULES = ("add_rms_norm", "flash_decode", "gate_up_gemm", "gate_up_gemv", "head_gemm", "head_gemv", "head_norm",
           "qkv_gemm", "qkv_gemv", "residual_gemv", "rms_norm", "split_gemm")  # fmt: skip


def test_a_line_by_hand(tmp_path: Path) -> None:
    """2 MB in 1 us are 2 TB/s, half of the ceiling, and twice as fast as torch."""
    out, path = io.StringIO(), tmp_path / "table.csv"
    table = Table("a device", out, path)
    table.head(Ceiling("copy", 4e12))
    table.add("op", 2_000_000, {"triton": 1e-6, "torch": 2e-6}, Ceiling("copy", 4e12))
    lines = [line.split() for line in out.getvalue().splitlines() if line]
    assert lines == [
        ["op", "by", "MB", "us", "TB/s", "of", "copy", "x", "torch"],
        ["op", "triton", "2.0", "1.0", "2.00", "50.0%", "2.00"],
        ["op", "torch", "2.0", "2.0", "1.00", "25.0%", "1.00"],
    ]
    with path.open(newline="", encoding="utf-8") as file:
        first, second = csv.DictReader(file)
    assert tuple(first) == Line._fields
    assert list(first.values()) == ["a device", "op", "triton", "2000000", "1e-06", "copy", "4000000000000.0", "2.0"]
    assert (second["by"], second["times_torch"]) == ("torch", "1.0")


def test_a_file_that_cannot_be_written_is_found_before_anything_is_measured(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"--csv: .*nowhere.*t.csv cannot be written \(No such file or directory\)"):
        Table("a device", io.StringIO(), tmp_path / "nowhere" / "t.csv")


def test_without_a_device_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert bench.main([]) == 4
    assert capsys.readouterr().err == "skote.kernels.bench: there is no CUDA device to measure.\n"


class Noted:
    """In place of a module's kernels: their launches, by the module's name."""

    def __init__(self, name: str, launches: Counter[str]) -> None:
        self._name, self._launches = name, launches

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*arguments: object, **options: object) -> None:
            self._launches[self._name] += 1

        return launch


class NoDevice(TorchFunctionMode):
    """Tensors of shapes alone, where some on CUDA are asked for."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def meta(given: Any) -> Any:
            return "meta" if given == "cuda" else given

        return func(*map(meta, args), **{name: meta(value) for name, value in (kwargs or {}).items()})


def on_no_device(op: str, **tensors: torch.Tensor) -> None:
    """In place of `check_tensors`."""
    assert all(tensor.is_contiguous() and tensor.is_meta for tensor in tensors.values()), op


def once(run: Callable[[torch.Tensor], Any], copies: Sequence[torch.Tensor]) -> float:
    """In place of `replayed`."""
    run(copies[0])
    return 1e-6


@pytest.mark.parametrize("shape", bench.SHAPES)
def test_every_op_passes_its_launchers_checks(
    shape: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    launches: Counter[str] = Counter()
    for name in MODULES:
        module = importlib.import_module(f"skote.kernels.{name}_triton")
        monkeypatch.setattr(module, "check_tensors", on_no_device)
        for kernel in [each for each in vars(module) if each.endswith("_kernel")]:
            monkeypatch.setattr(module, kernel, Noted(name, launches))
    monkeypatch.setattr(launch, "check_tensors", on_no_device)
    monkeypatch.setattr(bench, "replayed", once)
    monkeypatch.setattr(bench, "read_bandwidth", lambda _: 4e12)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "none")
    monkeypatch.setattr(torch.cuda, "device", lambda _: NoDevice())
    path = tmp_path / "table.csv"
    with NoDevice():
        assert bench.main(["--shape", shape, "--csv", str(path)]) == 0
    assert set(launches) == set(MODULES)
    with path.open(newline="", encoding="utf-8") as file:
        lines = list(csv.DictReader(file))
    norms = {line["op"].partition(" ")[2] for line in lines if line["op"].startswith("rms_norm ")}
    assert norms == {f"{rows}x{hidden}" for rows in (2048, 8192) for hidden in (576, 2048, 4096, 5120, 8192)}
    head_norms = [line["by"] for line in lines if line["op"].startswith("head_norm ")]
    assert head_norms == ["triton", "torch"] * 3
    assert "head_norm 128x" in capsys.readouterr().out
