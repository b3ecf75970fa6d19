"""The prompt and the distance by which a path is held against Transformers' own module."""

from __future__ import annotations

import torch


def check_ids(vocab: int, capacity: int) -> tuple[list[int], list[int]]:
    """A short random prompt, always the same, and tokens to force after it."""
    new = min(8, capacity)
    prompt = min(16, capacity - new + 1)
    ids: list[int] = torch.randint(vocab, (prompt + new,), generator=torch.Generator().manual_seed(0)).tolist()
    return ids[:prompt], ids[prompt:]


def apart(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest distance of a row of `found` from that of `expected`, both [rows, n], as a share of its norm."""
    return float(((found - expected).norm(dim=-1) / expected.norm(dim=-1)).max())
