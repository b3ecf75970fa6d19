"""silu(gate) * up: by hand, and the order of the two halves."""

from __future__ import annotations

import math

import torch

from skote.kernels.silu_mul import silu_mul


def test_by_hand_gate_first() -> None:
    gate_up = torch.tensor([[0.0, 1.0, -2.0, 5.0, 3.0, 4.0]])  # gate 0, 1, -2; up 5, 3, 4
    expected = [0.0, 3.0 / (1 + math.exp(-1.0)), -8.0 / (1 + math.exp(2.0))]

    torch.testing.assert_close(silu_mul(gate_up), torch.tensor([expected]))


def test_leading_dimensions_are_kept() -> None:
    assert silu_mul(torch.ones(2, 3, 8, dtype=torch.bfloat16)).shape == (2, 3, 4)
