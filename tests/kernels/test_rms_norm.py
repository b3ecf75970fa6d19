"""RMSNorm: the reference by hand and against Transformers, the kernel's door, the kernel in Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from skote.kernels.rms_norm import Paths, layer_norm_reference, rms_norm, rms_norm_reference

SIZES = (1, 5, 123, 576, 4096, 5120, 8192)

# One rounding of the result: half a unit in the last place, and as much again for fp32's order of summation.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2**-10, torch.bfloat16: 2**-7}


def drawn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 3) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def test_by_hand() -> None:
    # mean(3^2, 4^2) = 12.5, so that the row is divided by sqrt(12.5) and multiplied by the weight.
    y = rms_norm_reference(torch.tensor([[3.0, 4.0]]), torch.tensor([1.0, 2.0]), 0.0)

    torch.testing.assert_close(y, torch.tensor([[3.0 / 12.5**0.5, 8.0 / 12.5**0.5]]))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_layer_norm_equals_torchs(dtype: torch.dtype, bias: bool) -> None:
    x, weight, shift = drawn(4, 123, dtype=dtype), drawn(123, dtype=dtype, seed=4), drawn(123, dtype=dtype, seed=5)

    found = layer_norm_reference(x, weight, shift if bias else None, 1e-3)

    wide = F.layer_norm(x.float(), (123,), weight.float(), shift.float() if bias else None, 1e-3)
    torch.testing.assert_close(found, wide.to(dtype), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def test_a_row_of_zeros_stays_zero() -> None:
    assert rms_norm_reference(torch.zeros(2, 5), torch.ones(5), 1e-6).eq(0).all()


@pytest.mark.parametrize(("eps", "expected"), [(1e-5, 1e-4 / 1.001e-5**0.5), (1e-6, 1e-4 / 1.01e-6**0.5), (0.0, 1.0)])
def test_epsilon_is_kept_where_it_decides_the_result(eps: float, expected: float) -> None:
    y = rms_norm_reference(torch.full((1, 8), 1e-4), torch.ones(8), eps)

    torch.testing.assert_close(y, torch.full((1, 8), expected))


@pytest.mark.parametrize("hidden", SIZES)
def test_reference_equals_transformers_in_fp32(hidden: int) -> None:
    x, weight = drawn(2, 3, hidden), drawn(hidden, seed=4)
    theirs = LlamaRMSNorm(hidden, eps=1e-5)
    theirs.weight.data.copy_(weight)

    torch.testing.assert_close(rms_norm_reference(x, weight, 1e-5), theirs(x).detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_reference_rounds_once_in_half_precision(dtype: torch.dtype) -> None:
    x, weight = drawn(4, 576, dtype=dtype), drawn(576, dtype=dtype, seed=4)
    exact = x.double() / (x.double().pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()

    y = rms_norm_reference(x, weight, 1e-5)

    assert y.dtype == dtype
    torch.testing.assert_close(y.double(), exact, rtol=TOLERANCE[dtype] / 2 * 1.01, atol=1e-6)


def test_the_caller_uses_the_reference_off_cuda_and_counts_it() -> None:
    paths: Paths = Counter()
    x, weight = drawn(2, 16), drawn(16, seed=4)

    y = rms_norm(x, weight, 1e-5, paths)
    rms_norm(x, weight, 1e-5, paths)

    assert y.equal(rms_norm_reference(x, weight, 1e-5))
    assert paths == {("rms_norm", "reference"): 2}


def test_the_caller_takes_a_row_that_is_not_contiguous_off_cuda() -> None:
    x = drawn(16, 3).t()

    torch.testing.assert_close(
        rms_norm(x, torch.ones(16), 1e-5, Counter()), rms_norm_reference(x.contiguous(), torch.ones(16), 1e-5)
    )


def test_the_caller_counts_the_kernel_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    module = pytest.importorskip("skote.kernels.rms_norm_triton")
    monkeypatch.setattr(module, "rms_norm_triton", lambda x, weight, eps: (x, weight, eps))
    paths: Paths = Counter()

    with FakeTensorMode():
        x, weight = torch.empty(2, 8, device="cuda:0"), torch.empty(8, device="cuda:0")
        handed = rms_norm(x, weight, 1e-5, paths)

    assert handed == (x, weight, 1e-5)
    assert paths == {("rms_norm", "triton"): 1}


class TestLauncher:
    """The bounds of the kernel's own door, with tensors that only say that they are on CUDA (see test_refusals.py)."""

    @pytest.fixture(autouse=True)
    def _needs_triton(self) -> None:
        pytest.importorskip("triton")

    def launch(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        from skote.kernels.rms_norm_triton import rms_norm_triton

        return rms_norm_triton(x, weight, 1e-5)

    @pytest.mark.parametrize("hidden", [0, 65537])
    def test_rows_beyond_the_bounds(self, hidden: int) -> None:
        with FakeTensorMode(), pytest.raises(ValueError, match=f"rows of {hidden} elements"):
            self.launch(torch.empty(2, hidden, device="cuda:0"), torch.empty(hidden, device="cuda:0"))

    def test_no_rows_need_no_launch(self) -> None:
        with FakeTensorMode():
            y = self.launch(torch.empty(0, 8, device="cuda:0"), torch.empty(8, device="cuda:0"))

        assert tuple(y.shape) == (0, 8)

    @pytest.mark.parametrize(
        ("hidden", "block", "warps"),
        [
            (1, 1, 1),
            (123, 128, 1),
            (576, 1024, 2),
            (4096, 4096, 8),
            (5120, 8192, 16),
            (8192, 8192, 16),
            (65536, 65536, 16),
        ],
    )
    def test_the_block_holds_the_whole_row(self, hidden: int, block: int, warps: int) -> None:
        from skote.kernels.rms_norm_triton import launch_shape

        assert launch_shape(hidden) == (block, warps)


INTERPRETED = """
import sys
import torch
from skote.kernels.rms_norm import rms_norm_reference
from skote.kernels.rms_norm_triton import launch_shape, rms_norm_kernel

generator = torch.Generator().manual_seed(3)
for dtype, tolerance in ((torch.float32, 1e-5), (torch.float16, 2**-10)):
    for hidden in map(int, sys.argv[1:]):
        for eps in (1e-5, 1e-2):
            x = torch.randn(3, hidden, generator=generator).to(dtype)
            weight = torch.randn(hidden, generator=generator).to(dtype)
            out = torch.full((3, hidden), torch.nan, dtype=dtype)
            block, warps = launch_shape(hidden)
            rms_norm_kernel[(3,)](x, weight, out, hidden, eps, BLOCK=block, num_warps=warps)
            torch.testing.assert_close(out, rms_norm_reference(x, weight, eps), rtol=tolerance, atol=1e-6)
            print(dtype, hidden, eps)
"""


def test_the_kernel_equals_the_reference_in_the_interpreter() -> None:
    # Triton reads the variable when it is imported, so that the kernel runs in a process of its own. bf16 is left out:
    # the interpreter computes nonsense for it.
    pytest.importorskip("triton")
    done = subprocess.run(
        [sys.executable, "-c", INTERPRETED, *map(str, SIZES)],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 2 * len(SIZES) * 2


@pytest.mark.gpu
@pytest.mark.parametrize("hidden", SIZES)
@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_the_kernel_equals_the_reference_on_cuda(dtype: torch.dtype, hidden: int) -> None:
    paths: Paths = Counter()
    x, weight = drawn(2, 3, hidden, dtype=dtype).cuda(), drawn(hidden, dtype=dtype, seed=4).cuda()

    y = rms_norm(x, weight, 1e-5, paths)

    assert paths == {("rms_norm", "triton"): 1}
    torch.testing.assert_close(y, rms_norm_reference(x, weight, 1e-5), rtol=TOLERANCE[dtype], atol=1e-6)
