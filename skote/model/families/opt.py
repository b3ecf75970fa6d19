"""OPT: LayerNorm, biases, learned positions from row 2 on, ReLU without a gate."""

from __future__ import annotations

from skote.model.adapter import Config, decoder_spec, refuse
from skote.model.names import LLAMA
from skote.model.spec import DecoderSpec

MODELS = "OPT 125M, 1.3B to 66B (350M has its norms behind)"
NAMES = LLAMA._replace(
    embed="model.decoder.embed_tokens",
    positions="model.decoder.embed_positions",
    norm="model.decoder.final_layer_norm",
    layer="model.decoder.layers.{}.",
    attn_norm="self_attn_layer_norm",
    o="self_attn.out_proj",
    mlp_norm="final_layer_norm",
    gate_up=("fc1",),
    down="fc2",
)


def spec(config: Config) -> DecoderSpec:
    """The spec of a config.json."""
    for key, wanted in (
        ("do_layer_norm_before", True),
        ("_remove_final_layer_norm", False),
        ("layer_norm_elementwise_affine", True),
        ("word_embed_proj_dim", config["hidden_size"]),
    ):
        refuse(config, key, wanted=wanted, default=wanted)
    bias = bool(config.get("enable_bias", True))
    return decoder_spec(
        dict(config) | {"intermediate_size": config["ffn_dim"], "layer_norm_eps": 1e-5, "num_key_value_heads": None},
        eps="layer_norm_eps",
        activation="activation_function",
        default_activation="relu",
        tied=True,
        names=NAMES,
        layer_norm=True,
        norm_bias=True,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bias,
        gated=False,
        rope=None,
        positions_offset=2,
    )
