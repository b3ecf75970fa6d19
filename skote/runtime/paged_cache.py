"""The KV cache of the CUDA closure: one pool of slots a layer, cut into pages that a block table hands to rows."""

from __future__ import annotations

import torch

from skote.model.spec import DecoderSpec

Pool = tuple[torch.Tensor, torch.Tensor]
"""Keys and values of one layer, `[kv_heads, slots, head_dim]` each, in the weights' dtype."""


class PagedCache:
    """`pages` pages of `page` positions, allocated once, for rows of up to `capacity` positions.

    Position p of a row lies in slot `table[p // page] * page + p % page` of every layer, `table` being the row's pages.

    Attributes:
        pages_per_row: those of the longest row.
        span: their positions, `capacity` or a few more.
    """

    def __init__(
        self,
        spec: DecoderSpec,
        pages: int,
        capacity: int,
        *,
        page: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.pages = pages
        self.capacity = capacity
        self.page = page
        self.pages_per_row = -(-capacity // page)
        self.span = self.pages_per_row * page
        shape = (spec.kv_heads, pages * page, spec.head_dim)
        self.layers: list[Pool] = [
            (torch.zeros(shape, dtype=dtype, device=device), torch.zeros(shape, dtype=dtype, device=device))
            for _ in range(spec.layers)
        ]

    @property
    def nbytes(self) -> int:
        """Bytes of all pools."""
        return sum(pool.nbytes for layer in self.layers for pool in layer)

    def gathered(self, pool: torch.Tensor, pages: torch.Tensor) -> torch.Tensor:
        """The positions of `pages` (int64 `[n]`), in their order: a copy `[kv_heads, n * page, head_dim]`."""
        heads, _, head_dim = pool.shape
        return pool.view(heads, self.pages, self.page, head_dim).index_select(1, pages).flatten(1, 2)
