"""The captured closure: which models it takes, and, on a GPU, its tokens and logits against the plain path's."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from skote.model.spec import DecoderSpec, RopeSpec
from skote.runtime.cuda_closure import CudaClosure
from skote.runtime.engine import SkotergyEngine
from skote.types import Request, Sampling

SPEC = DecoderSpec(97, 64, 96, 2, 6, 2, 16, 1e-5, 2048, RopeSpec(10000.0), False, ())


def test_models_beyond_the_kernels_bounds_are_refused_with_the_reason() -> None:
    assert CudaClosure.refusal(SPEC) is None
    assert CudaClosure.refusal(replace(SPEC, head_dim=80)) == "head_dim 80 is not a power of two of at least 16"
    assert CudaClosure.refusal(replace(SPEC, head_dim=8)) == "head_dim 8 is not a power of two of at least 16"
    assert CudaClosure.refusal(replace(SPEC, intermediate=40000)) == "rows of 40000 weights are longer than 32768"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("shape")
    config = {
        "model_type": "llama",
        "vocab_size": SPEC.vocab,
        "hidden_size": SPEC.hidden,
        "intermediate_size": SPEC.intermediate,
        "num_hidden_layers": SPEC.layers,
        "num_attention_heads": SPEC.heads,
        "num_key_value_heads": SPEC.kv_heads,
        "head_dim": SPEC.head_dim,
        "max_position_embeddings": SPEC.max_positions,
        "rms_norm_eps": SPEC.norm_eps,
        "rope_theta": SPEC.rope.theta,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
    }
    (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return path


def build(directory: Path, **options: Any) -> SkotergyEngine:
    return SkotergyEngine(
        **{"local_dir": str(directory), "device": "cuda:0", "dtype": "fp32", "random_seed": 3} | options
    )


def tokens(engine: SkotergyEngine, ids: tuple[int, ...], n: int, **options: Any) -> list[int]:
    out: list[int] = []
    engine.generate([Request("r", ids, n, **options)], lambda _, new: out.extend(new))
    return out


def prompt(length: int) -> tuple[int, ...]:
    return tuple(torch.randint(0, SPEC.vocab, (length,), generator=torch.Generator().manual_seed(length)).tolist())


@pytest.fixture(scope="module")
def captured(directory: Path) -> SkotergyEngine:
    return build(directory)


@pytest.fixture(scope="module")
def plain(directory: Path) -> SkotergyEngine:
    return build(directory, compile=False)


@pytest.mark.gpu
@pytest.mark.parametrize("length", [1, 31, 33, 63, 64, 255, 256, 511, 600, 1023, 1030, 2032])
def test_tokens_equal_the_plain_path_across_splits_and_pages(
    captured: SkotergyEngine, plain: SkotergyEngine, length: int
) -> None:
    ids = prompt(length)
    assert tokens(captured, ids, 17, ignore_eos=True) == tokens(plain, ids, 17, ignore_eos=True)


@pytest.mark.gpu
def test_sampled_tokens_equal_the_plain_path(captured: SkotergyEngine, plain: SkotergyEngine) -> None:
    sampling = Sampling(temperature=0.9, top_p=0.8, seed=11)
    ours, theirs = (tokens(engine, prompt(20), 30, sampling=sampling) for engine in (captured, plain))
    assert ours == theirs


@pytest.mark.gpu
def test_scores_equal_the_plain_path(captured: SkotergyEngine, plain: SkotergyEngine) -> None:
    request, forced = Request("r", prompt(50), 12), prompt(12)
    np.testing.assert_allclose(captured.score(request, forced), plain.score(request, forced), rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_the_same_request_gives_the_same_bits(directory: Path, dtype: str) -> None:
    engine = build(directory, dtype=dtype)
    request, forced = Request("r", prompt(70), 9), prompt(9)
    first = engine.score(request, forced)
    for _ in range(50):
        assert np.array_equal(engine.score(request, forced), first)


@pytest.mark.gpu
def test_a_request_after_one_that_was_left_early(captured: SkotergyEngine) -> None:
    expected = tokens(captured, prompt(40), 12, ignore_eos=True)

    class Enough(Exception):
        pass

    def emit(_: int, new: Any) -> None:
        raise Enough

    with pytest.raises(Enough):
        captured.generate([Request("left", prompt(90), 30)], emit)
    assert tokens(captured, prompt(40), 12, ignore_eos=True) == expected


@pytest.mark.gpu
def test_what_ran_is_described(captured: SkotergyEngine) -> None:
    tokens(captured, prompt(5), 4, ignore_eos=True)
    described = captured.describe()
    assert "captured" in described["tier_reason"]
    assert described["paths"]["qkv_gemv"]["triton"] >= 3 * SPEC.layers
    assert described["compile_s"] > 0
