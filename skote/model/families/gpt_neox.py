"""GPT-NeoX: LayerNorm, biases, attention and feed-forward in parallel, a quarter of each head rotated."""

from __future__ import annotations

from skote.model.adapter import Config, decoder_spec, rope_settings, rope_spec, rotary_dim
from skote.model.names import LLAMA
from skote.model.spec import DecoderSpec

MODELS = "Pythia, GPT-NeoX 20B, Dolly 2, StableLM alpha"
NAMES = LLAMA._replace(
    embed="gpt_neox.embed_in",
    norm="gpt_neox.final_layer_norm",
    layer="gpt_neox.layers.{}.",
    qkv=("attention.query_key_value",),
    o="attention.dense",
    gate_up=("mlp.dense_h_to_4h",),
    down="mlp.dense_4h_to_h",
    renamed=(("lm_head", "embed_out"),),
)


def spec(config: Config) -> DecoderSpec:
    """The spec of a config.json."""
    bias = bool(config.get("attention_bias", True))
    theta = float(config.get("rotary_emb_base", 10000.0))
    return decoder_spec(
        dict(config) | {"num_key_value_heads": None},
        eps="layer_norm_eps",
        default_activation="gelu",
        names=NAMES,
        layer_norm=True,
        norm_bias=True,
        parallel=bool(config.get("use_parallel_residual", True)),
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=True,
        gated=False,
        rope=rope_spec(config, rope_settings(config), theta=theta),
        rotary_dim=rotary_dim(config, default=0.25, key="rotary_pct"),
        qkv_order="heads",
    )
