"""The decode step of one row, in the form that can be replayed: on CPUs a graph compiled once, used for every layer.

The compiler turns each matrix-vector product into one pass over the weights. All layers share one graph with their
weights as arguments: a whole-model graph would be a tenth faster and take minutes to compile.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial

import torch
from torch._dynamo.exc import BackendCompilerFailed, FailOnRecompileLimitHit
from torch._inductor.exc import InductorError

from skote.kernels.attention import decode_attention
from skote.kernels.experts import one_row_experts
from skote.kernels.linear import matvec
from skote.kernels.rms_norm import rms_norm_reference
from skote.model.decoder import Decoder, LayerCache, Ops, head_forward, layer_forward, norm_op
from skote.model.weights import LayerWeights
from skote.runtime.cache import StaticCache


class DecodeStep:
    """token id, position -> logits, for a cache of one row. Compiled where that works; else plain ops, with a note."""

    def __init__(self, decoder: Decoder, cache: StaticCache, *, compiled: bool) -> None:
        self._decoder = decoder
        self._cache = cache
        self._no_padding = torch.zeros(1, cache.capacity, device=decoder.device)
        self._norms = decoder.spec.layers * sum(part.endswith("norm") for part in decoder.spec.layer_shapes()) + 1
        self.compile_s: float | None = None
        self.notes: list[str] = []
        # What a layer sees of the cache is in its mask, so that layers with and without a window share a graph.
        self._windowed = {
            window: torch.zeros(1, cache.capacity, device=decoder.device)
            for window in decoder.spec.layer_windows
            if window is not None
        }
        spec, eps = decoder.spec, decoder.spec.norm_eps
        ops = Ops(
            norm=norm_op(spec, lambda x, weight: rms_norm_reference(x, weight, eps)),
            linear=matvec,
            attention=partial(decode_attention, scale=spec.attention_scale, softcap=spec.attention_softcap),
            experts=one_row_experts,
        )

        def layer(
            x: torch.Tensor,
            weights: LayerWeights,
            cache: LayerCache,
            cos: torch.Tensor,
            sin: torch.Tensor,
            key_mask: torch.Tensor,
        ) -> torch.Tensor:
            return layer_forward(x, weights, cache, cos, sin, key_mask, spec, ops)

        def head(
            x: torch.Tensor, norm: torch.Tensor, norm_bias: torch.Tensor | None, lm_head: torch.Tensor
        ) -> torch.Tensor:
            return head_forward(x, norm, norm_bias, lm_head, spec, ops)

        self._layer = torch.compile(layer, fullgraph=True)
        self._head = torch.compile(head, fullgraph=True)
        self.compiled = compiled and self._try_to_compile()

    def __call__(self, token: int, position: int, cache: StaticCache | None = None) -> torch.Tensor:
        """Feed `token` at `position`; logits `[1, vocab]` for the one after it. Another `cache` has the same shape."""
        layers = (cache or self._cache).layers
        if not self.compiled:
            return self._plain(token, position, layers)
        decoder, weights = self._decoder, self._decoder.weights
        masks = self._masks(position + 1)
        place = torch.tensor([[position]])
        x = decoder.embed(torch.tensor([[token]]), place)
        for layer, layer_cache, (cos, sin), mask in zip(
            weights.layers, layers, decoder.rotations(place), masks, strict=True
        ):
            x = self._layer(x, layer, layer_cache, cos, sin, mask)
        decoder.paths["layer_norm" if decoder.spec.layer_norm else "rms_norm", "compiled"] += self._norms
        return self._head(x, weights.norm, weights.norm_bias, weights.lm_head)

    def _masks(self, length: int) -> list[torch.Tensor]:
        """What each layer sees of `length` positions, the newest last."""
        seen: dict[int | None, torch.Tensor] = {None: self._no_padding[:, :length]}
        for window, mask in self._windowed.items():
            hidden = max(length - window, 0)
            mask[:, :hidden] = -torch.inf
            mask[:, hidden:length] = 0.0
            seen[window] = mask[:, :length]
        for mask in seen.values():
            torch._dynamo.maybe_mark_dynamic(mask, 1)
        return [seen[window] for window in self._decoder.spec.layer_windows]

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
