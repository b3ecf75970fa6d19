"""StarCoder2: LayerNorm, biases everywhere, a feed-forward without a gate, a window in every layer."""

from __future__ import annotations

from skote.model.adapter import Config, decoder_spec, windows
from skote.model.names import LLAMA
from skote.model.spec import DecoderSpec

MODELS = "StarCoder2"
NAMES = LLAMA._replace(gate_up=("mlp.c_fc",), down="mlp.c_proj")


def spec(config: Config) -> DecoderSpec:
    """The spec of a config.json."""
    bias = bool(config.get("use_bias", True))
    return decoder_spec(
        config,
        eps="norm_epsilon",
        default_activation="gelu_pytorch_tanh",
        tied=True,
        names=NAMES,
        layer_norm=True,
        norm_bias=True,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bias,
        gated=False,
        windows=windows(config, [True] * int(config["num_hidden_layers"]), None),
    )
