from __future__ import annotations

from pathlib import Path

import pytest

from skote.runtime import ceilings
from skote.runtime.ceilings import Ceilings, measure_ceilings


def test_a_device_of_which_nothing_is_known_has_no_ceilings() -> None:
    assert Ceilings(device="meta", dtype="bf16").measure() == {
        "read_bandwidth_bytes_per_s": None,
        "cache_bytes": None,
        "matmul_peak_flops_per_s": None,
    }


def test_what_an_engine_replaces_in_its_own_process_is_not_what_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ceilings, "matmul_peak", lambda *_: 1.0)
    assert Ceilings(device="meta", dtype="fp32").measure()["matmul_peak_flops_per_s"] == 1.0

    log = tmp_path / "ceilings.log"
    measured = measure_ceilings("meta", "fp32", threads=None, log=log, timeout_s=60)

    assert measured["matmul_peak_flops_per_s"] is None
    assert log.stat().st_size == 0
