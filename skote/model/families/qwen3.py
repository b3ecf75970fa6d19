"""Qwen3: a Llama with a norm of each q and k head; its last layers may have a window."""

from __future__ import annotations

from skote.model.adapter import Config, decoder_spec
from skote.model.families.qwen2 import late_windows
from skote.model.spec import DecoderSpec

MODELS = "Qwen3 (dense)"


def spec(config: Config) -> DecoderSpec:
    """The spec of a config.json."""
    bias = bool(config.get("attention_bias", False))
    return decoder_spec(
        {"head_dim": 128} | dict(config), qk_norm="head", qkv_bias=bias, o_bias=bias, windows=late_windows(config)
    )
