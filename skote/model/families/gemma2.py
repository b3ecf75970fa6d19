"""Gemma 2: norms of 1 + w before and after, soft caps, every other layer with a window, GELU."""

from __future__ import annotations

from skote.model.adapter import Config, decoder_spec, refuse, sliding_layers, windows
from skote.model.names import LLAMA
from skote.model.spec import DecoderSpec

MODELS = "Gemma 2"
NAMES = LLAMA._replace(mlp_norm="pre_feedforward_layernorm")


def spec(config: Config) -> DecoderSpec:
    """The spec of a config.json."""
    refuse(config, "use_bidirectional_attention", wanted=None)
    bias = bool(config.get("attention_bias", False))
    every_other = [index % 2 == 0 for index in range(int(config["num_hidden_layers"]))]
    return decoder_spec(
        {"head_dim": 256} | dict(config),
        activation="hidden_activation",
        default_activation="gelu_pytorch_tanh",
        tied=True,
        names=NAMES,
        norm_plus_one=True,
        post_norms=True,
        qkv_bias=bias,
        o_bias=bias,
        attention_scale=float(config.get("query_pre_attn_scalar", 256)) ** -0.5,
        attention_softcap=config.get("attn_logit_softcapping", 50.0),
        logits_softcap=config.get("final_logit_softcapping", 30.0),
        embedding_scale=float(config["hidden_size"]) ** 0.5,
        windows=windows(config, sliding_layers(config, every_other), 4096),
    )
