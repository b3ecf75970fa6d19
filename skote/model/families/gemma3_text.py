"""Gemma 3 without images: a Gemma 2 with norms of q and k instead of soft caps, and a rotation of its own in the layers
with a window, five of six."""

from __future__ import annotations

from skote.model.adapter import Config, decoder_spec, refuse, rope_settings, rope_spec, sliding_layers, windows
from skote.model.families.gemma2 import NAMES
from skote.model.spec import DecoderSpec, RopeSpec

MODELS = "Gemma 3 270M, 1B, and the text part of others"


def spec(config: Config) -> DecoderSpec:
    """The spec of a config.json."""
    refuse(config, "use_bidirectional_attention", wanted=False, default=False)
    refuse(config, "attn_logit_softcapping", wanted=None)  # Transformers does not compute it here either
    bias = bool(config.get("attention_bias", False))
    pattern = int(config.get("sliding_window_pattern", 6))
    most = [(index + 1) % pattern > 0 for index in range(int(config["num_hidden_layers"]))]
    sliding = sliding_layers(config, most)
    whole, local = _ropes(config)
    return decoder_spec(
        {"head_dim": 256} | dict(config),
        activation="hidden_activation",
        default_activation="gelu_pytorch_tanh",
        tied=True,
        names=NAMES,
        norm_plus_one=True,
        post_norms=True,
        qk_norm="head",
        qkv_bias=bias,
        o_bias=bias,
        attention_scale=float(config.get("query_pre_attn_scalar", 256)) ** -0.5,
        logits_softcap=config.get("final_logit_softcapping"),
        embedding_scale=float(config["hidden_size"]) ** 0.5,
        windows=windows(config, sliding, 4096),
        rope=whole,
        ropes=tuple(local if slides else whole for slides in sliding),
    )


def _ropes(config: Config) -> tuple[RopeSpec, RopeSpec]:
    """The rotations of the layers without and with a window; old files have both in keys of their own."""
    settings = rope_settings(config)
    by_kind = "full_attention" in settings or "sliding_attention" in settings
    whole = settings.get("full_attention") or {} if by_kind else settings
    local = settings.get("sliding_attention") or {} if by_kind else {}
    return (
        rope_spec(config, whole, theta=1_000_000.0),
        rope_spec(config, {"rope_theta": config.get("rope_local_base_freq", 10000.0)} | dict(local)),
    )
