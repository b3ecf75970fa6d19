"""A decoder's weights as the lean decoder reads them: q, k, v in one matrix, gate and up in one matrix."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from skote.model.checkpoint import VOCABULARY, fill_random, load_tensors
from skote.model.fingerprint import fingerprint
from skote.model.spec import DecoderSpec

_HUGE_PAGE = 2 << 20
_ALIGNMENT = 64


class LayerWeights(NamedTuple):
    """One layer: matrices are `[rows, columns]` as in `y = W x`, norms are `[hidden]`."""

    attn_norm: torch.Tensor
    qkv: torch.Tensor
    o: torch.Tensor
    mlp_norm: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """All of them. With tied embeddings `lm_head` is `embed`, the same storage."""

    embed: torch.Tensor
    layers: tuple[LayerWeights, ...]
    norm: torch.Tensor
    lm_head: torch.Tensor

    def fingerprint(self, spec: DecoderSpec) -> str:
        """The fingerprint of the checkpoint that these weights came from, whatever was fused."""
        return fingerprint(self.named(spec))

    def named(self, spec: DecoderSpec) -> Iterator[tuple[str, torch.Tensor]]:
        """The checkpoint's tensors by its names, as views."""
        return ((name, view) for name, view in _views(spec, self).items())


def load_weights(
    local_dir: Path, spec: DecoderSpec, *, dtype: torch.dtype, device: torch.device, random_seed: int | None
) -> DecoderWeights:
    """Read the weights, or with `random_seed` draw them (`fill_random`), each tensor straight to its place.

    Raises:
        CheckpointError: as `load_tensors`.
    """
    weights = _allocate(spec, dtype, device)
    places = _views(spec, weights)
    if random_seed is None:
        for name, tensor in load_tensors(local_dir, spec, dtype=dtype):
            places[name].copy_(tensor)
        return weights
    for name, place in places.items():
        own = len(place) - (spec.added_tokens if name in VOCABULARY else 0)
        fill_random(place[:own], name, random_seed)
        place[own:].zero_()
    return weights


def _views(spec: DecoderSpec, weights: DecoderWeights) -> dict[str, torch.Tensor]:
    """Where each tensor of the checkpoint lies in `weights`."""
    q, kv = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    views = {"model.embed_tokens.weight": weights.embed, "model.norm.weight": weights.norm}
    if not spec.tied_embeddings:
        views["lm_head.weight"] = weights.lm_head
    for index, layer in enumerate(weights.layers):
        prefix = f"model.layers.{index}."
        q_rows, k_rows, v_rows = torch.split(layer.qkv, [q, kv, kv])
        gate_rows, up_rows = layer.gate_up.chunk(2)
        views |= {
            f"{prefix}input_layernorm.weight": layer.attn_norm,
            f"{prefix}self_attn.q_proj.weight": q_rows,
            f"{prefix}self_attn.k_proj.weight": k_rows,
            f"{prefix}self_attn.v_proj.weight": v_rows,
            f"{prefix}self_attn.o_proj.weight": layer.o,
            f"{prefix}post_attention_layernorm.weight": layer.mlp_norm,
            f"{prefix}mlp.gate_proj.weight": gate_rows,
            f"{prefix}mlp.up_proj.weight": up_rows,
            f"{prefix}mlp.down_proj.weight": layer.down,
        }
    return views


def _allocate(spec: DecoderSpec, dtype: torch.dtype, device: torch.device) -> DecoderWeights:
    arena = _Arena(spec, dtype, device)
    hidden, heads_dim = spec.hidden, spec.heads * spec.head_dim
    layers = tuple(
        LayerWeights(
            attn_norm=arena.take(hidden),
            qkv=arena.take(spec.qkv_rows, hidden),
            o=arena.take(hidden, heads_dim),
            mlp_norm=arena.take(hidden),
            gate_up=arena.take(2 * spec.intermediate, hidden),
            down=arena.take(hidden, spec.intermediate),
        )
        for _ in range(spec.layers)
    )
    embed = arena.take(spec.vocab, hidden)
    norm = arena.take(hidden)
    lm_head = embed if spec.tied_embeddings else arena.take(spec.vocab, hidden)
    return DecoderWeights(embed=embed, layers=layers, norm=norm, lm_head=lm_head)


class _Arena:
    """One block of memory for all weights, in the order in which a decode step reads them.

    On a Linux CPU the block asks for transparent huge pages: streaming the weights then misses the TLB 512 times less
    often (3 to 6 % of the time per token where this was measured).
    """

    def __init__(self, spec: DecoderSpec, dtype: torch.dtype, device: torch.device) -> None:
        elements = spec.parameters + _ALIGNMENT * len(spec.tensor_shapes())
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
