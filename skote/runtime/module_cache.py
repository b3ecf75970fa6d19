"""Keys and values of a Transformers module in tier 2: one row, allocated once, written at a position on the device."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F

DecodeAttention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(q `[1, heads, head_dim]`, keys, values, position int32 `[1]`, table int32 `[1, pages]`) to the shape of `q`."""

PAGE = 256


class ModuleCache:
    """Room for `capacity` positions in each layer that `attend` is called for.

    Between `begin` and `decode` a call is a prompt, attention by SDPA; after it a call is one token at `position`,
    attention by `decode_attention`. Layers are allocated by the first prompt: nobody else knows their shapes.
    `position` is int64 `[1]`.
    """

    def __init__(self, capacity: int, *, device: torch.device, decode_attention: DecodeAttention) -> None:
        self.capacity = capacity
        self.layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.position = torch.zeros(1, dtype=torch.int64, device=device)
        self._table = torch.arange(-(-capacity // PAGE), dtype=torch.int32, device=device)[None]
        self._attention = decode_attention
        self._prompt = True

    @property
    def nbytes(self) -> int:
        """Bytes of all layers."""
        return sum(tensor.nbytes for layer in self.layers.values() for tensor in layer)

    def begin(self) -> None:
        """Expect a prompt, which starts at position 0."""
        self._prompt = True

    def decode(self, position: int) -> None:
        """Expect single tokens, the next one at `position`."""
        self._prompt = False
        self.position.fill_(position)

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float) -> torch.Tensor:
        """Store the new keys and values of a layer; causal attention of the new queries over all of them.

        `q` [1, heads, tokens, head_dim]; `k`, `v` [1, kv_heads, tokens, head_dim]; the sum of values has the shape
        [1, tokens, heads, head_dim].
        """
        if self._prompt:
            if layer not in self.layers:
                self.layers[layer] = (self._empty(k), self._empty(v))
            for cached, new in zip(self.layers[layer], (k, v), strict=True):
                cached[:, : new.shape[2]].copy_(new[0])
            out = F.scaled_dot_product_attention(
                q, k, v, is_causal=True, scale=scaling, enable_gqa=q.shape[1] != k.shape[1]
            )
            return out.transpose(1, 2)
        keys, values = self.layers[layer]
        keys.index_copy_(1, self.position, k[0])
        values.index_copy_(1, self.position, v[0])
        # The kernel scales by 1 / sqrt(head_dim).
        factor = scaling * q.shape[-1] ** 0.5
        rows = q[:, :, 0] if math.isclose(factor, 1.0) else q[:, :, 0] * factor
        attended = self._attention(rows.contiguous(), keys, values, self.position.int(), self._table)
        return attended[:, None]

    def _empty(self, new: torch.Tensor) -> torch.Tensor:
        _, heads, _, dims = new.shape
        return torch.zeros(heads, self._table.shape[1] * PAGE, dims, dtype=new.dtype, device=new.device)


def flash_attention(capacity: int) -> DecodeAttention:
    """Our flash-decoding kernels over at most `capacity` positions, on CUDA."""
    from skote.kernels.flash_decode_triton import Attention, flash_decode

    cut = Attention(page=PAGE)
    splits = -(-capacity // cut.split(capacity))

    def attention(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, position: torch.Tensor, table: torch.Tensor
    ) -> torch.Tensor:
        _, heads, head_dim = q.shape
        out = torch.empty_like(q)
        sums = torch.empty(1, splits, heads, head_dim, device=q.device)
        stats = torch.empty(1, splits, 2, heads, device=q.device)
        # The kernels around these are torch's, which know nothing of programmatic launches.
        flash_decode(q, k, v, position, table, out, sums, stats, positions=capacity, cut=cut, pdl=False)
        return out

    return attention
