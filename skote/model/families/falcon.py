"""Falcon: LayerNorm, attention and feed-forward in parallel, GELU without a gate; three ways to pack q, k and v."""

from __future__ import annotations

from skote.model.adapter import Config, decoder_spec, refuse
from skote.model.names import LLAMA
from skote.model.spec import DecoderSpec

MODELS = "Falcon 7B, 11B, 40B, 180B (not those with ALiBi)"
NAMES = LLAMA._replace(
    embed="transformer.word_embeddings",
    norm="transformer.ln_f",
    layer="transformer.h.{}.",
    qkv=("self_attention.query_key_value",),
    o="self_attention.dense",
    gate_up=("mlp.dense_h_to_4h",),
    down="mlp.dense_4h_to_h",
)


def spec(config: Config) -> DecoderSpec:
    """The spec of a config.json."""
    refuse(config, "alibi", wanted=False, default=False)
    new, multi_query = bool(config.get("new_decoder_architecture")), bool(config.get("multi_query", True))
    if new:
        refuse(config, "parallel_attn", wanted=True, default=True)
    parallel = bool(config.get("parallel_attn", True))
    two_norms = new and (config.get("num_ln_in_parallel_attn") or 2) == 2
    heads, bias = int(config["num_attention_heads"]), bool(config.get("bias", False))
    grouped = int(config.get("num_kv_heads") or heads)
    return decoder_spec(
        dict(config)
        | {
            "intermediate_size": config.get("ffn_hidden_size") or 4 * int(config["hidden_size"]),
            "max_position_embeddings": config.get("max_position_embeddings", 2048),
            "num_key_value_heads": grouped if new or not multi_query else 1,
            "head_dim": None,
        },
        eps="layer_norm_epsilon",
        activation="activation",
        default_activation="gelu",
        tied=True,
        names=NAMES._replace(attn_norm="ln_attn", mlp_norm="ln_mlp") if two_norms else NAMES,
        layer_norm=True,
        norm_bias=True,
        parallel=two_norms,
        shared_norm=parallel and not two_norms,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bias,
        gated=False,
        qkv_order="groups" if new else "parts" if multi_query else "heads",
    )
