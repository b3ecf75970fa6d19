"""Fused weights: every tensor lies where the layout says, and the fingerprint is the checkpoint's own."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from skote.model.adapters import load_spec
from skote.model.fingerprint import fingerprint
from skote.model.weights import DecoderWeights, load_weights


def load(directory: Path, pad_id: int = 0, dtype: torch.dtype = torch.float32) -> DecoderWeights:
    spec = load_spec(directory).with_token(pad_id)
    return load_weights(directory, spec, dtype=dtype, device=torch.device("cpu"), random_seed=None)


@pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": True}, {"head_dim": 16}, {"num_key_value_heads": 6}])
def test_projections_are_fused_in_order(make_checkpoint: Callable[..., Path], changes: dict[str, Any]) -> None:
    directory = make_checkpoint(**changes)
    saved, weights = load_file(directory / "model.safetensors"), load(directory)

    for index, layer in enumerate(weights.layers):
        prefix = f"model.layers.{index}."
        q, k, v = (saved[f"{prefix}self_attn.{name}_proj.weight"] for name in "qkv")
        assert layer.qkv.equal(torch.cat((q, k, v)))
        assert layer.o.equal(saved[f"{prefix}self_attn.o_proj.weight"])
        assert layer.gate_up.equal(torch.cat([saved[f"{prefix}mlp.{name}_proj.weight"] for name in ("gate", "up")]))
        assert layer.down.equal(saved[f"{prefix}mlp.down_proj.weight"])
        assert layer.attn_norm.equal(saved[f"{prefix}input_layernorm.weight"])
        assert layer.mlp_norm.equal(saved[f"{prefix}post_attention_layernorm.weight"])
    assert len(weights.layers) == 2
    assert weights.embed.equal(saved["model.embed_tokens.weight"])
    assert weights.norm.equal(saved["model.norm.weight"])
    assert weights.lm_head.equal(saved.get("lm_head.weight", saved["model.embed_tokens.weight"]))


def test_a_tied_head_is_the_same_memory_and_an_untied_one_is_not(make_checkpoint: Callable[..., Path]) -> None:
    tied, untied = load(make_checkpoint(tie_word_embeddings=True)), load(make_checkpoint())

    assert tied.lm_head.data_ptr() == tied.embed.data_ptr()
    assert untied.lm_head.data_ptr() != untied.embed.data_ptr()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": True}])
def test_the_fingerprint_is_that_of_the_unfused_tensors(
    make_checkpoint: Callable[..., Path], changes: dict[str, Any], dtype: torch.dtype
) -> None:
    directory = make_checkpoint(**changes)
    saved = {name: tensor.to(dtype) for name, tensor in load_file(directory / "model.safetensors").items()}

    assert load(directory, dtype=dtype).fingerprint(load_spec(directory)) == fingerprint(saved.items())


def test_pieces_are_aligned_and_do_not_overlap(make_checkpoint: Callable[..., Path]) -> None:
    weights = load(make_checkpoint(), pad_id=96)
    pieces = [
        *(piece for layer in weights.layers for piece in layer if piece is not None),
        weights.embed,
        weights.norm,
        weights.lm_head,
    ]
    extents = sorted((piece.data_ptr(), piece.data_ptr() + piece.numel() * 4) for piece in pieces)

    assert all(start % 64 == 0 for start, _ in extents)
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(extents))
