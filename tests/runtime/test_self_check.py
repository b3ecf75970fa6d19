"""Every load of tier 1 is held against Transformers; what differs is named, and another tier runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from skote.model.adapters import load_spec
from skote.model.decoder import Decoder
from skote.model.families import llama
from skote.model.spec import DecoderSpec
from skote.model.weights import load_weights
from skote.runtime.engine import SkotergyEngine
from skote.runtime.plain_closure import PlainClosure
from skote.runtime.self_check import SelfCheck
from skote.types import Request

Make = Callable[..., Path]
PROMPT = (5, 9, 40, 41, 7, 8, 60, 61, 62, 63, 64, 12)


def build(directory: Path, **options: Any) -> SkotergyEngine:
    return SkotergyEngine(**{"local_dir": str(directory), "device": "cpu", "dtype": "fp32", "compile": False} | options)


def misread(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> None:
    """Let the Llama adapter give another spec than the config.json's."""
    right = llama.spec
    monkeypatch.setattr(llama, "spec", lambda config: replace(right(config), **changes))


@pytest.mark.parametrize(
    "options", [{}, {"dtype": "bf16"}, {"dtype": "fp16"}, {"layers": 1}, {"pad_id": 97}, {"random_seed": 5}], ids=str
)
def test_what_agrees_runs_in_tier_1(make_checkpoint: Make, options: dict[str, Any]) -> None:
    described = build(make_checkpoint(), **options).describe()

    assert described["tier"] == 1
    assert described["self_check"]["difference"] is None
    assert 0 < described["self_check"]["distance"] <= described["self_check"]["allowed"]
    assert described["paths"] == {}  # what the check ran is not the user's


@pytest.mark.parametrize(
    ("changes", "place"),
    [
        ({"embedding_scale": 1.1}, "the embeddings differ"),
        ({"attention_scale": 0.5}, "layer 0 is the first that differs"),
        ({"windows": (None, 3)}, "layer 1 is the first that differs"),
        ({"logits_scale": 1.1}, "on framework ops no layer differs, so that the head or a kernel does"),
    ],
)
def test_an_adapter_that_is_wrong_is_refused_with_the_layer_and_the_tokens_are_right(
    make_checkpoint: Make,
    monkeypatch: pytest.MonkeyPatch,
    run: Callable[..., Any],
    reference_ids: Callable[..., list[int]],
    changes: dict[str, Any],
    place: str,
) -> None:
    misread(monkeypatch, **changes)
    engine = build(make_checkpoint())
    described = engine.describe()

    assert described["tier"] == 3
    assert "no tier 1, because its logits came out " in described["tier_reason"]
    assert described["tier_reason"].endswith(
        f"of their norm away from those of Transformers, 1e-03 is allowed; {place}"
    )
    assert described["self_check"]["difference"] is not None
    rows, _ = run(engine, Request("a", PROMPT, 12, ignore_eos=True))
    assert rows == [reference_ids(make_checkpoint(), PROMPT, 12)]


@torch.no_grad()
def test_a_step_that_differs_is_found_where_the_prefill_does_not(
    make_checkpoint: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder, closure = parts(make_checkpoint())
    check = SelfCheck(decoder, make_checkpoint(), None)
    assert check(closure.score).difference is None
    right = closure._step

    verdict = check(lambda request, forced: wrong(closure, monkeypatch, right).score(request, forced))

    assert str(verdict.difference).endswith("on framework ops no layer differs, so that the head or a kernel does")


def wrong(closure: PlainClosure, monkeypatch: pytest.MonkeyPatch, step: Callable[..., torch.Tensor]) -> PlainClosure:
    monkeypatch.setattr(closure, "_step", lambda token, position: step(token, max(position - 1, 0)))
    return closure


@torch.no_grad()
def test_what_is_not_a_number_differs(make_checkpoint: Make) -> None:
    decoder, closure = parts(make_checkpoint())
    check = SelfCheck(decoder, make_checkpoint(), None)

    assert "nan" in str(check(lambda request, forced: closure.score(request, forced) * torch.nan).difference)


def parts(directory: Path) -> tuple[Decoder, PlainClosure]:
    spec: DecoderSpec = load_spec(directory)
    weights = load_weights(directory, spec, dtype=torch.float32, device=torch.device("cpu"), random_seed=None)
    decoder = Decoder(spec, weights, 64)
    return decoder, PlainClosure(decoder, capacity=64, compiled=False)


def test_the_module_holds_no_weights_of_its_own(make_checkpoint: Make) -> None:
    from skote.model.causal_lm import module_over

    directory = make_checkpoint(tie_word_embeddings=True)
    decoder, _ = parts(directory)
    given = dict(decoder.weights.named(decoder.spec))
    module = module_over(directory, given.items(), device=torch.device("cpu"), layers=None)

    assert {name: tensor.data_ptr() for name, tensor in module.named_parameters()} == {
        name: tensor.data_ptr() for name, tensor in given.items()
    }
    assert module.lm_head.weight is module.model.embed_tokens.weight
