"""Cores of replicas, on machines that the tests make up."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from skote.runtime.affinity import cores_of, parse_cores

linux = pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="the system does not bind threads to cores")


@pytest.mark.parametrize(
    ("text", "cores"),
    [("0-3,8\n", {0, 1, 2, 3, 8}), ("5", {5}), ("", set()), ("0,2,4-5", {0, 2, 4, 5})],
)
def test_a_list_of_cores_is_read_as_linux_writes_it(text: str, cores: set[int]) -> None:
    assert parse_cores(text) == cores


@linux
def test_cpu_replicas_share_the_cores_and_one_alone_has_them_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {9, 1, 3, 5, 7})
    assert cores_of(["cpu"]) == [None]
    assert cores_of(["cpu", "cpu"]) == [(1, 3), (5, 7)]
    assert cores_of(["cpu"] * 5) == [(1,), (3,), (5,), (7,), (9,)]
    assert cores_of(["cpu"] * 6) == [None] * 6  # more than cores: the system shares them out


@linux
def test_a_gpus_replica_keeps_to_the_cores_beside_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    near = tmp_path / "0000:c3:00.0"
    near.mkdir()
    (near / "local_cpulist").write_text("4-7,20-23\n", encoding="ascii")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(22)))
    addresses = {"cuda:0": 0xC3, "cuda:1": 0xD4}
    monkeypatch.setattr(
        torch.cuda,
        "get_device_properties",
        lambda device: SimpleNamespace(pci_domain_id=0, pci_bus_id=addresses[device], pci_device_id=0),
    )
    assert cores_of(["cuda:0", "cuda:1"], tmp_path) == [(4, 5, 6, 7, 20, 21), None]
    (near / "local_cpulist").write_text("0-63\n", encoding="ascii")
    assert cores_of(["cuda:0"], tmp_path) == [None]


@linux
def test_a_process_and_its_threads_keep_to_their_cores() -> None:
    core = min(os.sched_getaffinity(0))
    script = (
        "import os, threading\n"
        "from skote.flags import flags_for\n"
        "from skote.runtime.affinity import prepare\n"
        f"prepare(flags_for('fp32', 1), ({core},))\n"
        "seen = []\n"
        "thread = threading.Thread(target=lambda: seen.append(os.sched_getaffinity(0)))\n"
        "thread.start(); thread.join()\n"
        "print(os.sched_getaffinity(0), seen)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == f"{{{core}}} [{{{core}}}]"
