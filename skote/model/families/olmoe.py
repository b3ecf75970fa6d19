"""OLMoE: a Llama with experts, and norms of q and k over their whole width."""

from __future__ import annotations

from skote.model.adapter import Config, decoder_spec, refuse
from skote.model.spec import DecoderSpec, ExpertSpec

MODELS = "OLMoE 1B-7B"


def spec(config: Config) -> DecoderSpec:
    """The spec of a config.json."""
    refuse(config, "clip_qkv", wanted=None)
    bias = bool(config.get("attention_bias", False))
    return decoder_spec(
        config,
        qk_norm="width",
        qkv_bias=bias,
        o_bias=bias,
        experts=ExpertSpec(
            int(config.get("num_experts") or config.get("num_local_experts", 64)),
            int(config.get("num_experts_per_tok", 8)),
            normalised=bool(config.get("norm_topk_prob", False)),
        ),
    )
