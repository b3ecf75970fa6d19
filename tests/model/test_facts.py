"""Sizes and limits of models with and without an adapter, by hand."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from skote.model.adapters import load_spec
from skote.model.facts import ModuleFacts, load_facts
from skote.types import CheckpointError

SEED_OSS = {
    "model_type": "seed_oss",
    "vocab_size": 100,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "eos_token_id": 9,
}
# q and o 24 x 24, k and v 12 x 24, with biases of q, k and v; gate, up and down 40 x 24; two norms.
LAYER = 2 * 24 * 24 + 2 * 12 * 24 + 24 + 12 + 12 + 3 * 40 * 24 + 2 * 24
TABLE = 100 * 24


def facts(directory: Path, layers: int | None = None, **changes: Any) -> ModuleFacts:
    (directory / "config.json").write_text(json.dumps(SEED_OSS | changes))
    found = load_facts(directory, layers)
    assert isinstance(found, ModuleFacts)
    return found


def test_sizes_by_hand(tmp_path: Path) -> None:
    found = facts(tmp_path)

    assert found == ModuleFacts(
        refusal="model_type 'seed_oss' has no adapter in skote.model.families",
        vocab=100,
        max_positions=64,
        eos_ids=(9,),
        parameters=2 * TABLE + 3 * LAYER + 24,
        read_parameters=TABLE + 3 * LAYER + 24,  # of the input's table one row, which is not counted
        kv_values=2 * 3 * 2 * 6,
    )
    assert found.bytes_per_token(2) == 2 * found.read_parameters
    assert found.kv_bytes_per_token(4) == 4 * 72


def test_a_tied_table_is_counted_once_and_read_whole(tmp_path: Path) -> None:
    found = facts(tmp_path, tie_word_embeddings=True)

    assert found.parameters == found.read_parameters == TABLE + 3 * LAYER + 24


def test_layers_cut(tmp_path: Path) -> None:
    found = facts(tmp_path, 1, layer_types=["full_attention"] * 3)

    assert (found.parameters, found.kv_values) == (2 * TABLE + LAYER + 24, 24)
    for layers in (0, 4):
        with pytest.raises(CheckpointError, match=f"layers must lie between 1 and 3, got {layers}"):
            load_facts(tmp_path, layers)


def test_the_generation_config_decides_what_ends_a_text(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 8]}')

    assert facts(tmp_path).eos_ids == (7, 8)


def test_learned_positions_are_a_table_too(tmp_path: Path) -> None:
    config = {"model_type": "gpt_bigcode", "vocab_size": 100, "n_embd": 24, "n_layer": 2, "n_head": 4}
    config |= {"n_positions": 32, "multi_query": False}
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = load_facts(tmp_path)

    assert isinstance(found, ModuleFacts)
    assert (found.vocab, found.max_positions, found.kv_values) == (100, 32, 2 * 2 * 4 * 6)
    assert found.parameters - found.read_parameters == 32 * 24


def test_a_model_with_an_adapter_is_its_spec(make_checkpoint: Callable[..., Path]) -> None:
    assert load_facts(make_checkpoint()) == load_spec(make_checkpoint())
    assert load_facts(make_checkpoint(), 1) == load_spec(make_checkpoint(), 1)


def test_a_llama_that_the_decoder_does_not_compute_is_a_module(make_checkpoint: Callable[..., Path]) -> None:
    found = load_facts(make_checkpoint(hidden_act="tanh"))

    assert isinstance(found, ModuleFacts)
    assert found.refusal.startswith("its activation is 'tanh'; the decoder computes gelu, gelu_new, ")


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ({"model_type": "nothing"}, "Transformers cannot load .*nothing"),
        ({}, "Transformers cannot load "),
        ({"model_type": "bloom", "hidden_size": 16, "n_layer": 1, "n_head": 2}, "states no max_position_embeddings"),
    ],
)
def test_what_nobody_runs_is_refused(tmp_path: Path, config: dict[str, Any], sentence: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))

    with pytest.raises(CheckpointError, match=sentence) as refused:
        load_facts(tmp_path)
    assert "\n" not in str(refused.value)
