"""Mistral: a Llama whose layers may all have a window."""

from __future__ import annotations

from skote.model.adapter import Config, decoder_spec, windows
from skote.model.spec import DecoderSpec

MODELS = "Mistral 7B, NeMo, Small (text), Codestral"


def spec(config: Config) -> DecoderSpec:
    """The spec of a config.json."""
    return decoder_spec(config, windows=windows(config, [True] * int(config["num_hidden_layers"]), 4096))
