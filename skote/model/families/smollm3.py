"""SmolLM3: a Llama of which every fourth layer rotates nothing."""

from __future__ import annotations

from skote.model.adapter import Config, decoder_spec, rope_settings, rope_spec, sliding_layers, windows
from skote.model.spec import DecoderSpec

MODELS = "SmolLM3"


def spec(config: Config) -> DecoderSpec:
    """The spec of a config.json."""
    layers, interval = int(config["num_hidden_layers"]), int(config.get("no_rope_layer_interval", 4))
    rotated = config.get("no_rope_layers") or [(index + 1) % interval for index in range(layers)]  # 0 is without
    rope = rope_spec(config, rope_settings(config), theta=2_000_000.0)
    bias = bool(config.get("attention_bias", False))
    unrotated = sliding_layers(config, [not each for each in rotated])
    return decoder_spec(
        config,
        tied=True,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bool(config.get("mlp_bias", False)),
        rope=rope,
        ropes=tuple(rope if each else None for each in rotated),
        windows=windows(config, unrotated, None) if config.get("use_sliding_window", False) else (),
    )
