"""Granite: a Llama with four multipliers."""

from __future__ import annotations

from skote.model.adapter import Config, decoder_spec
from skote.model.spec import DecoderSpec

MODELS = "Granite 3.0 to 3.3 (dense)"


def spec(config: Config) -> DecoderSpec:
    """The spec of a config.json."""
    bias = bool(config.get("attention_bias", False))
    return decoder_spec(
        config,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bool(config.get("mlp_bias", False)),
        attention_scale=float(config.get("attention_multiplier", 1.0)),
        embedding_scale=float(config.get("embedding_multiplier", 1.0)),
        residual_scale=float(config.get("residual_multiplier", 1.0)),
        logits_scale=1.0 / float(config.get("logits_scaling", 1.0)),
    )
