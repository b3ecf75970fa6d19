"""Rotary position embedding (Su et al., arXiv 2104.09864), in Llama's half-split order, with Llama 3's stretching.

For a head of D elements, pair (i, i + D/2) at position p is rotated by the angle p * theta^(-2i / D).
"""

from __future__ import annotations

import math

import torch

from skote.types import CapacityError


def inverse_frequencies(
    head_dim: int,
    theta: float,
    *,
    kind: str = "default",
    factor: float = 1.0,
    low_freq_factor: float = 1.0,
    high_freq_factor: float = 4.0,
    original_max_positions: int = 8192,
) -> torch.Tensor:
    """Radians per position of each pair, fp32 `[head_dim / 2]`.

    `linear` divides all of them by `factor`; `llama3` divides those whose wavelength is beyond
    original_max_positions / low_freq_factor, keeps those below original_max_positions / high_freq_factor, and blends
    in between (Llama 3.1's reference code).
    """
    plain = 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    if kind == "linear":
        return plain / factor
    if kind != "llama3":
        return plain
    turns = original_max_positions * plain / (2 * math.pi)  # full turns over the original context
    blend = ((turns - low_freq_factor) / (high_freq_factor - low_freq_factor)).clamp(0.0, 1.0)
    return plain * blend + plain / factor * (1.0 - blend)


def rope_table(positions: int, frequencies: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin, fp32 `[positions, head_dim]`, the two halves of a row equal."""
    if positions < 1:
        raise CapacityError(f"a rope table needs at least one position, got {positions}.")
    angles = torch.outer(torch.arange(positions, dtype=torch.float32, device=frequencies.device), frequencies)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def apply_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate `x` [..., head_dim] by `cos`, `sin` (broadcast against it, fp32); computed in fp32, result like `x`."""
    wide = x.float()
    first, second = wide.chunk(2, dim=-1)
    return (wide * cos + torch.cat((-second, first), dim=-1) * sin).to(x.dtype)
