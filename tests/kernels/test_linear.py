"""The three forms of y = W x agree."""

from __future__ import annotations

import pytest
import torch

from skote.kernels.linear import matmul, matmul_onednn, matvec, onednn_available

GENERATOR_SEED = 2


def drawn(*shape: int, seed: int = GENERATOR_SEED) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_by_hand() -> None:
    weight = torch.tensor([[1.0, 2.0], [3.0, 4.0], [0.0, -1.0]])
    x = torch.tensor([[[10.0, 1.0]]])

    assert matvec(x, weight).tolist() == [[[12.0, 34.0, -1.0]]]
    assert matmul(x, weight).tolist() == [[[12.0, 34.0, -1.0]]]


def test_a_row_equals_the_product_of_many_rows() -> None:
    x, weight = drawn(1, 5, 48), drawn(17, 48, seed=3)
    many = matmul(x, weight)

    for token in range(5):
        torch.testing.assert_close(matvec(x[:, token : token + 1], weight)[:, 0], many[:, token], rtol=1e-5, atol=1e-5)


def test_half_precision_weights_give_fp32_and_the_row_does_not_round_its_input() -> None:
    weight = torch.tensor([[1.0, 1.0]], dtype=torch.bfloat16)
    x = torch.tensor([[[1.0, 2**-12]]])  # the second term is lost once x is rounded to bf16 and summed there

    assert matvec(x, weight).dtype == matmul(x, weight).dtype == torch.float32
    assert matvec(x, weight).item() == 1.0 + 2**-12
    assert matmul(x, weight).item() == 1.0


@pytest.mark.skipif(not onednn_available(torch.ones(1)), reason="a build of torch without oneDNN")
@pytest.mark.parametrize("shape", [(1, 1, 48), (1, 5, 48), (3, 4, 48)])
def test_onednn_equals_aten(shape: tuple[int, ...]) -> None:
    x, weight = drawn(*shape), drawn(17, 48, seed=3)

    torch.testing.assert_close(matmul_onednn(x, weight), matmul(x, weight), rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(not onednn_available(torch.ones(1)), reason="a build of torch without oneDNN")
def test_onednn_takes_the_last_position_of_a_batch_as_it_lies() -> None:
    x, weight = drawn(3, 4, 48), drawn(17, 48, seed=3)

    torch.testing.assert_close(matmul_onednn(x[:, -1:], weight), matmul(x, weight)[:, -1:], rtol=1e-5, atol=1e-5)


def test_onednn_is_for_fp32_on_cpus() -> None:
    assert not onednn_available(torch.ones(1, dtype=torch.bfloat16))
    assert not onednn_available(torch.ones(1, device="meta"))
