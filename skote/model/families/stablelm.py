"""StableLM: a Llama with LayerNorm, a quarter of each head rotated, and maybe a norm of its own for each head."""

from __future__ import annotations

from skote.model.adapter import Config, decoder_spec, rotary_dim
from skote.model.names import LLAMA
from skote.model.spec import DecoderSpec

MODELS = "StableLM 2 1.6B, 12B; StableLM 3B, Zephyr, Code"
NAMES = LLAMA._replace(q_norm="self_attn.q_layernorm.norms.{}", k_norm="self_attn.k_layernorm.norms.{}")


def spec(config: Config) -> DecoderSpec:
    """The spec of a config.json."""
    return decoder_spec(
        config,
        eps="layer_norm_eps",
        names=NAMES,
        layer_norm=True,
        norm_bias=True,
        shared_norm=bool(config.get("use_parallel_residual", False)),
        qkv_bias=bool(config.get("use_qkv_bias", False)),
        qk_norm="heads" if config.get("qk_layernorm", False) else None,
        rotary_dim=rotary_dim(config, default=0.25),
    )
