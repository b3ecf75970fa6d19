"""The decode step of one row, in the form that can be replayed: on CPUs a graph compiled once, used for every layer.

The compiler turns each matrix-vector product into one pass over the weights. All layers share one graph with their
weights as arguments: a whole-model graph would be a tenth faster and take minutes to compile.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch._dynamo.exc import BackendCompilerFailed, FailOnRecompileLimitHit
from torch._inductor.exc import InductorError

from skote.kernels.attention import decode_attention
from skote.kernels.linear import matvec
from skote.kernels.rms_norm import rms_norm_reference
from skote.model.decoder import Decoder, LayerCache, Ops, head_forward, layer_forward
from skote.model.weights import LayerWeights
from skote.runtime.cache import StaticCache


class DecodeStep:
    """token id, position -> logits, for a cache of one row. Compiled where that works; else plain ops, with a note."""

    def __init__(self, decoder: Decoder, cache: StaticCache, *, compiled: bool) -> None:
        self._decoder = decoder
        self._cache = cache
        self._no_padding = torch.zeros(1, cache.capacity, device=decoder.device)
        self.compile_s: float | None = None
        self.notes: list[str] = []
        spec, eps = decoder.spec, decoder.spec.norm_eps

        def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            return rms_norm_reference(x, weight, eps)

        ops = Ops(norm=norm, linear=matvec, attention=decode_attention)

        def layer(
            x: torch.Tensor,
            weights: LayerWeights,
            cache: LayerCache,
            cos: torch.Tensor,
            sin: torch.Tensor,
            key_mask: torch.Tensor,
        ) -> torch.Tensor:
            return layer_forward(x, weights, cache, cos, sin, key_mask, spec, ops)

        def head(x: torch.Tensor, norm: torch.Tensor, lm_head: torch.Tensor) -> torch.Tensor:
            return head_forward(x, norm, lm_head, ops)

        self._layer = torch.compile(layer, fullgraph=True)
        self._head = torch.compile(head, fullgraph=True)
        self.compiled = compiled and self._try_to_compile()

    def __call__(self, token: int, position: int, cache: StaticCache | None = None) -> torch.Tensor:
        """Feed `token` at `position`; logits `[1, vocab]` for the one after it. Another `cache` has the same shape."""
        layers = (cache or self._cache).layers
        if not self.compiled:
            return self._plain(token, position, layers)
        decoder = self._decoder
        key_mask = self._no_padding[:, : position + 1]
        torch._dynamo.maybe_mark_dynamic(key_mask, 1)
        cos, sin = decoder.rope(torch.tensor([[position]]))
        x = decoder.weights.embed[token].view(1, 1, -1).float()
        for weights, layer_cache in zip(decoder.weights.layers, layers, strict=True):
            x = self._layer(x, weights, layer_cache, cos, sin, key_mask)
        decoder.paths["rms_norm", "compiled"] += 2 * decoder.spec.layers + 1
        return self._head(x, decoder.weights.norm, decoder.weights.lm_head)

    def _plain(self, token: int, position: int, layers: Sequence[LayerCache]) -> torch.Tensor:
        device = self._decoder.device
        return self._decoder.forward(
            torch.tensor([[token]], device=device),
            layers,
            self._no_padding[:, : position + 1],
            torch.tensor([[position]], device=device),
        )

    def _try_to_compile(self) -> bool:
        started = time.monotonic()
        self.compiled = True
        try:
            # The compiler may want another graph for long reductions: the last position brings that one about now.
            last = self._cache.capacity - 1
            for position in (1, 2, 3, last):
                self(0, min(position, last))
        except (BackendCompilerFailed, InductorError, FailOnRecompileLimitHit) as error:
            reason = str(error).strip().splitlines()[0]
            self.notes.append(f"The decode step runs on plain ops: it could not be compiled ({reason}).")
            return False
        self.compile_s = time.monotonic() - started
        return True
