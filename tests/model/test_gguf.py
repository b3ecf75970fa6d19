"""GGUF to safetensors: a file written as llama.cpp's own converter writes it, read back to the tensors it came from."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.numpy import load_file

from skote.model import gguf as module
from skote.model.adapters import load_spec
from skote.model.gguf import checkpoint_name, convert_gguf, llama_config, unpermute_rope
from skote.types import CheckpointError

Make = Callable[..., Path]

GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def permute(weight: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """llama.cpp's convert_hf_to_gguf.py, LlamaModel.permute."""
    shape = weight.shape
    return weight.reshape(heads, 2, shape[0] // heads // 2, *shape[1:]).swapaxes(1, 2).reshape(shape)


def gguf_name(name: str) -> str:
    stem = name.removesuffix(".weight")
    if stem in GGUF_NAMES:
        return f"{GGUF_NAMES[stem]}.weight"
    _, _, layer, kind = stem.split(".", 3)
    return f"blk.{layer}.{GGUF_NAMES[kind]}.weight"


def write_gguf(
    path: Path, directory: Path, *, architecture: str = "llama", quantize: bool = False, extra: str | None = None
) -> Path:
    """`directory`'s checkpoint as a GGUF without a tokenizer; matrices as Q8_0 with `quantize`."""
    spec = load_spec(directory)
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_vocab_size(spec.vocab)
    writer.add_context_length(spec.max_positions)
    writer.add_embedding_length(spec.hidden)
    writer.add_block_count(spec.layers)
    writer.add_feed_forward_length(spec.intermediate)
    writer.add_rope_dimension_count(spec.head_dim)
    writer.add_head_count(spec.heads)
    writer.add_head_count_kv(spec.kv_heads)
    writer.add_layer_norm_rms_eps(spec.norm_eps)
    writer.add_rope_freq_base(spec.rope.theta)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    for name, values in load_file(directory / "model.safetensors").items():
        heads = {"q": spec.heads, "k": spec.kv_heads}.get(name.split(".")[-2].removesuffix("_proj"))
        stored = permute(values, heads) if heads else values
        if quantize and stored.ndim == 2:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(gguf_name(name), gguf.quants.quantize(stored, kind), raw_dtype=kind)
        else:
            writer.add_tensor(gguf_name(name), stored)
    if extra is not None:
        writer.add_tensor(extra, np.ones(4, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(autouse=True)
def _no_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    def save(gguf_path: Path, out_dir: Path) -> None:
        (out_dir / "tokenizer.json").write_text(gguf_path.name)

    monkeypatch.setattr(module, "_save_tokenizer", save)


@pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": True}, {"num_key_value_heads": 6}, {"head_dim": 16}])
def test_a_conversion_gives_back_the_checkpoint(make_checkpoint: Make, tmp_path: Path, changes: dict[str, Any]) -> None:
    directory = make_checkpoint(**changes)

    convert_gguf(write_gguf(tmp_path / "model.gguf", directory), tmp_path / "out")

    before, after = (load_file(each / "model.safetensors") for each in (directory, tmp_path / "out"))
    assert before.keys() == after.keys()
    for name, values in after.items():
        assert values.dtype == np.float32
        np.testing.assert_array_equal(values, before[name], err_msg=name)
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "model.gguf"


@pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": True}, {"head_dim": 16}])
def test_the_converted_directory_is_the_same_model_to_us_and_to_transformers(
    make_checkpoint: Make, tmp_path: Path, changes: dict[str, Any]
) -> None:
    from transformers import AutoModelForCausalLM

    directory = make_checkpoint(**changes)
    convert_gguf(write_gguf(tmp_path / "model.gguf", directory), tmp_path / "out")
    ids = torch.arange(3, 20)[None]

    # GGUF keeps the epsilon in fp32: 1e-5 comes back as 9.99999975e-6.
    rounded = dataclasses.replace(load_spec(directory), norm_eps=float(np.float32(1e-5)))
    assert load_spec(tmp_path / "out") == rounded
    with torch.no_grad():
        one, other = (AutoModelForCausalLM.from_pretrained(each)(ids).logits for each in (directory, tmp_path / "out"))
    torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_quantised_matrices_come_back_within_half_a_step(make_checkpoint: Make, tmp_path: Path) -> None:
    directory = make_checkpoint(hidden_size=64, intermediate_size=96, num_attention_heads=8, num_key_value_heads=4)

    convert_gguf(write_gguf(tmp_path / "model.gguf", directory, quantize=True), tmp_path / "out")

    before, after = (load_file(each / "model.safetensors") for each in (directory, tmp_path / "out"))
    for name, values in after.items():
        exact = before[name]
        if exact.ndim == 1:
            np.testing.assert_array_equal(values, exact)
            continue
        # Q8_0: 32 values share a step of their largest magnitude / 127, kept in fp16 (hence 127 steps x 2^-11 more).
        step = np.abs(exact.reshape(-1, 32)).max(axis=1, keepdims=True) / 127
        error = np.abs(values - exact).reshape(-1, 32)
        assert (error <= step * (0.5 + 127 * 2**-11)).all(), name


def test_rows_are_put_back_by_hand() -> None:
    # Two heads of four rows. llama.cpp has neighbours (0, 2), (1, 3) of each head; Llama has halves 0 1, 2 3.
    stored = np.array([[0.0], [2.0], [1.0], [3.0], [10.0], [12.0], [11.0], [13.0]], dtype=np.float32)

    restored = unpermute_rope(stored, 2)

    assert restored[:, 0].tolist() == [0.0, 1.0, 2.0, 3.0, 10.0, 11.0, 12.0, 13.0]
    assert restored.flags["C_CONTIGUOUS"]


@pytest.mark.parametrize(
    ("stored", "name", "kind"),
    [
        ("token_embd.weight", "model.embed_tokens.weight", "token_embd.weight"),
        ("output.weight", "lm_head.weight", "output.weight"),
        ("blk.17.attn_q.weight", "model.layers.17.self_attn.q_proj.weight", "attn_q"),
        ("blk.0.ffn_down.weight", "model.layers.0.mlp.down_proj.weight", "ffn_down"),
    ],
)
def test_names(stored: str, name: str, kind: str) -> None:
    assert checkpoint_name(stored) == (name, kind)


@pytest.mark.parametrize(
    "name", ["blk.0.attn_q.bias", "blk.x.attn_q.weight", "blk.0.ssm_in.weight", "rope_freqs.weight"]
)
def test_names_without_a_place(name: str) -> None:
    with pytest.raises(CheckpointError, match=f"'{name}' has no place"):
        checkpoint_name(name)


META = {
    "general.architecture": "llama",
    "llama.attention.head_count": 9,
    "llama.embedding_length": 576,
    "llama.vocab_size": 49152,
    "llama.feed_forward_length": 1536,
    "llama.block_count": 30,
    "llama.context_length": 8192,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
}


def test_metadata_that_may_be_left_out() -> None:
    config = llama_config(META)

    assert (config["num_key_value_heads"], config["head_dim"], config["rope_theta"]) == (9, 64, 10000.0)
    assert config["bos_token_id"] is config["eos_token_id"] is config["pad_token_id"] is None
    assert json.loads(json.dumps(config)) == config


def test_metadata_that_is_missing_is_named() -> None:
    with pytest.raises(CheckpointError, match=r"lacks 'llama\.block_count'"):
        llama_config({key: value for key, value in META.items() if key != "llama.block_count"})


def test_a_stretched_rope_is_refused_rather_than_dropped() -> None:
    assert llama_config(META | {"llama.rope.scaling.type": "none"})["rope_theta"] == 10000.0
    with pytest.raises(CheckpointError, match="rope scaling 'linear'"):
        llama_config(META | {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0})


def test_another_architecture_is_refused(make_checkpoint: Make, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", make_checkpoint(), architecture="qwen2")

    with pytest.raises(CheckpointError, match=r"model\.gguf holds the architecture 'qwen2'; only 'llama'"):
        convert_gguf(path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_tensor_without_a_place_is_refused(make_checkpoint: Make, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", make_checkpoint(), extra="rope_freqs.weight")

    with pytest.raises(CheckpointError, match=r"'rope_freqs\.weight' has no place"):
        convert_gguf(path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("keep", [0, 3, 20, 3000, -4])
def test_a_damaged_file_is_refused(make_checkpoint: Make, tmp_path: Path, keep: int) -> None:
    path = write_gguf(tmp_path / "model.gguf", make_checkpoint())
    path.write_bytes(path.read_bytes()[:keep])

    with pytest.raises(CheckpointError, match=r"model\.gguf cannot be read as a GGUF"):
        convert_gguf(path, tmp_path / "out")


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"not a model" * 100)

    with pytest.raises(CheckpointError, match=r"model\.gguf cannot be read as a GGUF"):
        convert_gguf(path, tmp_path / "out")
