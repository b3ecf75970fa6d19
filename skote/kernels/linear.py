"""y = W x: a matrix of weights `[rows, columns]` times one activation row, or many.

One row streams the weights once, so it is written as the reduction that a compiler turns into exactly that (oneDNN's
and MKL's matrix products reach a third of the memory's bandwidth there). Many rows are a matrix product.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F


def matvec(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """`x` [1, 1, columns] times `weight` [rows, columns], accumulated in fp32: fp32 `[1, 1, rows]`. To be compiled."""
    return (weight.float() * x.view(-1).float()).sum(-1).view(1, 1, -1)


def matmul(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """`x` [batch, tokens, columns] times `weight` [rows, columns]: `[batch, tokens, rows]`, fp32.

    `x` is rounded to the weights' dtype first.
    """
    return F.linear(x.to(weight.dtype), weight).float()


def matmul_onednn(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The same by oneDNN, for fp32 on CPUs: torch sends fp32 to MKL, which is half as fast on processors not Intel's.

    The operator is the one that Inductor emits for a linear layer; it reads the weights where they are.
    """
    product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")
    return product


def onednn_available(weight: torch.Tensor) -> bool:
    """Whether `matmul_onednn` takes `weight`: fp32 on a CPU, in a build of torch with oneDNN."""
    return (
        weight.device.type == "cpu"
        and weight.dtype == torch.float32
        and bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )
