"""RMSNorm: y = x / sqrt(mean(x^2) + eps) * weight, over the last dimension (Zhang and Sennrich, arXiv 1910.07467).

The mean and the division are computed in fp32 and the product is rounded once to the input's dtype. The Triton kernel
lives in `rms_norm_triton`, so that a machine without Triton can import the reference.
"""

from __future__ import annotations

from collections import Counter

import torch

Paths = Counter[tuple[str, str]]
"""How often each op ran on each path: (op, path) -> calls. The paths are `triton`, `reference` and `compiled`."""


def rms_norm_reference(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """The formula in framework ops: `x` [..., hidden] and `weight` [hidden] of any float dtype; result like `x`."""
    wide = x.float()
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (wide * scale * weight.float()).to(x.dtype)


def layer_norm_reference(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float) -> torch.Tensor:
    """LayerNorm, y = (x - mean) / sqrt(var + eps) * weight + bias (Ba et al., arXiv 1607.06450), in fp32; like `x`."""
    wide = x.float()
    centred = wide - wide.mean(-1, keepdim=True)
    scale = torch.rsqrt(centred.pow(2).mean(-1, keepdim=True) + eps)
    normed = centred * scale * weight.float()
    return (normed if bias is None else normed + bias.float()).to(x.dtype)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, paths: Paths) -> torch.Tensor:
    """RMSNorm by the Triton kernel on CUDA, by the reference on every other backend; counts the choice in `paths`.

    Raises:
        TypeError, ValueError: on CUDA, what the kernel's launcher refuses (see `rms_norm_triton`).
    """
    if x.device.type == "cuda":
        from skote.kernels.rms_norm_triton import rms_norm_triton

        paths["rms_norm", "triton"] += 1
        return rms_norm_triton(x, weight, eps)
    paths["rms_norm", "reference"] += 1
    return rms_norm_reference(x, weight, eps)
