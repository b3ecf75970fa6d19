"""Every family against Transformers: the same tokens, the same logits, and no switch that could be left out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from skote.model.adapters import FAMILIES, load_spec
from skote.model.decoder import Decoder
from skote.model.fingerprint import fingerprint
from skote.model.spec import DecoderSpec, RopeSpec
from skote.model.weights import load_weights, tensor_shapes
from skote.runtime.cache import StaticCache
from skote.types import CheckpointError
from tests.model.tiny_families import MODELS, POSITIONS, VOCAB, make_model

CPU = torch.device("cpu")
PROMPTS = [
    torch.randint(3, VOCAB, (length,), generator=torch.Generator().manual_seed(length)) for length in (1, 2, 9, 23, 40)
]
NEW_TOKENS = 64
Made = Callable[[str], tuple[Path, PreTrainedModel]]
EVERY = pytest.mark.parametrize("name", MODELS)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny products gain nothing by threads, which on a busy machine wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """A directory with the model of that name, and the model; read only."""
    found: dict[str, tuple[Path, PreTrainedModel]] = {}

    def make(name: str) -> tuple[Path, PreTrainedModel]:
        if name not in found:
            directory = tmp_path_factory.mktemp("family")
            found[name] = directory, make_model(name, directory)
        return found[name]

    return make


def decoder_of(directory: Path, spec: DecoderSpec) -> Decoder:
    weights = load_weights(directory, spec, dtype=torch.float32, device=CPU, random_seed=None)
    return Decoder(spec, weights, POSITIONS)


@torch.no_grad()
def greedy(decoder: Decoder, prompt: torch.Tensor, count: int) -> tuple[list[int], torch.Tensor]:
    """`count` tokens after `prompt`, one at a time, and the logits that they were chosen from."""
    cache = StaticCache(decoder.spec, 1, POSITIONS, dtype=torch.float32, device=CPU)
    ids, length, tokens, rows = prompt[None], 0, [], []
    for _ in range(count):
        positions = torch.arange(length, length + ids.shape[1])[None]
        length += ids.shape[1]
        rows.append(decoder.forward(ids, cache.layers, torch.zeros(1, length), positions)[0])
        tokens.append(int(rows[-1].argmax()))
        ids = torch.tensor([[tokens[-1]]])
    return tokens, torch.stack(rows)


@torch.no_grad()
def reference(model: PreTrainedModel, prompt: torch.Tensor, tokens: list[int]) -> torch.Tensor:
    """Transformers' logits after the prompt and after each of `tokens` but the last."""
    ids = torch.cat((prompt, torch.tensor(tokens[:-1], dtype=torch.int64)))
    logits: torch.Tensor = model(ids[None]).logits[0, len(prompt) - 1 :]
    return logits


def test_every_family_is_tried() -> None:
    assert {model_type for model_type, _ in MODELS.values()} == set(FAMILIES)


@EVERY
def test_the_same_64_tokens_and_logits_as_transformers(made: Made, name: str) -> None:
    """Tokens chosen here are those that Transformers chooses after the same ones before: both write the same text."""
    directory, model = made(name)
    decoder = decoder_of(directory, load_spec(directory))
    written = set()
    for prompt in PROMPTS:
        tokens, logits = greedy(decoder, prompt, NEW_TOKENS)
        expected = reference(model, prompt, tokens)

        assert tokens == expected.argmax(-1).tolist()
        torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4)
        assert float(expected.std()) >= 1
        written |= set(tokens)
    assert len(written) > 5


@EVERY
def test_no_switch_can_be_left_out(made: Made, name: str) -> None:
    """A spec with one switch back at Llama's value asks for other tensors, or gives other logits."""
    directory, model = made(name)
    spec, prompt = load_spec(directory), PROMPTS[-1]
    expected = reference(model, prompt, [0] * 20)
    for changes in without_one(spec):
        try:
            decoder = decoder_of(directory, replace(spec, **changes))
        except CheckpointError:
            continue
        found = forced(decoder, prompt, [0] * 20)

        assert (found - expected).abs().max() > 1e-2, changes


@torch.no_grad()
def forced(decoder: Decoder, prompt: torch.Tensor, tokens: list[int]) -> torch.Tensor:
    """As `reference`, by the lean decoder, the tokens one at a time."""
    cache = StaticCache(decoder.spec, 1, POSITIONS, dtype=torch.float32, device=CPU)
    rows = []
    for start, ids in enumerate((prompt, *torch.tensor(tokens[:-1]).split(1))):
        first = 0 if start == 0 else len(prompt) + start - 1
        positions = torch.arange(first, first + len(ids))[None]
        rows.append(decoder.forward(ids[None], cache.layers, torch.zeros(1, first + len(ids)), positions)[0])
    return torch.stack(rows)


LAYOUT = ("rotary_dim", "rope_interleaved", "qkv_order", "transposed")


def without_one(spec: DecoderSpec) -> list[dict[str, Any]]:
    """Changes that put each switch of a spec back, one at a time, and its rotation to one that is not stretched."""
    defaults = {field.name: field.default for field in fields(DecoderSpec)}
    on = [*spec.switches(), *(name for name in LAYOUT if getattr(spec, name) != defaults[name])]
    changes = [{name: defaults[name]} for name in on]
    if spec.rope is not None and spec.rope.kind not in ("default", "dynamic") and not spec.ropes:
        changes.append({"rope": RopeSpec(spec.rope.theta)})
        if spec.rope.amplitude != 1.0:
            changes.append({"rope": replace(spec.rope, amplitude=1.0)})
    return changes


@EVERY
def test_names_shapes_and_fingerprint_are_those_of_transformers(made: Made, name: str) -> None:
    from safetensors import safe_open

    directory, model = made(name)
    spec = load_spec(directory)
    with safe_open(directory / "model.safetensors", framework="np") as file:
        saved = {each: tuple(file.get_slice(each).get_shape()) for each in file.keys()}  # noqa: SIM118 (not a mapping)
    spelled = {next(each for each in spec.names.in_files(key) if each in saved): shape for key, shape in
               tensor_shapes(spec).items()}  # fmt: skip
    weights = load_weights(directory, spec, dtype=torch.float32, device=CPU, random_seed=None)

    assert spelled == saved
    assert weights.fingerprint(spec) == fingerprint(model.named_parameters())
    assert spec.parameters == sum(parameter.numel() for parameter in model.parameters())
