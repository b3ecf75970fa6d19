"""Qwen3 with experts in every layer."""

from __future__ import annotations

from skote.model.adapter import Config, decoder_spec, refuse, windows
from skote.model.spec import DecoderSpec, ExpertSpec

MODELS = "Qwen3 30B-A3B, 235B-A22B, Coder"


def spec(config: Config) -> DecoderSpec:
    """The spec of a config.json."""
    refuse(config, "decoder_sparse_step", wanted=1, default=1)
    refuse(dict(config) | {"mlp_only_layers": config.get("mlp_only_layers") or []}, "mlp_only_layers", wanted=[])
    bias = bool(config.get("attention_bias", False))
    sliding = [bool(config.get("use_sliding_window", False))] * int(config["num_hidden_layers"])
    return decoder_spec(
        config,
        intermediate=int(config.get("moe_intermediate_size", 768)),
        qk_norm="head",
        qkv_bias=bias,
        o_bias=bias,
        windows=windows(config, sliding, 4096),
        experts=ExpertSpec(
            int(config.get("num_experts") or config.get("num_local_experts", 128)),
            int(config.get("num_experts_per_tok", 8)),
            normalised=bool(config.get("norm_topk_prob", False)),
        ),
    )
