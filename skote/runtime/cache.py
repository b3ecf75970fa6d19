"""The static KV cache: one allocation, made once, as long as the longest request may become."""

from __future__ import annotations

import torch

from skote.model.decoder import LayerCache
from skote.model.spec import DecoderSpec


class StaticCache:
    """Keys and values of `batch` rows and up to `capacity` positions, for every layer.

    Position p of a row is overwritten by whichever request is there; a request reads no further than it has written,
    so that nothing has to be cleared between requests.
    """

    def __init__(
        self, spec: DecoderSpec, batch: int, capacity: int, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.batch = batch
        self.capacity = capacity
        # One slot more than can be used: a slice of the cache is then never the whole of it, which keeps a compiled
        # step from specialising on the last length.
        shape = (batch, spec.kv_heads, capacity + 1, spec.head_dim)
        self.layers: list[LayerCache] = [
            (torch.zeros(shape, dtype=dtype, device=device), torch.zeros(shape, dtype=dtype, device=device))
            for _ in range(spec.layers)
        ]
