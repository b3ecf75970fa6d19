"""E24 and E25: the same tokens as Transformers on a device, and for families with and without an adapter of ours."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from skote.contracts.check import Figures, Subject, differing, greedy, prompts

VOCAB = 512
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "layer_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2}
WINDOW = {"sliding_window": 8}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"head_dim": 16},
    "mistral": WINDOW,
    "qwen2": {},
    "qwen3": {"head_dim": 16},
    "gemma2": WINDOW | {"head_dim": 16},
    "gemma3_text": WINDOW | {"head_dim": 16, "sliding_window_pattern": 2},
    "phi3": WINDOW,
    "olmo2": {},
    "granite": {"attention_multiplier": 0.5, "embedding_multiplier": 3.0, "residual_multiplier": 0.5},
    "smollm3": {"no_rope_layers": [1, 0]},
    "starcoder2": WINDOW | {"norm_epsilon": 1e-5},
    "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 256},
    "gpt_neox": {"rotary_pct": 0.5},
    "opt": {"ffn_dim": 96},
    "falcon": {"layer_norm_epsilon": 1e-5},
    "cohere": {"logit_scale": 1.0},
    "stablelm": {},
    "glm4": {"head_dim": 16},
    "mixtral": EXPERTS,
    "qwen3_moe": EXPERTS | {"head_dim": 16, "moe_intermediate_size": 48},
    "olmoe": EXPERTS,
    "seed_oss": {"head_dim": 16},
    "gpt_bigcode": {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 256},
}
"""What the config.json of a tiny model of each family has beside `COMMON`; the weights are drawn. The last two have no
adapter."""
WEIGHT_SUFFIXES = {".safetensors", ".gguf", ".bin", ".pt", ".pth", ".onnx", ".npz"}


def device(subject: Subject) -> Figures:
    """`rows_differing`: of three prompts, those whose tokens are not Transformers' on the subject's device."""
    return {"rows_differing": _compared(subject)[0]}


def families(subject: Subject) -> Figures:
    """`rows_differing`: of three prompts in each of `FAMILIES`, those whose tokens are not Transformers'.

    `families` that ran, and how many of them in tier 1; `weight_files` in the installed package.
    """
    rows, in_tier_1 = 0, 0
    for name, config in FAMILIES.items():
        directory = subject.directory / name
        directory.mkdir(parents=True, exist_ok=True)
        content = {"model_type": name} | COMMON | config
        (directory / "config.json").write_text(json.dumps(content), encoding="utf-8")
        model = {"local_dir": str(directory), "random_seed": 0, "layers": None}
        differ, tier = _compared(Subject(model, subject.device, subject.dtype, directory))
        rows += differ
        in_tier_1 += tier == 1
    package = Path(__file__).parent.parent
    bundled = [path for path in package.rglob("*") if path.suffix in WEIGHT_SUFFIXES]
    return {
        "rows_differing": rows,
        "families": len(FAMILIES),
        "in_tier_1": in_tier_1,
        "weight_files": len(bundled),
    }


def _compared(subject: Subject) -> tuple[int, int]:
    """Rows that differ, and the tier that our engine ran in."""
    from skote.engines.transformers import TransformersEngine
    from skote.runtime.engine import SkotergyEngine

    engine = SkotergyEngine(**subject.options(max_model_len=64))
    baseline = TransformersEngine(**subject.options())
    asked = prompts(engine.facts.vocab, (3, 11, 24))
    ours, theirs = ([greedy(each, [prompt], 12)[0] for prompt in asked] for each in (engine, baseline))
    return differing(ours, theirs), int(engine.describe()["tier"])
