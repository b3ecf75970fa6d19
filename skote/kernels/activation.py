"""The feed-forward's elementwise half: act(x), or act(gate) * up (Shazeer, arXiv 2002.05202)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F


def relu2(x: torch.Tensor) -> torch.Tensor:
    """max(x, 0)^2 (So et al., arXiv 2109.08668)."""
    return F.relu(x).square()


ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "relu2": relu2,
}


def activated(x: torch.Tensor, name: str, *, gated: bool) -> torch.Tensor:
    """The activation `name` of `x`; where `gated`, of its first half, times the second: [..., n] or [..., n / 2]."""
    activation = ACTIVATIONS[name]
    if not gated:
        return activation(x)
    gate, up = x.chunk(2, dim=-1)
    return activation(gate) * up
