"""SwiGLU's elementwise half: silu(gate) * up (Shazeer, arXiv 2002.05202)."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """`gate_up` [..., 2 * intermediate], gate first: `[..., intermediate]`."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up
