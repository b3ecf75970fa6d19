"""Mixtral: a Mistral with experts."""

from __future__ import annotations

from skote.model.adapter import Config, decoder_spec, windows
from skote.model.names import LLAMA
from skote.model.spec import DecoderSpec, ExpertSpec

MODELS = "Mixtral 8x7B, 8x22B"
NAMES = LLAMA._replace(
    expert_files=(
        "block_sparse_moe.experts.{}.w1",
        "block_sparse_moe.experts.{}.w3",
        "block_sparse_moe.experts.{}.w2",
    ),
    renamed=((".mlp.gate.", ".block_sparse_moe.gate."),),
)


def spec(config: Config) -> DecoderSpec:
    """The spec of a config.json."""
    return decoder_spec(
        config,
        theta=1_000_000.0,
        names=NAMES,
        windows=windows(config, [True] * int(config["num_hidden_layers"]), None),
        experts=ExpertSpec(
            int(config.get("num_local_experts", 8)), int(config.get("num_experts_per_tok", 2)), normalised=True
        ),
    )
