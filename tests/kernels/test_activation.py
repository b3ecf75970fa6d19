"""Activations by hand, and the order of the two halves."""

from __future__ import annotations

import math

import pytest
import torch

from skote.kernels.activation import ACTIVATIONS, activated

X = 1.5
INNER = math.sqrt(2 / math.pi) * (X + 0.044715 * X**3)
BY_HAND = {
    "silu": X / (1 + math.exp(-X)),
    "gelu": X * 0.5 * (1 + math.erf(X / math.sqrt(2))),
    "gelu_tanh": X * 0.5 * (1 + math.tanh(INNER)),
    "relu": X,
    "relu2": X * X,
}


def test_every_activation_is_tried() -> None:
    assert set(BY_HAND) == set(ACTIVATIONS)


@pytest.mark.parametrize("name", BY_HAND)
def test_with_and_without_a_gate(name: str) -> None:
    plain = activated(torch.tensor([[X, -30.0]]), name, gated=False)
    gated = activated(torch.tensor([[X, -30.0, 2.0, 3.0]]), name, gated=True)

    torch.testing.assert_close(plain, torch.tensor([[BY_HAND[name], 0.0]]), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(gated, torch.tensor([[2.0 * BY_HAND[name], 0.0]]), rtol=1e-6, atol=1e-6)
