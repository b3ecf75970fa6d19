"""E27: decode attention over a paged KV cache, whose block table may say any order of pages."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from skote.contracts.check import Figures, Subject, need_cuda

ROWS, HEADS, KV_HEADS, HEAD_DIM = 3, 8, 2, 64
CONTEXTS = (500, 4000, 20000)
"""Positions that may be in use: one for each of the kernels for short, middle and long contexts."""
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}

Decode = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, int], torch.Tensor]
"""q [rows, heads, head_dim], pools k and v [kv_heads, slots, head_dim], newest position and block table of each row,
and how many positions may be in use: the attention's output, shaped as q."""


def paged_kv(subject: Subject) -> Figures:
    """Three rows of different lengths in one pool, with the pages in order, and with all of them moved.

    `moved_rows_differing`: rows of which a bit changes when their pages are moved and the block table follows.
    `error_fp32`, `error_bf16`: the largest against torch's attention over the unpaged keys in fp32, relative to the
    largest value. `cases`: lengths and dtypes tried.
    """
    need_cuda("paged_kv", subject)
    from skote.kernels.flash_decode_triton import Attention

    cut = Attention()
    with torch.cuda.device(subject.device):
        found = {
            name: [
                paged_figures(_flash_decode, torch.device(subject.device), positions, dtype, cut.page)
                for positions in CONTEXTS
            ]
            for name, dtype in DTYPES.items()
        }
    return {
        "moved_rows_differing": sum(moved for cases in found.values() for moved, _ in cases),
        "cases": sum(map(len, found.values())),
        **{f"error_{name}": max(error for _, error in cases) for name, cases in found.items()},
    }


def paged_figures(
    decode: Decode, device: torch.device, positions: int, dtype: torch.dtype, page: int
) -> tuple[int, float]:
    """Of one case: rows whose bits changed with the pages, and the largest error, as `paged_kv` has them."""
    generator = torch.Generator().manual_seed(0)
    pages = -(-positions // page)
    slots = ROWS * pages * page

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    q, k, v = draw(ROWS, HEADS, HEAD_DIM), draw(KV_HEADS, slots, HEAD_DIM), draw(KV_HEADS, slots, HEAD_DIM)
    newest = torch.tensor([positions - 1, page, 0], dtype=torch.int32, device=device)
    ordered = torch.arange(ROWS * pages, dtype=torch.int32, device=device).view(ROWS, pages)
    table = torch.randperm(ROWS * pages, generator=generator).to(device, torch.int32).view(ROWS, pages)
    moved_k, moved_v = (_moved(pool, table, page) for pool in (k, v))
    out = decode(q, k, v, newest, ordered, positions)
    moved = decode(q, moved_k, moved_v, newest, table, positions)
    expected = _unpaged(q, k, v, newest, pages * page)
    error = float((moved.float() - expected).abs().max() / expected.abs().max())
    return sum(not torch.equal(a, b) for a, b in zip(out, moved, strict=True)), error


def _moved(pool: torch.Tensor, table: torch.Tensor, page: int) -> torch.Tensor:
    """`pool` [kv_heads, slots, head_dim], whose pages are in order, with page p where `table` says that p lies."""
    pages = pool.view(pool.shape[0], -1, page, pool.shape[2])
    moved = torch.empty_like(pages)
    moved[:, table.flatten().long()] = pages
    return moved.view_as(pool)


def _unpaged(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, newest: torch.Tensor, span: int) -> torch.Tensor:
    """Torch's own attention in fp32, row by row, over pools whose rows of `span` slots follow each other."""
    outs = []
    for row, last in enumerate(newest.tolist()):
        keys, values = (
            pool[:, row * span : row * span + last + 1].float().repeat_interleave(HEADS // KV_HEADS, 0)
            for pool in (k, v)
        )
        outs.append(F.scaled_dot_product_attention(q[row].float()[:, None], keys, values)[:, 0])
    return torch.stack(outs)


def _flash_decode(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    newest: torch.Tensor,
    table: torch.Tensor,
    positions: int,
) -> torch.Tensor:
    """The Triton kernels, each in the tile that it has by default."""
    from skote.kernels.flash_decode_triton import Attention, flash_decode

    cut = Attention()
    splits = -(-positions // cut.split(positions))
    sums = torch.empty(ROWS, splits, HEADS, HEAD_DIM, device=q.device)
    stats = torch.empty(ROWS, splits, 2, HEADS, device=q.device)
    out = torch.empty_like(q)
    flash_decode(q, k, v, newest, table, out, sums, stats, positions=positions, cut=cut, pdl=False)
    return out
