"""Llama: what all other families are told apart from."""

from __future__ import annotations

from skote.model.adapter import Config, decoder_spec
from skote.model.spec import DecoderSpec

MODELS = "Llama 2, 3, 3.1, 3.2, 3.3; SmolLM 1, 2; Yi, TinyLlama and others that copy it"


def spec(config: Config) -> DecoderSpec:
    """The spec of a config.json."""
    bias = bool(config.get("attention_bias", False))
    return decoder_spec(config, qkv_bias=bias, o_bias=bias, mlp_bias=bool(config.get("mlp_bias", False)))
