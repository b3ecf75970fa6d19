"""Phi-3: a Llama with packed projections, a window in every layer, and maybe a partial rotation or LongRoPE."""

from __future__ import annotations

from skote.model.adapter import Config, decoder_spec, rotary_dim, windows
from skote.model.names import LLAMA
from skote.model.spec import DecoderSpec

MODELS = "Phi-3 mini, medium; Phi-3.5 mini; Phi-4, Phi-4 mini"
NAMES = LLAMA._replace(qkv=("self_attn.qkv_proj",), gate_up=("mlp.gate_up_proj",))


def spec(config: Config) -> DecoderSpec:
    """The spec of a config.json."""
    return decoder_spec(
        config,
        names=NAMES,
        rotary_dim=rotary_dim(config, default=1.0),
        windows=windows(config, [True] * int(config["num_hidden_layers"]), None),
    )
