"""Between two projections of many rows: the residual add and the next RMSNorm, in one pass over each row.

x += sum over p of delta[p], in their order;   with a post norm, x += that sum / sqrt(mean(sum^2) + eps) * post
out = x / sqrt(mean(x^2) + eps) * norm, rounded once to the weights' dtype
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from skote.kernels.launch import (
    check_columns,
    check_dtype,
    check_float,
    check_norm,
    check_rank,
    check_shape,
    check_tensors,
    padded,
)
from skote.kernels.rms_norm import rms_norm_reference
from skote.kernels.rms_norm_triton import launch_shape


def add_rms_norm_reference(
    x: torch.Tensor,
    delta: torch.Tensor | None,
    norm: torch.Tensor,
    out: torch.Tensor,
    *,
    eps: float,
    post: torch.Tensor | None = None,
) -> None:
    """The same in framework ops; arguments as `add_rms_norm`."""
    if delta is not None and post is not None:
        x += rms_norm_reference(delta.float().view(-1, *x.shape).sum(0), post, eps)
    elif delta is not None:
        for part in delta.view(-1, *x.shape):
            x += part.float()
    out.copy_(rms_norm_reference(x, norm, eps))


@triton.jit
def add_rms_norm_kernel(
    x_ptr,
    delta_ptr,  # [PARTS, rows, hidden]
    norm_ptr,
    out_ptr,
    hidden,
    eps,
    BLOCK: tl.constexpr,  # a power of two, at least `hidden`
    PARTS: tl.constexpr,  # 0: delta is not read
    PDL: tl.constexpr,
    post_ptr=None,
):
    """Grid: (rows,). One program a row, the whole row in registers. Before the wait: the norm's weights."""
    if PDL:
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64) * hidden
    columns = tl.arange(0, BLOCK)
    inside = columns < hidden
    norm = tl.load(norm_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    if PDL:
        gdc_wait()
    x = tl.load(x_ptr + row + columns, mask=inside, other=0.0, eviction_policy="evict_last")
    if post_ptr is None:
        for part in tl.static_range(PARTS):
            places = delta_ptr + (part * tl.num_programs(0) * hidden + row + columns)
            x += tl.load(places, mask=inside, other=0.0, eviction_policy="evict_last").to(tl.float32)
    else:
        post = tl.load(post_ptr + columns, mask=inside, other=0.0).to(tl.float32)
        total = tl.zeros([BLOCK], tl.float32)
        for part in tl.static_range(PARTS):
            places = delta_ptr + (part * tl.num_programs(0) * hidden + row + columns)
            total += tl.load(places, mask=inside, other=0.0, eviction_policy="evict_last").to(tl.float32)
        x += total * tl.rsqrt(tl.sum(total * total, axis=0) / hidden + eps) * post
    if PARTS > 0:
        tl.store(x_ptr + row + columns, x, mask=inside)
    scale = tl.rsqrt(tl.sum(x * x, axis=0) / hidden + eps)
    tl.store(out_ptr + row + columns, (x * scale * norm).to(out_ptr.dtype.element_ty), mask=inside)


def add_rms_norm(
    x: torch.Tensor,
    delta: torch.Tensor | None,
    norm: torch.Tensor,
    out: torch.Tensor,
    *,
    eps: float,
    pdl: bool,
    post: torch.Tensor | None = None,
) -> None:
    """Launch the kernel.

    Args:
        x: `[rows, hidden]`, fp32, in place; `hidden` is at most `MAX_COLUMNS`.
        delta: `[rows, hidden]` or `[parts, rows, hidden]`, in any float dtype, or None: nothing is added.
        norm: `[hidden]`, in any float dtype.
        out: `[rows, hidden]`, in any float dtype, written; it may be `delta`.
        pdl: let the next kernel start early; it has to wait before what it reads.
        post: `[hidden]`, the norm of `delta` where it has one.

    Raises:
        TypeError, ValueError: what the checks of `launch` refuse, or a delta of another shape.
    """
    check_tensors("add_rms_norm", x=x, norm=norm, out=out, delta=x if delta is None else delta)
    check_rank("add_rms_norm", 2, x=x)
    rows, hidden = x.shape
    check_columns("add_rms_norm", hidden)
    check_dtype("add_rms_norm", torch.float32, x=x)
    check_norm("add_rms_norm", hidden, norm=norm)
    if post is not None:
        check_tensors("add_rms_norm", x=x, post=post)
        check_norm("add_rms_norm", hidden, post=post)
    check_float("add_rms_norm", out=out, delta=x if delta is None else delta)
    check_shape("add_rms_norm", (rows, hidden), out=out)
    if delta is not None and (delta.ndim not in (2, 3) or delta.shape[-2:] != x.shape):
        raise ValueError(
            f"add_rms_norm: delta has shape {tuple(delta.shape)}, expected {(rows, hidden)}, or several of them."
        )
    parts = 0 if delta is None else 1 if delta.ndim == 2 else delta.shape[0]
    add_rms_norm_kernel[(rows,)](
        x,
        x if delta is None else delta,
        norm,
        out,
        hidden,
        eps,
        BLOCK=padded(hidden),
        PARTS=parts,
        PDL=pdl,
        post_ptr=None if delta is None else post,
        num_warps=launch_shape(hidden)[1],
        launch_pdl=pdl,
    )
