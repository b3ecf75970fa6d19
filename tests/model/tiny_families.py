"""Tiny models of every family that the lean decoder runs: odd sizes, and every switch turned so far that it matters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

VOCAB = 97
POSITIONS = 128
WINDOW = 12

COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 72,
    "intermediate_size": 50,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "max_position_embeddings": POSITIONS,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2}
GPT2 = {"vocab_size": VOCAB, "n_embd": 96, "n_layer": 2, "n_head": 3, "n_inner": 70, "n_positions": POSITIONS}
NEOX = {"num_attention_heads": 3, "hidden_size": 96, "rotary_pct": 0.5}

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"head_dim": 64}),
    "llama with biases": ("llama", {"head_dim": 80, "attention_bias": True, "mlp_bias": True, "hidden_act": "gelu"}),
    "llama with llama3 rope": (
        "llama",
        {"rope_parameters": LLAMA3 | {"rope_theta": 5e5, "original_max_position_embeddings": 32}},
    ),
    "llama with linear rope": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}}),
    "llama with yarn rope": ("llama", {"rope_parameters": YARN}),
    "llama with yarn rope and scales": (
        "llama",
        {"rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 2.0, "beta_fast": 8.0, "truncate": False}},
    ),
    "llama with dynamic rope": (
        "llama",
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}},
    ),
    "mistral": ("mistral", {"head_dim": 96, "num_attention_heads": 8, "sliding_window": WINDOW}),
    "mistral without window": ("mistral", {"sliding_window": None, "tie_word_embeddings": True}),
    "qwen2": ("qwen2", {"num_attention_heads": 2, "num_key_value_heads": 2}),
    "qwen2 with late windows": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1, "tie_word_embeddings": True},
    ),
    "qwen3": ("qwen3", {"head_dim": 128, "num_attention_heads": 8, "attention_bias": True}),
    "gemma2": (
        "gemma2",
        {
            "head_dim": 256,
            "sliding_window": WINDOW,
            "query_pre_attn_scalar": 100,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
        },
    ),
    "gemma3": (
        "gemma3_text",
        {
            "head_dim": 64,
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention", "full_attention"],
            "query_pre_attn_scalar": 100,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 1e5, "factor": 4.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
            },
        },
    ),
    "phi3": ("phi3", {"sliding_window": WINDOW}),
    "phi4 mini": (
        "phi3",
        {
            "num_attention_heads": 6,
            "hidden_size": 96,
            "num_key_value_heads": 2,
            "original_max_position_embeddings": 120,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "partial_rotary_factor": 0.75,
                "short_factor": [1.0, 1.5, 2.0, 2.0, 3.0, 4.0],
                "long_factor": [1.0] * 6,
            },
        },
    ),
    "olmo2": ("olmo2", {"num_attention_heads": 3, "num_key_value_heads": 3}),
    "granite": (
        "granite",
        {
            "attention_multiplier": 0.5,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.4,
            "logits_scaling": 2.0,
            "attention_bias": True,
            "mlp_bias": True,
        },
    ),
    "smollm3": (
        "smollm3",
        {
            "no_rope_layers": [1, 0],
            "use_sliding_window": True,
            "sliding_window": WINDOW,
            "layer_types": ["full_attention", "sliding_attention"],
        },
    ),
    "starcoder2": ("starcoder2", {"sliding_window": WINDOW, "use_bias": True}),
    "gpt2": ("gpt2", GPT2),
    "gpt2 without scale": ("gpt2", GPT2 | {"scale_attn_weights": False, "tie_word_embeddings": False}),
    "gpt_neox": ("gpt_neox", NEOX),
    "gpt_neox in sequence": ("gpt_neox", NEOX | {"use_parallel_residual": False, "attention_bias": False}),
    "opt": ("opt", {"ffn_dim": 50, "word_embed_proj_dim": 72}),
    "falcon 7b": ("falcon", {"multi_query": True, "ffn_hidden_size": 50}),
    "falcon 40b": (
        "falcon",
        {"new_decoder_architecture": True, "num_attention_heads": 6, "num_kv_heads": 2, "bias": True},
    ),
    "falcon 11b": (
        "falcon",
        {
            "new_decoder_architecture": True,
            "num_attention_heads": 6,
            "num_kv_heads": 2,
            "num_ln_in_parallel_attn": 1,
            "tie_word_embeddings": False,
        },
    ),
    "falcon in sequence": ("falcon", {"multi_query": False, "parallel_attn": False, "bias": True}),
    "cohere": ("cohere", {"logit_scale": 1.5, "attention_bias": True}),
    "cohere with norms of q and k": ("cohere", {"logit_scale": 1.5, "use_qk_norm": True, "num_attention_heads": 6}),
    "stablelm": ("stablelm", {"num_attention_heads": 2, "use_qkv_bias": True, "partial_rotary_factor": 0.5}),
    "stablelm 2 12b": (
        "stablelm",
        {"hidden_size": 96, "qk_layernorm": True, "use_parallel_residual": True, "partial_rotary_factor": 0.25},
    ),
    "glm4": ("glm4", {"head_dim": 64, "attention_bias": True}),
    "mixtral": (
        "mixtral",
        {"intermediate_size": 52, "num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": WINDOW},
    ),
    "qwen3_moe": ("qwen3_moe", EXPERTS | {"head_dim": 64, "moe_intermediate_size": 40, "norm_topk_prob": True}),
    "olmoe": ("olmoe", EXPERTS | {"intermediate_size": 52, "num_key_value_heads": 3}),
}
"""What each of them is called here: its model_type, and where it departs from `COMMON`."""


_HEAD_32 = {"hidden_size": 96}
KERNEL_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma 2 without soft caps": (
        "gemma2",
        {"head_dim": 32, "sliding_window": WINDOW, "attn_logit_softcapping": None, "final_logit_softcapping": None},
    ),
    "granite without biases": (
        "granite",
        _HEAD_32
        | {
            "attention_multiplier": 0.5,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.4,
            "logits_scaling": 2.0,
        },
    ),
    "llama with gelu": ("llama", {"head_dim": 16, "attention_bias": False, "hidden_act": "gelu"}),
    "mistral with heads of 64": ("mistral", {"head_dim": 64, "num_attention_heads": 8, "sliding_window": WINDOW}),
    "mixtral with heads of 32": (
        "mixtral",
        _HEAD_32
        | {"intermediate_size": 80, "num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": WINDOW},
    ),
    "phi3 with heads of 32": ("phi3", _HEAD_32 | {"sliding_window": WINDOW}),
    "qwen2 with late windows and heads of 32": (
        "qwen2",
        _HEAD_32 | {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
    ),
    "smollm3 with heads of 32": ("smollm3", MODELS["smollm3"][1] | _HEAD_32),
}
"""More of them, of sizes that the kernels on CUDA take, so that these compute each switch that they know."""


def make_model(tiny: str, directory: Path) -> PreTrainedModel:
    """The model `tiny`, of `MODELS` or `KERNEL_MODELS`, every parameter drawn, saved to `directory`."""
    model_type, changes = (MODELS | KERNEL_MODELS)[tiny]
    settings = changes if model_type == "gpt2" else COMMON | changes
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **settings), dtype=torch.float32)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.dim() > 1:
                    parameter.normal_(0.0, 2.0 * parameter.shape[-1] ** -0.5)
                elif name.endswith("bias"):
                    parameter.normal_(0.0, 0.3)
                elif parameter.shape == model.get_input_embeddings().weight.shape[1:]:
                    parameter.normal_(0.0, 1.0)  # a norm of the residual stream
                else:
                    parameter.normal_(0.5, 0.5)
    model.generation_config.eos_token_id = 2
    model.save_pretrained(directory)
    return model.eval()
