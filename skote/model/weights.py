"""A decoder's weights as the lean decoder reads them: q, k, v in one matrix, gate and up in one matrix."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from skote.model.checkpoint import added_rows, fill_random, load_tensors
from skote.model.fingerprint import fingerprint
from skote.model.layout import file_places, module_places
from skote.model.spec import DecoderSpec

_HUGE_PAGE = 2 << 20
_ALIGNMENT = 64


class LayerWeights(NamedTuple):
    """One layer: matrices are `[rows, columns]` as in `y = W x`, norms and biases are vectors.

    What the spec does not have is None, of the two pre-norms an empty tensor. With experts `gate_up` and
    `down` have one matrix an expert, and `router` one row.
    """

    attn_norm: torch.Tensor
    qkv: torch.Tensor
    o: torch.Tensor
    mlp_norm: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    attn_norm_bias: torch.Tensor | None = None
    qkv_bias: torch.Tensor | None = None
    q_norm: torch.Tensor | None = None
    k_norm: torch.Tensor | None = None
    o_bias: torch.Tensor | None = None
    attn_post_norm: torch.Tensor | None = None
    mlp_norm_bias: torch.Tensor | None = None
    router: torch.Tensor | None = None
    gate_up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None
    mlp_post_norm: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """All of them. With tied embeddings `lm_head` is `embed`, the same storage."""

    embed: torch.Tensor
    layers: tuple[LayerWeights, ...]
    norm: torch.Tensor
    lm_head: torch.Tensor
    norm_bias: torch.Tensor | None = None
    positions: torch.Tensor | None = None

    def fingerprint(self, spec: DecoderSpec) -> str:
        """The fingerprint of the module that these weights are, whatever was fused."""
        return fingerprint(self.named(spec))

    def named(self, spec: DecoderSpec) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors by their names in Transformers' module: views, or copies of what lies here in another order."""
        return ((name, place.get()) for name, place in module_places(spec, self).items())


def tensor_shapes(spec: DecoderSpec) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor of a checkpoint's files, by its name there; a tied lm_head is left out."""
    weights = _allocate(spec, torch.float32, torch.device("meta"))
    return {name: place.shape for name, place in file_places(spec, weights).items()}


def load_weights(
    local_dir: Path, spec: DecoderSpec, *, dtype: torch.dtype, device: torch.device, random_seed: int | None
) -> DecoderWeights:
    """Read the weights, or with `random_seed` draw them (`fill_random`), each tensor straight to its place.

    Raises:
        CheckpointError: as `load_tensors`.
    """
    weights = _allocate(spec, dtype, device)
    if random_seed is None:
        places = file_places(spec, weights)
        shapes = {name: place.shape for name, place in places.items()}
        for name, tensor in load_tensors(local_dir, spec, shapes, dtype=dtype, device=device):
            places[name].put(tensor)
        return weights
    for name, place in module_places(spec, weights).items():
        drawn = place.view if place.as_it_is else torch.empty(place.shape, dtype=dtype, device=device)
        own = len(drawn) - added_rows(spec, name)
        fill_random(drawn[:own], name, random_seed)
        drawn[own:].zero_()
        if not place.as_it_is:
            place.put(drawn)
    return weights


def _allocate(spec: DecoderSpec, dtype: torch.dtype, device: torch.device) -> DecoderWeights:
    arena = _Arena(spec, dtype, device)
    nothing = torch.empty(0, dtype=dtype, device=device)
    absent: dict[str, torch.Tensor] = dict.fromkeys(("attn_norm", "mlp_norm"), nothing)
    layers = tuple(
        LayerWeights(**absent | {part: arena.take(*shape) for part, shape in spec.layer_shapes().items()})
        for _ in range(spec.layers)
    )
    beside = {part: arena.take(*shape) for part, shape in spec.model_shapes().items()}
    return DecoderWeights(layers=layers, **{"lm_head": beside["embed"]} | beside)


class _Arena:
    """One block of memory for all weights, in the order in which a decode step reads them.

    On a Linux CPU the block asks for transparent huge pages: streaming the weights then misses the TLB 512 times less
    often (3 to 6 % of the time per token where this was measured).
    """

    def __init__(self, spec: DecoderSpec, dtype: torch.dtype, device: torch.device) -> None:
        pieces = spec.layers * len(spec.layer_shapes()) + len(spec.model_shapes())
        elements = spec.parameters + _ALIGNMENT * pieces
        huge = device.type == "cpu" and hasattr(mmap, "MADV_HUGEPAGE")
        self._block = self._huge(elements, dtype) if huge else torch.empty(elements, dtype=dtype, device=device)
        self._taken = 0

    @staticmethod
    def _huge(elements: int, dtype: torch.dtype) -> torch.Tensor:
        size = -(-elements * dtype.itemsize // _HUGE_PAGE) * _HUGE_PAGE
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory.madvise(mmap.MADV_HUGEPAGE)
        return torch.frombuffer(memory, dtype=dtype)

    def take(self, *shape: int) -> torch.Tensor:
        """The next free piece of the block, as a tensor of `shape`."""
        size = torch.Size(shape).numel()
        piece = self._block[self._taken : self._taken + size].view(shape)
        self._taken += -(-size // _ALIGNMENT) * _ALIGNMENT
        return piece
