"""Rotary position embedding (Su et al., arXiv 2104.09864), in Llama's half-split order, and what stretches it.

For a head of D elements, pair (i, i + D/2) at position p is rotated by the angle p * theta^(-2i / D).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F

from skote.types import CapacityError


def inverse_frequencies(
    dim: int,
    theta: float,
    *,
    kind: str = "default",
    factor: float = 1.0,
    low_freq_factor: float = 1.0,
    high_freq_factor: float = 4.0,
    original_max_positions: int = 8192,
    beta_fast: float = 32.0,
    beta_slow: float = 1.0,
    truncate: bool = True,
    divisors: Sequence[float] = (),
) -> torch.Tensor:
    """Radians per position of each pair of `dim` rotated elements, fp32 `[dim / 2]`.

    `linear` divides all of them by `factor`; `llama3` divides those whose wavelength is beyond
    original_max_positions / low_freq_factor, keeps those below original_max_positions / high_freq_factor, and blends
    in between (Llama 3.1's reference code). `yarn` divides the pairs that turn less than `beta_slow` times over the
    original context, keeps those that turn more than `beta_fast` times, and blends linearly by the pair's number (Peng
    et al., arXiv 2309.00071); `truncate` takes whole pairs for the two ends. `longrope` divides each by its own of
    `divisors` (Ding et al., arXiv 2402.13753). `dynamic` is plain up to the original context.
    """
    plain = 1.0 / theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    if kind == "linear":
        return plain / factor
    if kind == "longrope":
        return plain / torch.tensor(divisors)
    if kind == "yarn":
        ends = [
            dim * math.log(original_max_positions / (turns * 2 * math.pi)) / (2 * math.log(theta))
            for turns in (beta_fast, beta_slow)
        ]
        first, last = (math.floor(ends[0]), math.ceil(ends[1])) if truncate else ends
        first, last = max(first, 0), min(last, dim - 1)
        divided = ((torch.arange(dim // 2) - first) / (last - first or 0.001)).clamp(0.0, 1.0)
        return plain / factor * divided + plain * (1.0 - divided)
    if kind != "llama3":
        return plain
    turns = original_max_positions * plain / (2 * math.pi)  # full turns over the original context
    blend = ((turns - low_freq_factor) / (high_freq_factor - low_freq_factor)).clamp(0.0, 1.0)
    return plain * blend + plain / factor * (1.0 - blend)


def rope_table(
    positions: int, frequencies: torch.Tensor, *, head_dim: int | None = None, amplitude: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin, fp32 `[positions, head_dim]`, times `amplitude`; the two halves of a row equal.

    Where a head has more elements than `frequencies` rotate, the last of each half stay as they are: 1 and 0.
    """
    if positions < 1:
        raise CapacityError(f"a rope table needs at least one position, got {positions}.")
    angles = torch.outer(torch.arange(positions, dtype=torch.float32, device=frequencies.device), frequencies)
    still = (0, (head_dim or 2 * len(frequencies)) // 2 - len(frequencies))
    cos, sin = F.pad(angles.cos() * amplitude, still, value=1.0), F.pad(angles.sin() * amplitude, still)
    return torch.cat((cos, cos), dim=-1), torch.cat((sin, sin), dim=-1)


def apply_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate `x` [..., head_dim] by `cos`, `sin` (broadcast against it, fp32); computed in fp32, result like `x`."""
    wide = x.float()
    first, second = wide.chunk(2, dim=-1)
    return (wide * cos + torch.cat((-second, first), dim=-1) * sin).to(x.dtype)
