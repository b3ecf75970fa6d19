"""Every family through the engine: tier 1 after its self-check, alone, in a padded batch, and by the compiled step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from skote.model.adapters import load_spec
from skote.runtime.engine import SkotergyEngine
from skote.runtime.tier_choice import tier_1_refusal
from skote.types import Request
from tests.model.tiny_families import KERNEL_MODELS, MODELS, VOCAB, make_model

PROMPTS = [
    tuple(torch.randint(3, VOCAB, (length,), generator=torch.Generator().manual_seed(length)).tolist())
    for length in (31, 4, 17)
]
POSITIONS = 100  # phi4 mini rotates otherwise beyond 120


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny products gain nothing by threads, which on a busy machine wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def build(directory: Path, **options: Any) -> SkotergyEngine:
    options = {"device": "cpu", "dtype": "fp32", "compile": False, "max_model_len": POSITIONS} | options
    return SkotergyEngine(local_dir=str(directory), **options)


ONE_A_FAMILY = {model_type: name for name, (model_type, _) in MODELS.items()}


@pytest.mark.parametrize("name", ONE_A_FAMILY.values())
def test_a_padded_batch_is_its_rows_alone_and_both_are_checked(
    tmp_path: Path, run: Callable[..., Any], name: str
) -> None:
    make_model(name, tmp_path)
    engine = build(tmp_path)
    described = engine.describe()
    requests = [Request(f"r{index}", ids, 12, ignore_eos=True) for index, ids in enumerate(PROMPTS)]

    assert described["tier"] == 1, described["tier_reason"]
    assert described["self_check"]["distance"] < 1e-4
    assert f"model_type {MODELS[name][0]} has an adapter" in described["tier_reason"]
    assert run(engine, *requests)[0] == [run(engine, request)[0][0] for request in requests]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gemma3", "mixtral", "stablelm 2 12b"])
def test_the_compiled_step_is_the_plain_one(tmp_path: Path, name: str) -> None:
    make_model(name, tmp_path)
    plain = build(tmp_path)
    torch._dynamo.reset()
    compiled = build(tmp_path, compile=True)
    described = compiled.describe()
    request, forced = Request("a", PROMPTS[1], 60), tuple(PROMPTS[0] * 2)[:60]

    assert described["compile_s"], described["notes"]
    assert described["self_check"]["distance"] < 1e-4
    np.testing.assert_allclose(compiled.score(request, forced), plain.score(request, forced), rtol=0, atol=1e-4)
    other = plain.score(Request("b", PROMPTS[2], 60), forced)
    np.testing.assert_allclose(compiled.score(Request("b", PROMPTS[2], 60), forced), other, rtol=0, atol=1e-4)
    torch._dynamo.reset()


def test_both_arms_hold_the_same_weights_drawn_or_read(tmp_path: Path) -> None:
    from skote.engines.transformers import TransformersEngine

    asked: list[tuple[str, dict[str, Any]]] = [
        ("gpt2", {"random_seed": 3}),
        ("mixtral", {"random_seed": 3}),
        ("glm4", {"layers": 1}),
        ("falcon 40b", {"pad_id": VOCAB + 2}),
    ]
    for name, options in asked:
        directory = tmp_path / name
        make_model(name, directory)
        ours = build(directory, **options)
        theirs = TransformersEngine(local_dir=str(directory), device="cpu", dtype="fp32", **options)
        request = Request("a", PROMPTS[1], 6)

        assert ours.describe()["weights_fingerprint"] == theirs.describe()["weights_fingerprint"]
        assert ours.describe()["parameters"] == theirs.describe()["parameters"]
        np.testing.assert_allclose(
            ours.score(request, PROMPTS[2][:6]), theirs.score(request, PROMPTS[2][:6]), rtol=0, atol=1e-4
        )


def test_the_baseline_caps_scores_where_the_model_does(tmp_path: Path) -> None:
    """Whatever attention Transformers would choose for itself."""
    from skote.engines.transformers import TransformersEngine

    make_model("gemma2", tmp_path)
    theirs = TransformersEngine(local_dir=str(tmp_path), device="cpu", dtype="fp32")

    assert "eager attention" in theirs.describe()["tier_reason"]


@pytest.mark.gpu
@pytest.mark.parametrize("max_batch", [1, 4])
@pytest.mark.parametrize("name", MODELS | KERNEL_MODELS)
def test_on_cuda_the_tokens_are_transformers_in_whatever_tier(
    tmp_path: Path, run: Callable[..., Any], name: str, max_batch: int
) -> None:
    """Tier 1 where the kernels know the model, and its self-check agrees in each dtype.

    In half precision within four times what Transformers' own rounding changes, where that is more than is allowed:
    some of these models, drawn so that every switch matters, magnify it.
    """
    from skote.engines.transformers import TransformersEngine

    make_model(name, tmp_path)
    options = {"device": "cuda:0", "compile": True, "max_batch": max_batch}
    ours = build(tmp_path, **options)
    theirs = TransformersEngine(local_dir=str(tmp_path), device="cuda:0", dtype="fp32")
    described = ours.describe()
    spec = load_spec(tmp_path).within(POSITIONS)
    takes = tier_1_refusal(spec, POSITIONS, captured=True) is None

    assert (described["tier"] == 1) == takes, described["tier_reason"]
    assert takes or name not in KERNEL_MODELS
    for ids in PROMPTS:
        request = Request("a", ids, 40, ignore_eos=True)
        assert run(ours, request) == run(theirs, request), described["tier_reason"]
    if takes:
        request, forced = Request("a", PROMPTS[0], 17), PROMPTS[2]
        truth = theirs.score(request, forced)
        for dtype in ("fp32", "bf16", "fp16"):
            check = build(tmp_path, **options | {"dtype": dtype}).describe()["self_check"]
            rounded = TransformersEngine(local_dir=str(tmp_path), device="cuda:0", dtype=dtype).score(request, forced)
            rounding = float(np.linalg.norm(rounded - truth) / np.linalg.norm(truth))
            assert check["distance"] <= max(check["allowed"], 4 * rounding), check
