"""The KV cache of the CUDA closure: one pool of slots a layer, cut into pages that a block table hands to rows."""

from __future__ import annotations

import torch

from skote.model.spec import DecoderSpec

Pool = tuple[torch.Tensor, torch.Tensor]
"""Keys and values of one layer, `[kv_heads, slots, head_dim]` each, in the weights' dtype."""


class PagedCache:
    """Room for `rows` rows of `capacity` positions each, allocated once.

    Position p of row r lies in slot `table[r, p // page] * page + p % page` of every layer. `table` is int32
    `[rows, pages]`; as made here, a row's pages follow each other, which `of_row` relies on. `granule` is a multiple of
    `page` that a row's slots are rounded up to.
    """

    def __init__(
        self,
        spec: DecoderSpec,
        rows: int,
        capacity: int,
        *,
        page: int,
        granule: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.rows = rows
        self.capacity = capacity
        self.page = page
        self.span = -(-capacity // granule) * granule
        shape = (spec.kv_heads, rows * self.span, spec.head_dim)
        self.layers: list[Pool] = [
            (torch.zeros(shape, dtype=dtype, device=device), torch.zeros(shape, dtype=dtype, device=device))
            for _ in range(spec.layers)
        ]
        self.table = torch.arange(rows * self.span // page, dtype=torch.int32, device=device).view(rows, -1)

    @property
    def nbytes(self) -> int:
        """Bytes of all pools."""
        return sum(pool.nbytes for layer in self.layers for pool in layer)

    def of_row(self, pool: torch.Tensor, row: int, length: int) -> torch.Tensor:
        """The first `length` positions of a row: a view `[kv_heads, length, head_dim]` of `pool`."""
        return pool[:, row * self.span : row * self.span + length]
