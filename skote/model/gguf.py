"""GGUF checkpoints, converted once to a directory of fp32 safetensors that every arm of a run can read.

Recent Transformers keep GGUF weights packed, so that two engines reading the same GGUF file would not multiply by
the same matrices. Dequantising once, on disk, removes the difference.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from skote.types import CheckpointError

_GLOBAL_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_BULKY_KEYS = ("tokenizer.ggml.tokens", "tokenizer.ggml.token_type", "tokenizer.ggml.merges", "tokenizer.ggml.scores")
_LAYER_TENSOR = re.compile(r"blk\.(\d+)\.(\w+)\.weight")


def convert_gguf(gguf_path: Path, out_dir: Path) -> None:
    """Write `gguf_path` (a Llama-family GGUF) to `out_dir` as config.json, model.safetensors (fp32) and a tokenizer.

    Takes about half a minute for 135M parameters on two cores.

    Raises:
        CheckpointError: the file is damaged, is not a GGUF of the Llama architecture, or holds a tensor that has no
            place in it.
    """
    import gguf
    from safetensors.numpy import save_file

    try:
        reader = gguf.GGUFReader(str(gguf_path))
    except (OSError, ValueError, IndexError, KeyError) as error:
        raise CheckpointError(
            f"{gguf_path} cannot be read as a GGUF: it is damaged or incomplete ({error})."
        ) from error
    meta = {key: field.contents() for key, field in reader.fields.items() if key not in _BULKY_KEYS}
    if meta.get("general.architecture") != "llama":
        raise CheckpointError(
            f"{gguf_path} holds the architecture {meta.get('general.architecture')!r}; only 'llama' can be converted."
        )
    config = llama_config(meta)
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    tensors: dict[str, NDArray[np.float32]] = {}
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        name, kind = checkpoint_name(tensor.name)
        tensors[name] = unpermute_rope(values, heads[kind]) if kind in heads else np.ascontiguousarray(values)
    config["tie_word_embeddings"] = "lm_head.weight" not in tensors

    out_dir.mkdir(parents=True, exist_ok=True)
    (out_dir / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    save_file(tensors, out_dir / "model.safetensors", metadata={"format": "pt"})
    _save_tokenizer(gguf_path, out_dir)


def llama_config(meta: dict[str, Any]) -> dict[str, Any]:
    """The config.json of a Llama checkpoint, from the metadata of its GGUF.

    Raises:
        CheckpointError: a key is missing, or the rope is scaled.
    """
    scaling = meta.get("llama.rope.scaling.type", "none")
    if scaling != "none":
        raise CheckpointError(f"The GGUF has rope scaling {scaling!r}, which the conversion does not carry over.")
    try:
        return _llama_config(meta)
    except KeyError as error:
        raise CheckpointError(f"The GGUF lacks {error.args[0]!r}, which a Llama model must state.") from error


def _llama_config(meta: dict[str, Any]) -> dict[str, Any]:
    heads = int(meta["llama.attention.head_count"])
    hidden = int(meta["llama.embedding_length"])
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": int(meta["llama.vocab_size"]),
        "hidden_size": hidden,
        "intermediate_size": int(meta["llama.feed_forward_length"]),
        "num_hidden_layers": int(meta["llama.block_count"]),
        "num_attention_heads": heads,
        "num_key_value_heads": int(meta.get("llama.attention.head_count_kv", heads)),
        "head_dim": int(meta.get("llama.rope.dimension_count", hidden // heads)),
        "max_position_embeddings": int(meta["llama.context_length"]),
        "rms_norm_eps": float(meta["llama.attention.layer_norm_rms_epsilon"]),
        "rope_theta": float(meta.get("llama.rope.freq_base", 10000.0)),
        "bos_token_id": meta.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": meta.get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": meta.get("tokenizer.ggml.padding_token_id"),
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "torch_dtype": "float32",
    }


def checkpoint_name(gguf_name: str) -> tuple[str, str]:
    """The safetensors name of a GGUF tensor, and the kind of matrix that it is (`attn_q`, ...).

    Raises:
        CheckpointError: the name is not one of a Llama GGUF.
    """
    if gguf_name in _GLOBAL_NAMES:
        return _GLOBAL_NAMES[gguf_name], gguf_name
    match = _LAYER_TENSOR.fullmatch(gguf_name)
    if match is None or match[2] not in _LAYER_NAMES:
        raise CheckpointError(f"The GGUF tensor {gguf_name!r} has no place in a Llama checkpoint.")
    return f"model.layers.{match[1]}.{_LAYER_NAMES[match[2]]}.weight", match[2]


def unpermute_rope(weight: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Rows of a q or k projection `[heads * head_dim, hidden]`, from llama.cpp's rotary order back to Llama's.

    llama.cpp rotates neighbouring rows (2i, 2i + 1) of a head, Llama rotates row i with row i + head_dim / 2.
    """
    rows, columns = weight.shape
    pairs = weight.reshape(heads, rows // heads // 2, 2, columns)
    return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(rows, columns))


def _save_tokenizer(gguf_path: Path, out_dir: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(gguf_path.parent, gguf_file=gguf_path.name)
    tokenizer.save_pretrained(out_dir)
