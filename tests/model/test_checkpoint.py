"""Tensors from files and from chance, fingerprints, and what is said about a damaged directory."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from skote.model.adapters import load_spec
from skote.model.checkpoint import fill_random, load_tensors
from skote.model.fingerprint import fingerprint
from skote.model.spec import DecoderSpec
from skote.model.weights import load_weights, tensor_shapes
from skote.types import CheckpointError

CPU = torch.device("cpu")
UP = "model.layers.1.mlp.up_proj.weight"


def read(directory: Path, pad_id: int = 0, **changes: Any) -> dict[str, torch.Tensor]:
    spec = load_spec(directory).with_token(pad_id)
    options = {"dtype": torch.float32, "device": CPU} | changes
    return dict(load_tensors(directory, spec, tensor_shapes(spec), **options))


def drawn(name: str, shape: tuple[int, ...], seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    place = torch.empty(shape, dtype=dtype)
    fill_random(place, name, seed)
    return place


def random_weights(directory: Path, spec: DecoderSpec) -> dict[str, torch.Tensor]:
    weights = load_weights(directory, spec, dtype=torch.float32, device=CPU, random_seed=4)
    return dict(weights.named(spec))


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(one[name].equal(other[name]) for name in one)


def rewrite(directory: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> Path:
    path = directory / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})
    return path


def shard(directory: Path) -> dict[str, str]:
    """Split model.safetensors in two files with an index; returns the weight map."""
    single = directory / "model.safetensors"
    tensors = load_file(single)
    names = sorted(tensors)
    weight_map = {}
    for number, part in enumerate((names[:7], names[7:]), start=1):
        file = f"model-0000{number}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, directory / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    single.unlink()
    write_index(directory, {"metadata": {}, "weight_map": weight_map})
    return weight_map


def write_index(directory: Path, content: object) -> Path:
    path = directory / "model.safetensors.index.json"
    path.write_text(json.dumps(content))
    return path


@pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": True}])
def test_every_tensor_as_it_was_saved(make_checkpoint: Callable[..., Path], changes: dict[str, Any]) -> None:
    directory = make_checkpoint(**changes)

    assert same(read(directory), load_file(directory / "model.safetensors"))


def test_another_dtype_is_rounded_once(make_checkpoint: Callable[..., Path]) -> None:
    saved = load_file(make_checkpoint() / "model.safetensors")

    assert same(
        read(make_checkpoint(), dtype=torch.bfloat16), {name: tensor.bfloat16() for name, tensor in saved.items()}
    )


def test_a_sharded_checkpoint_holds_the_same_tensors(
    make_checkpoint: Callable[..., Path], copy_checkpoint: Callable[..., Path]
) -> None:
    directory = copy_checkpoint()
    shard(directory)

    assert same(read(directory), read(make_checkpoint()))


def test_added_tokens_are_rows_of_zeros(make_checkpoint: Callable[..., Path]) -> None:
    plain, grown = read(make_checkpoint()), read(make_checkpoint(), pad_id=97)

    for name, tensor in grown.items():
        if name in ("model.embed_tokens.weight", "lm_head.weight"):
            assert tensor.shape == (98, 48)
            assert tensor[:96].equal(plain[name])
            assert tensor[96:].eq(0).all()
        else:
            assert tensor.equal(plain[name])


def test_random_tensors_depend_on_seed_and_name_alone() -> None:
    def draw(name: str, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return drawn(name, (300, 40), seed, dtype)

    torch.manual_seed(1)
    first = draw("a", 5)
    torch.manual_seed(2)

    assert draw("a", 5).equal(first)
    assert not draw("b", 5).equal(first)
    assert not draw("a", 6).equal(first)
    assert draw("a", 5, torch.bfloat16).equal(first.bfloat16())
    assert abs(float(first.mean())) < 5 * 40**-0.5 / 12000**0.5
    assert float(first.std()) == pytest.approx(40**-0.5, rel=0.03)


def test_random_norms_are_ones_and_biases_are_drawn() -> None:
    norm, bias = (drawn(name, (700,), 5, torch.float16) for name in ("norm.weight", "q_proj.bias"))

    assert norm.eq(1).all()
    assert float(bias.float().std()) == pytest.approx(0.02, rel=0.1)


def test_random_weights_need_no_files_and_are_cut_by_layers(
    tmp_path: Path, make_checkpoint: Callable[..., Path]
) -> None:
    (tmp_path / "config.json").write_bytes((make_checkpoint() / "config.json").read_bytes())
    spec = load_spec(tmp_path)

    whole, first = (random_weights(tmp_path, each) for each in (spec, spec.with_layers(1)))

    assert whole.keys() == tensor_shapes(spec).keys()
    assert same(first, {name: tensor for name, tensor in whole.items() if "layers.1." not in name})


def test_an_added_token_leaves_random_weights_as_they_were(make_checkpoint: Callable[..., Path]) -> None:
    spec = load_spec(make_checkpoint())
    plain, grown = (random_weights(make_checkpoint(), each) for each in (spec, spec.with_token(96)))

    assert grown["lm_head.weight"][:96].equal(plain["lm_head.weight"])
    assert grown["lm_head.weight"][96:].eq(0).all()


class TestFingerprint:
    @staticmethod
    def tensors() -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(1)
        return {"a": torch.randn(4, 6, generator=generator), "b": torch.randn(9, generator=generator).bfloat16()}

    def test_order_and_memory_layout_do_not_matter(self) -> None:
        tensors = self.tensors()
        strided = {"b": tensors["b"], "a": tensors["a"].t().contiguous().t()}

        assert fingerprint(strided.items()) == fingerprint(tensors.items())

    def test_it_is_the_same_whatever_the_chunk(self, monkeypatch: pytest.MonkeyPatch) -> None:
        whole = fingerprint(self.tensors().items())
        monkeypatch.setattr("skote.model.fingerprint._CHUNK", 5)

        assert fingerprint(self.tensors().items()) == whole

    @pytest.mark.parametrize("change", ["bit", "swap", "name", "shape", "dtype", "sign of zero"])
    def test_any_change_changes_it(self, change: str) -> None:
        before = self.tensors()
        before["a"][0, 0] = 0.0
        after = {name: tensor.clone() for name, tensor in before.items()}
        if change == "bit":
            after["a"].view(torch.int32)[1, 2] ^= 1
        elif change == "swap":
            after["a"][2] = before["a"][2].flip(0)
        elif change == "name":
            after["c"] = after.pop("a")
        elif change == "shape":
            after["a"] = after["a"].view(6, 4)
        elif change == "dtype":
            after["b"] = after["b"].view(torch.float16)
        else:
            after["a"][0, 0] = -0.0

        assert fingerprint(after.items()) != fingerprint(before.items())


class TestDamage:
    """One sentence each, that names the file."""

    def test_no_weights(self, copy_checkpoint: Callable[..., Path]) -> None:
        directory = copy_checkpoint()
        (directory / "model.safetensors").unlink()

        with pytest.raises(CheckpointError, match=r"copy has no weights: expected model\.safetensors"):
            read(directory)

    @pytest.mark.parametrize("value", [float("nan"), float("inf")])
    def test_values_that_are_not_finite(self, copy_checkpoint: Callable[..., Path], value: float) -> None:
        directory = copy_checkpoint()
        path = rewrite(directory, lambda tensors: tensors[UP].view(-1)[3:4].fill_(value))

        with pytest.raises(CheckpointError) as refused:
            read(directory)
        assert str(refused.value) == f"{path} holds {UP} with values that are not finite: it is damaged."

    @pytest.mark.parametrize("keep", [0, 7, 60, 5000])
    def test_a_truncated_file(self, copy_checkpoint: Callable[..., Path], keep: int) -> None:
        path = copy_checkpoint() / "model.safetensors"
        path.write_bytes(path.read_bytes()[:keep])

        with pytest.raises(CheckpointError, match=r"model\.safetensors cannot be read .* damaged or incomplete"):
            read(path.parent)

    def test_a_file_of_something_else(self, copy_checkpoint: Callable[..., Path]) -> None:
        path = copy_checkpoint() / "model.safetensors"
        path.write_bytes(b"\xff" * 100)

        with pytest.raises(CheckpointError, match=r"model\.safetensors cannot be read"):
            read(path.parent)

    def test_a_missing_tensor(self, copy_checkpoint: Callable[..., Path]) -> None:
        path = rewrite(copy_checkpoint(), lambda tensors: tensors.pop(UP))

        with pytest.raises(CheckpointError, match=rf"copy has no tensor {UP}"):
            read(path.parent)

    def test_a_tensor_of_another_shape(self, copy_checkpoint: Callable[..., Path]) -> None:
        path = rewrite(copy_checkpoint(), lambda tensors: tensors.update({UP: torch.zeros(3, 48)}))

        with pytest.raises(CheckpointError, match=rf"model\.safetensors holds {UP} as \(3, 48\), .*\(80, 48\)"):
            read(path.parent)

    def test_a_shard_that_is_missing(self, copy_checkpoint: Callable[..., Path]) -> None:
        directory = copy_checkpoint()
        shard(directory)
        (directory / "model-00002-of-00002.safetensors").unlink()

        with pytest.raises(CheckpointError, match=r"model-00002-of-00002\.safetensors cannot be read"):
            read(directory)

    def test_an_index_that_names_the_wrong_shard(self, copy_checkpoint: Callable[..., Path]) -> None:
        directory = copy_checkpoint()
        weight_map = shard(directory) | {UP: "model-00001-of-00002.safetensors"}
        write_index(directory, {"weight_map": weight_map})

        with pytest.raises(CheckpointError, match=r"model-00001-of-00002\.safetensors cannot be read .*up_proj"):
            read(directory)

    @pytest.mark.parametrize("content", [[], 3, {}, {"weight_map": []}, {"weight_map": {UP: 3}}])
    def test_an_index_of_another_form(self, copy_checkpoint: Callable[..., Path], content: object) -> None:
        directory = copy_checkpoint()
        write_index(directory, content)

        with pytest.raises(CheckpointError, match=r"model\.safetensors\.index\.json (is not an index|must hold)"):
            read(directory)

    def test_an_index_that_is_not_json(self, copy_checkpoint: Callable[..., Path]) -> None:
        directory = copy_checkpoint()
        (directory / "model.safetensors.index.json").write_bytes(b"\xff{")

        with pytest.raises(CheckpointError, match=r"model\.safetensors\.index\.json is not readable JSON"):
            read(directory)
