"""Checkpoints as people have them: safetensors and .bin, one file or shards, with and without the head's prefix."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from skote.model.adapters import load_spec
from skote.model.checkpoint import load_tensors
from skote.model.weights import tensor_shapes
from skote.types import CheckpointError

CPU = torch.device("cpu")
Copy = Callable[..., Path]


def read(directory: Path, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    spec = load_spec(directory)
    return dict(load_tensors(directory, spec, tensor_shapes(spec), dtype=dtype, device=CPU))


def taken(directory: Path) -> dict[str, torch.Tensor]:
    """The directory's tensors, taken out of it."""
    tensors = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    return tensors


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(one[name].equal(other[name]) for name in one)


@pytest.mark.parametrize("zipped", [True, False])
def test_one_file_of_pytorch(copy_checkpoint: Copy, zipped: bool) -> None:
    directory = copy_checkpoint()
    tensors = taken(directory)
    torch.save(tensors, directory / "pytorch_model.bin", _use_new_zipfile_serialization=zipped)

    assert same(read(directory), tensors)


def test_shards_of_pytorch(copy_checkpoint: Copy) -> None:
    directory = copy_checkpoint()
    tensors = taken(directory)
    weight_map = {name: f"pytorch_model-{index % 2}.bin" for index, name in enumerate(tensors)}
    for file in set(weight_map.values()):
        torch.save({name: tensors[name] for name in tensors if weight_map[name] == file}, directory / file)
    (directory / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))

    assert same(read(directory), tensors)


def test_safetensors_are_taken_where_there_are_both(copy_checkpoint: Copy) -> None:
    directory = copy_checkpoint()
    (directory / "pytorch_model.bin").write_bytes(b"nothing that could be read")

    assert same(read(directory), load_file(directory / "model.safetensors"))


@pytest.mark.parametrize("stored", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("asked", [torch.float32, torch.float16, torch.bfloat16])
def test_any_dtype_on_disk_is_brought_to_any_other(
    copy_checkpoint: Copy, stored: torch.dtype, asked: torch.dtype
) -> None:
    directory = copy_checkpoint()
    tensors = {name: tensor.to(stored) for name, tensor in taken(directory).items()}
    save_file(tensors, directory / "model.safetensors")

    assert same(read(directory, asked), {name: tensor.to(asked) for name, tensor in tensors.items()})


def test_a_model_that_was_saved_without_its_head_has_no_prefix(copy_checkpoint: Copy) -> None:
    directory = copy_checkpoint(tie_word_embeddings=True)
    tensors = taken(directory)
    save_file(
        {name.removeprefix("model."): tensor for name, tensor in tensors.items()}, directory / "model.safetensors"
    )

    assert same(read(directory), tensors)


def test_what_a_file_holds_beside_the_model_is_left_there(copy_checkpoint: Copy) -> None:
    directory = copy_checkpoint()
    tensors = taken(directory)
    beside = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    save_file(tensors | beside, directory / "model.safetensors")

    assert same(read(directory), tensors)


class TestDamage:
    def test_code_in_a_file_is_not_run(self, copy_checkpoint: Copy, tmp_path: Path) -> None:
        directory, proof = copy_checkpoint(), tmp_path / "it ran"
        taken(directory)

        class Code:
            def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
                return Path.touch, (proof,)

        torch.save({"a": Code()}, directory / "pytorch_model.bin")

        with pytest.raises(CheckpointError, match=r"pytorch_model\.bin cannot be read as tensors alone .*holds code"):
            read(directory)
        assert not proof.exists()

    @pytest.mark.parametrize("content", [b"", b"\x80", b"PK\x03\x04 and no more"])
    def test_a_file_that_is_damaged(self, copy_checkpoint: Copy, content: bytes) -> None:
        directory = copy_checkpoint()
        taken(directory)
        (directory / "pytorch_model.bin").write_bytes(content)

        with pytest.raises(CheckpointError, match=r"pytorch_model\.bin cannot be read") as refused:
            read(directory)
        assert "\n" not in str(refused.value)

    @pytest.mark.parametrize("content", [[1], {"model": {"a": torch.ones(1)}}])
    def test_a_file_of_another_form(self, copy_checkpoint: Copy, content: object) -> None:
        directory = copy_checkpoint()
        taken(directory)
        torch.save(content, directory / "pytorch_model.bin")

        with pytest.raises(CheckpointError, match="does not hold a model's tensors by name"):
            read(directory)

    def test_a_shard_without_what_its_index_names(self, copy_checkpoint: Copy) -> None:
        directory = copy_checkpoint()
        tensors = taken(directory)
        name = next(iter(tensors))
        torch.save({other: tensors[other] for other in tensors if other != name}, directory / "pytorch_model-1.bin")
        index = {"weight_map": dict.fromkeys(tensors, "pytorch_model-1.bin")}
        (directory / "pytorch_model.bin.index.json").write_text(json.dumps(index))

        with pytest.raises(CheckpointError, match=rf"pytorch_model-1\.bin has no tensor {name}"):
            read(directory)
