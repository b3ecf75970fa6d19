"""E24 and E25: the same tokens as Transformers on a device, and for families with and without an adapter of ours."""

from __future__ import annotations

import json
from pathlib import Path

from skote.contracts.check import Figures, Subject, differing, greedy, prompts

VOCAB = 512
FAMILIES = {
    "llama": {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
    },
    "gpt2": {
        "architectures": ["GPT2LMHeadModel"],
        "n_embd": 64,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 256,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "qwen3": {
        "architectures": ["Qwen3ForCausalLM"],
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 256,
        "tie_word_embeddings": True,
    },
}
"""Tiny config.json files of three decoder families; the weights are drawn."""
WEIGHT_SUFFIXES = {".safetensors", ".gguf", ".bin", ".pt", ".pth", ".onnx", ".npz"}


def device(subject: Subject) -> Figures:
    """`rows_differing`: of three prompts, those whose tokens are not Transformers' on the subject's device."""
    return {"rows_differing": _rows_differing(subject)}


def families(subject: Subject) -> Figures:
    """`rows_differing`: of three prompts in each of `FAMILIES`, those whose tokens are not Transformers'.

    `families` that ran; `weight_files` in the installed package.
    """
    rows = 0
    for name, config in FAMILIES.items():
        directory = subject.directory / name
        directory.mkdir(parents=True, exist_ok=True)
        content = {"model_type": name, "vocab_size": VOCAB} | config
        (directory / "config.json").write_text(json.dumps(content), encoding="utf-8")
        model = {"local_dir": str(directory), "random_seed": 0, "layers": None}
        rows += _rows_differing(Subject(model, subject.device, subject.dtype, directory))
    package = Path(__file__).parent.parent
    bundled = [path for path in package.rglob("*") if path.suffix in WEIGHT_SUFFIXES]
    return {"rows_differing": rows, "families": len(FAMILIES), "weight_files": len(bundled)}


def _rows_differing(subject: Subject) -> int:
    from skote.engines.transformers import TransformersEngine
    from skote.runtime.engine import SkotergyEngine

    engine = SkotergyEngine(**subject.options(max_model_len=64))
    baseline = TransformersEngine(**subject.options())
    asked = prompts(engine.facts.vocab, (3, 11, 24))
    ours, theirs = ([greedy(each, [prompt], 12)[0] for prompt in asked] for each in (engine, baseline))
    return differing(ours, theirs)
