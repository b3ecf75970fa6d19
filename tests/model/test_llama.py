"""config.json of the Llama family, old and new style, to a spec."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from skote.model.adapters import load_spec, spec_of
from skote.model.spec import RopeSpec
from skote.types import CheckpointError

LLAMA31_8B = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "eos_token_id": [128001, 128008, 128009],
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}


def without(*keys: str) -> dict[str, Any]:
    return {key: value for key, value in LLAMA31_8B.items() if key not in keys}


def test_llama_31_8b() -> None:
    spec = spec_of(LLAMA31_8B)

    assert spec.parameters == 8_030_261_248  # what its model card counts
    assert spec.head_dim == 128
    assert spec.eos_ids == (128001, 128008, 128009)
    assert spec.rope == RopeSpec(500000.0, "llama3", 8.0, 1.0, 4.0, 8192)


def test_new_and_old_style_of_the_rope_are_the_same_model() -> None:
    new = without("rope_theta", "rope_scaling") | {
        "rope_parameters": LLAMA31_8B["rope_scaling"] | {"rope_theta": 500000.0}
    }

    assert spec_of(new) == spec_of(LLAMA31_8B)


@pytest.mark.parametrize(
    ("config", "rope"),
    [
        (without("rope_scaling"), RopeSpec(500000.0, original_max_positions=131072)),
        (without("rope_scaling", "rope_theta"), RopeSpec(10000.0, original_max_positions=131072)),
        (LLAMA31_8B | {"rope_scaling": None}, RopeSpec(500000.0, original_max_positions=131072)),
        (
            LLAMA31_8B | {"rope_scaling": {"type": "linear", "factor": 2.0}},  # the oldest spelling of the type
            RopeSpec(500000.0, "linear", 2.0, original_max_positions=131072),
        ),
    ],
)
def test_rope_without_scaling_and_with_old_names(config: dict[str, Any], rope: RopeSpec) -> None:
    assert spec_of(config).rope == rope


def test_defaults_of_what_a_config_may_leave_out() -> None:
    spec = spec_of(without("num_key_value_heads", "eos_token_id", "tie_word_embeddings", "hidden_act"))

    assert (spec.kv_heads, spec.eos_ids, spec.tied_embeddings) == (32, (), False)


def test_a_head_dim_of_its_own() -> None:
    assert spec_of(LLAMA31_8B | {"head_dim": 64}).head_dim == 64


@pytest.mark.parametrize("key", ["vocab_size", "hidden_size", "num_hidden_layers", "rms_norm_eps"])
def test_a_key_that_is_missing_is_named(key: str) -> None:
    with pytest.raises(CheckpointError, match=f"lacks '{key}'"):
        spec_of(without(key))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"model_type": "qwen9"}, "model_type 'qwen9' has no adapter"),
        ({"hidden_act": "tanh"}, "its activation is 'tanh'"),
        ({"rope_scaling": {"rope_type": "mrope"}}, "rope type 'mrope'"),
        ({"quantization_config": {"quant_method": "gptq"}}, "its weights are quantised"),
        ({"rope_scaling": "linear"}, "wrong type"),
        ({"vocab_size": "many"}, "wrong type"),
        ({"hidden_size": [1]}, "wrong type"),
        ({"num_attention_heads": 0, "head_dim": 128}, "heads=0"),
        ({"num_key_value_heads": 5}, "cannot share 5"),
    ],
)
def test_what_the_decoder_does_not_compute_is_refused(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(CheckpointError, match=sentence):
        spec_of(LLAMA31_8B | changes)


def write(directory: Path, generation: dict[str, Any] | None) -> Path:
    (directory / "config.json").write_text(json.dumps(LLAMA31_8B))
    if generation is not None:
        (directory / "generation_config.json").write_text(json.dumps(generation))
    return directory


@pytest.mark.parametrize(
    ("generation", "eos_ids"),
    [
        (None, (128001, 128008, 128009)),
        ({"eos_token_id": 7}, (7,)),
        ({"eos_token_id": [7, 8]}, (7, 8)),
        ({"eos_token_id": None}, ()),
        ({}, ()),  # Transformers does not look further either
    ],
)
def test_the_generation_config_decides_what_ends_a_text(
    tmp_path: Path, generation: dict[str, Any] | None, eos_ids: tuple[int, ...]
) -> None:
    assert load_spec(write(tmp_path, generation)).eos_ids == eos_ids


@pytest.mark.parametrize("layers", [0, -1, 33])
def test_layers_beyond_the_model(tmp_path: Path, layers: int) -> None:
    with pytest.raises(CheckpointError, match=f"between 1 and 32, got {layers}"):
        load_spec(write(tmp_path, None), layers)


def test_layers_cut(tmp_path: Path) -> None:
    assert load_spec(write(tmp_path, None), 2).layers == 2


def test_the_spec_of_a_config_that_transformers_wrote(make_checkpoint: Callable[..., Path]) -> None:
    spec = load_spec(make_checkpoint())

    assert (spec.vocab, spec.hidden, spec.heads, spec.kv_heads, spec.head_dim) == (96, 48, 6, 2, 8)
    assert (spec.rope.theta, spec.rope.kind, spec.norm_eps, spec.eos_ids) == (10000.0, "default", 1e-5, (2,))
