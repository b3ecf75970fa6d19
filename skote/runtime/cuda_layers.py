"""A decoder's layers as the kernels on CUDA take them: what differs from layer to layer, side by side."""

from __future__ import annotations

from typing import NamedTuple

import torch

from skote.model.decoder import Decoder
from skote.model.weights import LayerWeights
from skote.runtime.paged_cache import PagedCache, Pool
from skote.runtime.step_state import StepState


class CudaLayer(NamedTuple):
    """One layer: its weights, its part of the cache, cos and sin `[positions, head_dim]`, and its window, if any."""

    weights: LayerWeights
    pool: Pool
    rope: tuple[torch.Tensor, torch.Tensor]
    window: int | None


def cuda_layers(decoder: Decoder, cache: PagedCache, state: StepState) -> list[CudaLayer]:
    """All of them, in their order."""
    parts = zip(decoder.weights.layers, cache.layers, state.ropes, decoder.spec.layer_windows, strict=True)
    return [CudaLayer(*each) for each in parts]
