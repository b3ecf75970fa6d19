"""What the residual stream still lacks where a norm stands between a projection and the sum (Gemma 2, GLM-4).

    x += delta / sqrt(mean(delta^2) + eps) * norm

The whole of delta is needed before any of it can be added: so the matrix-vector kernel that reads x next does it, each
program for itself, and the first one leaves the sum in another place than x, which the others still read.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, assignment"

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from skote.kernels.launch import check_dtype, check_norm, check_shape, check_tensors
from skote.kernels.rms_norm import rms_norm_reference
from skote.kernels.row_dot_triton import norm_chunks, row_chunks


class Owed(NamedTuple):
    """`delta` [hidden], fp32, and its `norm` [hidden]; the sum is written to `kept` [hidden], fp32."""

    delta: torch.Tensor
    norm: torch.Tensor
    kept: torch.Tensor


@triton.jit
def paid_row(x, owed_ptr, post_ptr, kept_ptr, eps, columns, inside, HIDDEN: tl.constexpr):
    """`x`, a whole row, after what is owed to it. Belongs after the wait."""
    owed = tl.load(owed_ptr + columns, mask=inside, other=0.0, eviction_policy="evict_last")
    post = tl.load(post_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    x += owed * tl.rsqrt(tl.sum(owed * owed, axis=0) / HIDDEN + eps) * post
    tl.store(kept_ptr + columns, x, mask=inside & (tl.program_id(0) == 0))
    return x


@triton.jit
def paid_chunks(x, owed_ptr, post_ptr, kept_ptr, eps, COLUMNS: tl.constexpr, CHUNK: tl.constexpr):
    """The same of `x` in chunks (see `row_dot_triton`)."""
    owed = row_chunks(owed_ptr, COLUMNS, CHUNK)
    post = norm_chunks(post_ptr, COLUMNS, CHUNK)
    squares = tl.zeros_like(owed[0])
    for chunk in tl.static_range(len(owed)):
        squares += owed[chunk] * owed[chunk]
    scale = tl.rsqrt(tl.sum(squares, axis=0) / COLUMNS + eps)
    columns = tl.arange(0, CHUNK)
    paid = ()
    for chunk in tl.static_range(len(owed)):
        now = x[chunk] + owed[chunk] * scale * post[chunk].to(tl.float32)
        inside = (columns < COLUMNS - chunk * CHUNK) & (tl.program_id(0) == 0)
        tl.store(kept_ptr + columns + chunk * CHUNK, now, mask=inside)
        paid += (now,)
    return paid


def paid(x: torch.Tensor, owed: Owed | None, eps: float) -> torch.Tensor:
    """The formula in framework ops: `x` after what is `owed` to it, if anything, which is left in `owed.kept`."""
    if owed is None:
        return x
    return owed.kept.copy_(x + rms_norm_reference(owed.delta, owed.norm, eps))


def owed_arguments(op: str, owed: Owed | None, x: torch.Tensor) -> dict[str, torch.Tensor]:
    """The arguments of the kernel `op` for what is `owed` to `x`.

    Raises:
        TypeError, ValueError: what the checks of `launch` refuse, or a sum to be kept in `x`.
    """
    if owed is None:
        return {}
    check_tensors(op, x=x, owed=owed.delta, post_norm=owed.norm, kept=owed.kept)
    check_dtype(op, torch.float32, owed=owed.delta, kept=owed.kept)
    check_shape(op, tuple(x.shape), owed=owed.delta, kept=owed.kept)
    check_norm(op, x.shape[0], post_norm=owed.norm)
    if owed.kept.data_ptr() == x.data_ptr():
        raise ValueError(f"{op}: kept is x, which other programs still read; keep the sum in another tensor.")
    return {"owed_ptr": owed.delta, "post_ptr": owed.norm, "kept_ptr": owed.kept}
