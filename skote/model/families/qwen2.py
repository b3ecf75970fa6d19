"""Qwen2: a Llama with biases of q, k and v; its last layers may have a window."""

from __future__ import annotations

from skote.model.adapter import Config, decoder_spec, sliding_layers, windows
from skote.model.spec import DecoderSpec

MODELS = "Qwen1.5, 2, 2.5 (dense), QwQ"


def spec(config: Config) -> DecoderSpec:
    """The spec of a config.json."""
    return decoder_spec(config, qkv_bias=True, windows=late_windows(config))


def late_windows(config: Config) -> tuple[int | None, ...]:
    """The windows of the layers from `max_window_layers` on, where they are asked for at all."""
    if not config.get("use_sliding_window", False):
        return ()
    first = int(config.get("max_window_layers", 28))
    late = [index >= first for index in range(int(config["num_hidden_layers"]))]
    return windows(config, sliding_layers(config, late), 4096)
