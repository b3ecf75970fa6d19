"""GLM-4 of 0414: norms before and after, half of each head rotated, by neighbours."""

from __future__ import annotations

from skote.model.adapter import Config, decoder_spec, rotary_dim
from skote.model.names import LLAMA
from skote.model.spec import DecoderSpec

MODELS = "GLM-4 0414 9B, 32B; GLM-Z1"
NAMES = LLAMA._replace(
    gate_up=("mlp.gate_up_proj",), attn_post_norm="post_self_attn_layernorm", mlp_post_norm="post_mlp_layernorm"
)


def spec(config: Config) -> DecoderSpec:
    """The spec of a config.json."""
    sized = {"head_dim": 128} | dict(config)
    return decoder_spec(
        sized,
        names=NAMES,
        post_norms=True,
        qkv_bias=bool(config.get("attention_bias", True)),
        rotary_dim=rotary_dim(sized, default=0.5),
        rope_interleaved=True,
    )
