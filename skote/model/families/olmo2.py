"""OLMo 2: norms after attention and feed-forward instead of before, and of q and k over their whole width."""

from __future__ import annotations

from skote.model.adapter import Config, decoder_spec
from skote.model.spec import DecoderSpec

MODELS = "OLMo 2"


def spec(config: Config) -> DecoderSpec:
    """The spec of a config.json."""
    bias = bool(config.get("attention_bias", False))
    return decoder_spec(config, pre_norms=False, post_norms=True, qk_norm="width", qkv_bias=bias, o_bias=bias)
