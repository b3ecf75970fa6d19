"""The captured closure against Transformers on a GPU: real weights where the package that carries them is installed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

pytest.importorskip("triton")

from skote.config import CONF_DIR
from skote.engines.transformers import TransformersEngine
from skote.eval.parity import forced_errors, forced_parity
from skote.eval.prompts import load_prompts
from skote.flags import applied, flags_for
from skote.model.source import converted_gguf, packaged_gguf
from skote.runtime.engine import SkotergyEngine
from skote.runtime.text import load_tokenizer
from skote.types import Request

pytestmark = [pytest.mark.gpu, pytest.mark.slow]


def model_config(name: str) -> dict[str, object]:
    config: dict[str, object] = yaml.safe_load((CONF_DIR / "model" / f"{name}.yaml").read_text(encoding="utf-8"))
    return config


@pytest.fixture(scope="module")
def smollm2() -> Path:
    config = model_config("smollm2_135m")
    gguf_path = packaged_gguf(str(config["package"]), str(config["file"]))
    if gguf_path is None:
        pytest.skip(f"the package {config['package']} with the real weights is not installed")
    return converted_gguf(gguf_path, None, print)


@pytest.fixture(scope="module")
def prompts(smollm2: Path) -> list[tuple[int, ...]]:
    codec = load_tokenizer(smollm2)
    sentences = load_prompts("sentences")
    return [codec.encode_chat(text) for text in (*load_prompts("chat"), *sentences[:28])]


def ours(directory: Path, dtype: str, **options: object) -> SkotergyEngine:
    return SkotergyEngine(local_dir=str(directory), device="cuda:0", dtype=dtype, **options)


def theirs(directory: Path, dtype: str, **options: object) -> TransformersEngine:
    return TransformersEngine(local_dir=str(directory), device="cuda:0", dtype=dtype, score_at_once=True, **options)


def generated(engine: SkotergyEngine, ids: Sequence[int], n: int) -> tuple[int, ...]:
    out: list[int] = []
    engine.generate([Request("r", tuple(ids), n, ignore_eos=True)], lambda _, new: out.extend(new))
    return tuple(out)


@pytest.mark.parametrize("max_batch", [1, 4])
def test_fp32_tokens_are_those_that_transformers_chooses(
    smollm2: Path, prompts: list[tuple[int, ...]], max_batch: int
) -> None:
    """100 prompts x 128 tokens. That each token is the best after those before it is, by induction, a greedy output."""
    assert len(prompts) == 100
    with applied(flags_for("fp32", 4)):
        engine = ours(smollm2, "fp32", max_model_len=1024, max_batch=max_batch)
        reference = theirs(smollm2, "fp32")
        for ids in prompts:
            tokens = generated(engine, ids, 128)
            logits = reference.score(Request("r", ids, 128), tokens)
            assert tuple(logits.argmax(-1).tolist()) == tokens


@pytest.mark.parametrize("max_batch", [1, 4])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_the_error_in_half_precision_is_no_worse_than_that_of_transformers(
    smollm2: Path, prompts: list[tuple[int, ...]], dtype: str, max_batch: int
) -> None:
    with applied(flags_for(dtype, 4)):
        engine = ours(smollm2, dtype, max_model_len=1024, max_batch=max_batch)
        peer, reference = theirs(smollm2, dtype), theirs(smollm2, "fp32")
        errors = []
        for ids in prompts[::2]:
            forced = generated(engine, ids, 32)
            request = Request("r", ids, 32)
            logits = [each.score(request, forced) for each in (engine, peer, reference)]
            errors.append(forced_errors(*logits, forced))
    entry = forced_parity(errors, 0, [], len(errors), seed=0)
    print(entry["sentence"])
    assert entry["passed"]


EDGES = (1, 63, 64, 65, 127, 128, 129, 255, 256, 257, 511, 512, 513, 1023, 1024, 1025, 2047, 2048, 2049, 4096, 4097)


@pytest.mark.parametrize("max_batch", [1, 2])
def test_logits_at_the_edges_of_splits_pages_and_the_cache(
    smollm2: Path, prompts: list[tuple[int, ...]], max_batch: int
) -> None:
    text = tuple(token for ids in prompts * 4 for token in ids)
    with applied(flags_for("fp32", 4)):
        engine = ours(smollm2, "fp32", max_model_len=8192, max_batch=max_batch)
        reference = theirs(smollm2, "fp32")
        for length in (*EDGES, 8189):  # the last of its three steps reads and writes the last slot
            request, forced = Request("r", text[:length], 4), text[length : length + 4]
            np.testing.assert_allclose(
                engine.score(request, forced), reference.score(request, forced), atol=2e-3, rtol=0, err_msg=str(length)
            )


def test_logits_beyond_the_positions_that_the_rotation_was_made_for(tmp_path: Path) -> None:
    """Llama 3's scaled frequencies, at positions around and beyond its original 8192."""
    (tmp_path / "config.json").write_text(json.dumps(model_config("llama32_1b_shape")["shape"]), encoding="utf-8")
    ids = tuple(torch.randint(0, 128256, (16390,), generator=torch.Generator().manual_seed(1)).tolist())
    with applied(flags_for("fp32", 4)):
        engine = ours(tmp_path, "fp32", random_seed=0, layers=2, max_model_len=16390)
        reference = theirs(tmp_path, "fp32", random_seed=0, layers=2)
        for length in (8190, 8192, 12345, 16384):
            request, forced = Request("r", ids[:length], 4), ids[length : length + 4]
            np.testing.assert_allclose(
                engine.score(request, forced), reference.score(request, forced), atol=2e-3, rtol=0, err_msg=str(length)
            )
