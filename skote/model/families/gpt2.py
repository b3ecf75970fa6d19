"""GPT-2: LayerNorm, biases, learned positions, GELU without a gate, and matrices stored as [columns, rows]."""

from __future__ import annotations

from skote.model.adapter import Config, decoder_spec, refuse
from skote.model.names import LLAMA
from skote.model.spec import DecoderSpec

MODELS = "GPT-2, DistilGPT2, DialoGPT"
NAMES = LLAMA._replace(
    embed="transformer.wte",
    positions="transformer.wpe",
    norm="transformer.ln_f",
    layer="transformer.h.{}.",
    attn_norm="ln_1",
    qkv=("attn.c_attn",),
    o="attn.c_proj",
    mlp_norm="ln_2",
    gate_up=("mlp.c_fc",),
    down="mlp.c_proj",
)


def spec(config: Config) -> DecoderSpec:
    """The spec of a config.json."""
    refuse(config, "scale_attn_by_inverse_layer_idx", wanted=False, default=False)
    refuse(config, "add_cross_attention", wanted=False, default=False)
    hidden = int(config["n_embd"])
    return decoder_spec(
        dict(config)
        | {
            "hidden_size": hidden,
            "num_hidden_layers": config["n_layer"],
            "num_attention_heads": config["n_head"],
            "max_position_embeddings": config.get("n_positions", 1024),
            "intermediate_size": config.get("n_inner") or 4 * hidden,
            "num_key_value_heads": None,
            "layer_norm_epsilon": config.get("layer_norm_epsilon", 1e-5),
        },
        eps="layer_norm_epsilon",
        activation="activation_function",
        default_activation="gelu_new",
        tied=True,
        names=NAMES,
        layer_norm=True,
        norm_bias=True,
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        gated=False,
        rope=None,
        positions_offset=0,
        attention_scale=None if config.get("scale_attn_weights", True) else 1.0,
        transposed=True,
    )
