"""The numeric flags: what each dtype stands for, that torch has them, that a block restores them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from skote.flags import TORCH_DTYPES, NumericFlags, applied, flags_for, flags_record, read_flags, set_flags
from skote.types import UsageError


@pytest.fixture(autouse=True)
def _untouched() -> Iterator[None]:
    before = read_flags()
    yield
    set_flags(before)


def test_every_dtype_by_name() -> None:
    assert {name: getattr(torch, kind).itemsize for name, kind in TORCH_DTYPES.items()} == {
        "fp32": 4,
        "tf32": 4,
        "bf16": 2,
        "fp16": 2,
    }


def test_tf32_rounds_products_and_no_other_dtype_does() -> None:
    assert flags_for("tf32", 3) == NumericFlags(tf32=True, matmul_precision="high", cudnn_autotune=False, threads=3)
    for dtype in ("fp32", "bf16", "fp16"):
        assert flags_for(dtype) == NumericFlags(tf32=False, matmul_precision="highest", cudnn_autotune=False)


def test_an_unknown_dtype_is_refused_with_the_known_ones() -> None:
    with pytest.raises(UsageError, match="dtype 'fp8' is not known; choose one of fp32, tf32, bf16, fp16"):
        flags_for("fp8")


@pytest.mark.parametrize(("dtype", "tf32", "precision"), [("tf32", True, "high"), ("fp32", False, "highest")])
def test_torch_has_them(dtype: str, tf32: bool, precision: str) -> None:
    torch.backends.cudnn.benchmark = True

    set_flags(flags_for(dtype, threads=1))

    assert torch.backends.cuda.matmul.allow_tf32 is tf32
    assert torch.backends.cudnn.allow_tf32 is tf32
    assert torch.get_float32_matmul_precision() == precision
    assert torch.backends.cudnn.benchmark is False
    assert torch.get_num_threads() == 1


def test_no_thread_count_leaves_torch_its_own() -> None:
    torch.set_num_threads(2)
    set_flags(flags_for("fp32"))

    assert torch.get_num_threads() == 2


@pytest.mark.parametrize("outside", ["fp32", "tf32"])
def test_a_block_has_its_flags_and_restores_those_before(outside: str) -> None:
    set_flags(flags_for(outside, threads=2))
    before = read_flags()

    with applied(NumericFlags(tf32=outside == "fp32", matmul_precision="medium", cudnn_autotune=True, threads=1)) as _:
        assert read_flags() != before
        assert read_flags().threads == 1
        assert read_flags().cudnn_autotune

    assert read_flags() == before


def test_a_block_that_fails_restores_them_too() -> None:
    before = read_flags()

    with pytest.raises(ZeroDivisionError), applied(flags_for("tf32", threads=1)):
        raise ZeroDivisionError

    assert read_flags() == before


def test_what_was_set_is_what_is_read_and_recorded() -> None:
    set_flags(flags_for("tf32", threads=1))

    assert read_flags() == flags_for("tf32", threads=1)
    assert flags_record() == {"tf32": True, "matmul_precision": "high", "cudnn_autotune": False, "threads": 1}
