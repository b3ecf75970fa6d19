"""The spec's arithmetic by hand, and its refusals."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from skote.model.adapters import load_spec
from skote.model.config_file import read_config, read_json
from skote.model.spec import DecoderSpec, RopeSpec
from skote.model.weights import tensor_shapes
from skote.types import CheckpointError

SPEC = DecoderSpec(
    vocab=10,
    hidden=6,
    intermediate=5,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=3,
    norm_eps=1e-5,
    max_positions=32,
    rope=RopeSpec(theta=10000.0),
    tied_embeddings=True,
    eos_ids=(2,),
)


def test_sizes_by_hand() -> None:
    # A layer: norms 6 + 6, q 12 x 6, k and v 6 x 6 each, o 6 x 12, gate, up and down 5 x 6 each.
    layer = 12 + 72 + 36 + 36 + 72 + 3 * 30
    embedding = 10 * 6

    assert SPEC.qkv_rows == (4 + 2 * 2) * 3
    assert SPEC.parameters == embedding + 2 * layer + 6
    assert SPEC.bytes_per_token(2) == 2 * (embedding + 2 * layer + 6)  # the table is read whole, as the head
    assert SPEC.kv_bytes_per_token(4) == 2 * 2 * 2 * 3 * 4

    untied = dataclasses.replace(SPEC, tied_embeddings=False)
    assert untied.parameters == SPEC.parameters + embedding
    assert untied.bytes_per_token(4) == 4 * SPEC.parameters  # of the table one row, which is not counted


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"norm_eps": 0.0}, r"norm_eps=0\.0; it must be a finite number above 0"),
        ({"norm_eps": math.nan}, r"norm_eps=nan"),
        ({"rope": RopeSpec(theta=-1.0)}, r"rope theta=-1\.0"),
        ({"rope": RopeSpec(theta=math.inf)}, r"rope theta=inf"),
    ],
)
def test_constants_are_finite_and_above_0(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(CheckpointError, match=rf"^config\.json gives {said}"):
        dataclasses.replace(SPEC, **changes)


@pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": True}, {"head_dim": 16}, {"num_key_value_heads": 6}])
def test_tensor_shapes_equal_those_that_transformers_saves(
    make_checkpoint: Callable[..., Path], changes: dict[str, Any]
) -> None:
    from safetensors import safe_open

    directory = make_checkpoint(**changes)
    with safe_open(directory / "model.safetensors", framework="np") as file:
        saved = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118 (not a mapping)

    assert tensor_shapes(load_spec(directory)) == saved


def test_a_token_beyond_the_vocabulary_adds_rows_and_one_inside_none() -> None:
    assert SPEC.with_token(9) is SPEC
    grown = SPEC.with_token(10)
    assert (grown.vocab, grown.added_tokens) == (11, 1)
    assert tensor_shapes(grown)["model.embed_tokens.weight"] == (11, 6)
    again = grown.with_token(12)
    assert (again.vocab, again.added_tokens) == (13, 3)


def test_fewer_layers_are_the_first_ones() -> None:
    names = tensor_shapes(SPEC.with_layers(1))

    assert not any("layers.1." in name for name in names)
    assert set(names) < set(tensor_shapes(SPEC))


@pytest.mark.parametrize("name", ["vocab", "hidden", "intermediate", "layers", "heads", "kv_heads", "head_dim"])
def test_sizes_below_one_are_refused(name: str) -> None:
    with pytest.raises(CheckpointError, match=f"{name}=0; it must be at least 1"):
        dataclasses.replace(SPEC, **{name: 0})


def test_heads_that_do_not_divide_are_refused() -> None:
    with pytest.raises(CheckpointError, match="4 attention heads cannot share 3"):
        dataclasses.replace(SPEC, kv_heads=3)


def test_a_directory_or_a_config_that_is_missing(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no model directory .*nowhere"):
        read_config(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        read_config(tmp_path)


@pytest.mark.parametrize("content", [b"{", b"", b"\xff\xfe{}"])
def test_a_file_that_is_not_json(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content)

    with pytest.raises(CheckpointError, match=r"config\.json is not readable JSON"):
        read_json(path)


@pytest.mark.parametrize("content", [[], 3, None, "text"])
def test_json_that_is_not_an_object(tmp_path: Path, content: object) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(content))

    with pytest.raises(CheckpointError, match=r"config\.json must hold a JSON object"):
        read_json(path)
