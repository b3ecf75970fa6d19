"""Command R: LayerNorm without a bias, one for attention and feed-forward in parallel, neighbours rotated."""

from __future__ import annotations

from skote.model.adapter import Config, decoder_spec
from skote.model.spec import DecoderSpec

MODELS = "Command R, R+, Aya 23"


def spec(config: Config) -> DecoderSpec:
    """The spec of a config.json."""
    bias = bool(config.get("attention_bias", False))
    return decoder_spec(
        config,
        eps="layer_norm_eps",
        tied=True,
        theta=500_000.0,
        layer_norm=True,
        shared_norm=True,
        qkv_bias=bias,
        o_bias=bias,
        qk_norm="heads" if config.get("use_qk_norm", False) else None,
        rope_interleaved=True,
        logits_scale=float(config.get("logit_scale", 0.0625)),
    )
