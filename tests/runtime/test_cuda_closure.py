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

from skote.flags import TORCH_DTYPES
from skote.kernels.gumbel_best_triton import gumbel_best_reference
from skote.model.adapters import load_spec
from skote.model.decoder import Decoder
from skote.model.spec import DecoderSpec, RopeSpec
from skote.model.weights import load_weights
from skote.runtime.cuda_closure import CudaClosure
from skote.runtime.cuda_graph import CudaStep
from skote.runtime.cuda_prefill import CudaPrefill
from skote.runtime.cutoff import cutoff
from skote.runtime.engine import SkotergyEngine
from skote.runtime.kernel_sets import SingleRow
from skote.runtime.paged_cache import PagedCache
from skote.types import EngineError, Request, Sampling

SPEC = DecoderSpec(97, 192, 96, 2, 6, 2, 16, 1e-5, 2048, RopeSpec(10000.0), False, ())


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


@pytest.fixture(scope="module", params=["fp32", "bf16", "fp16"])
def batching(directory: Path, request: pytest.FixtureRequest) -> SkotergyEngine:
    return build(directory, dtype=request.param, max_batch=8)


def batch_tokens(engine: SkotergyEngine, requests: list[Request]) -> list[list[int]]:
    out: list[list[int]] = [[] for _ in requests]
    engine.generate(requests, lambda row, new: out[row].extend(new))
    return out


SAMPLED = Sampling(temperature=0.8, top_k=20, top_p=0.9, seed=11)
MIXED = [
    Request(f"r{length}", prompt(length), 5 + length % 7, sampling, ignore_eos=True)
    for length, sampling in (
        (3, Sampling()), (70, SAMPLED), (255, Sampling()), (256, Sampling(1.3, seed=5)), (257, Sampling()),
        (600, Sampling(0.5, top_p=0.7, seed=-3)), (1030, Sampling()), (16, Sampling()), (40, SAMPLED), (64, Sampling()),
    )
]  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("length", [1, 31, 33, 63, 64, 255, 256, 511, 600, 1023, 1030, 2032])
def test_tokens_equal_the_plain_path_across_splits_and_pages(
    captured: SkotergyEngine, plain: SkotergyEngine, length: int
) -> None:
    ids = prompt(length)
    assert tokens(captured, ids, 17, ignore_eos=True) == tokens(plain, ids, 17, ignore_eos=True)


@pytest.mark.gpu
@pytest.mark.parametrize("length", [1, 63, 255, 256, 257, 511, 600, 1030, 2032])
def test_the_multi_row_set_equals_the_plain_path_across_chunks_and_pages(
    directory: Path, plain: SkotergyEngine, length: int
) -> None:
    request, forced = Request("r", prompt(length), 17, ignore_eos=True), prompt(17)
    engine = build(directory, max_batch=2)
    assert batch_tokens(engine, [request]) == batch_tokens(plain, [request])
    np.testing.assert_allclose(engine.score(request, forced), plain.score(request, forced), rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
def test_a_row_does_not_depend_on_its_batch(batching: SkotergyEngine) -> None:
    alone = [batch_tokens(batching, [request])[0] for request in MIXED]
    assert [len(each) for each in alone] == [request.max_new_tokens for request in MIXED]
    assert batch_tokens(batching, MIXED) == alone
    assert batch_tokens(batching, MIXED[::-1]) == alone[::-1]
    assert batch_tokens(batching, MIXED[3:6]) == alone[3:6]


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "tolerance"), [("fp32", 1e-5), ("fp16", 3e-3), ("bf16", 2e-2)])
def test_a_short_prompt_through_the_multi_row_kernels(directory: Path, dtype: str, tolerance: float) -> None:
    """Keys, values and logits are those of cuBLAS; 100 tokens are padded, 200 have a bucket that is not short."""
    device = torch.device("cuda:0")
    with torch.no_grad():
        spec = load_spec(directory)
        weights = load_weights(directory, spec, dtype=getattr(torch, TORCH_DTYPES[dtype]), device=device, random_seed=3)
        results = []
        for short in (0, 128):
            decoder, kernels = Decoder(spec, weights, 512), SingleRow(spec, weights, 512)
            page = kernels.attention.page
            cache = PagedCache(spec, -(-512 // page), 512, page=page, dtype=weights.norm.dtype, device=device)
            step = CudaStep(decoder, cache, kernels)
            prefill = CudaPrefill(decoder, cache, step, buckets=(16, 32, 64, 128, 256), short=short)
            left: dict[int, list[torch.Tensor]] = {}
            for length in (1, 16, 17, 33, 64, 100, 128, 200):
                decoder.paths.clear()
                prefill(prompt(length))
                torch.cuda.synchronize()
                assert ("gate_up_gemm" in {op for op, _ in decoder.paths}) == (length <= short)
                pools = [pool[:, :length].float() for layer in cache.layers for pool in layer]
                left[length] = [step.state.logits[0].clone(), *pools]
            results.append(left)
        for length, mine in results[1].items():
            for one, other in zip(mine, results[0][length], strict=True):
                assert (one - other).norm() <= tolerance * other.norm()


@pytest.mark.gpu
@pytest.mark.parametrize("max_batch", [1, 4])
def test_sampled_tokens_are_those_that_seed_and_logits_say(directory: Path, max_batch: int) -> None:
    engine = build(directory, max_batch=max_batch)
    request = Request("r", prompt(20), 40, SAMPLED)
    drawn = tokens(engine, request.input_ids, 40, sampling=SAMPLED, ignore_eos=True)
    logits = torch.from_numpy(engine.score(request, drawn))
    rows = len(drawn)
    temperature, top_p = torch.full((rows,), SAMPLED.temperature), torch.full((rows,), SAMPLED.top_p)
    top_k, seed = torch.full((rows,), SAMPLED.top_k), torch.full((rows,), SAMPLED.seed)
    kept = cutoff(logits, temperature, top_k, top_p)
    best, first = torch.zeros(rows, 1), torch.zeros(rows, 1, dtype=torch.int32)
    before = torch.arange(19, 19 + rows, dtype=torch.int32)
    gumbel_best_reference(logits, kept, temperature, seed, before, best, first)
    assert first[:, 0].tolist() == drawn
    again, other = (
        tokens(engine, request.input_ids, 40, sampling=replace(SAMPLED, seed=each), ignore_eos=True)
        for each in (11, 12)
    )
    assert again == drawn != other


@pytest.mark.gpu
def test_top_k_1_is_greedy(captured: SkotergyEngine) -> None:
    greedy = tokens(captured, prompt(20), 30, ignore_eos=True)
    assert tokens(captured, prompt(20), 30, ignore_eos=True, sampling=Sampling(1.5, top_k=1, seed=4)) == greedy


@pytest.mark.gpu
def test_scores_equal_the_plain_path(captured: SkotergyEngine, plain: SkotergyEngine) -> None:
    request, forced = Request("r", prompt(50), 12), prompt(12)
    np.testing.assert_allclose(captured.score(request, forced), plain.score(request, forced), rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("max_batch", [1, 4])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_the_same_request_gives_the_same_bits(directory: Path, dtype: str, max_batch: int) -> None:
    engine = build(directory, dtype=dtype, max_batch=max_batch)
    request, forced = Request("r", prompt(70), 9), prompt(9)
    first = engine.score(request, forced)
    for _ in range(50):
        assert np.array_equal(engine.score(request, forced), first)


@pytest.mark.gpu
@pytest.mark.parametrize("max_batch", [1, 4])
def test_a_request_after_one_that_was_left_early(directory: Path, max_batch: int) -> None:
    engine = build(directory, max_batch=max_batch)
    expected = tokens(engine, prompt(40), 12, ignore_eos=True)

    class Enough(Exception):
        pass

    def emit(_: int, new: Any) -> None:
        raise Enough

    with pytest.raises(Enough):
        engine.generate([Request("left", prompt(90), 30), Request("too", prompt(9), 30)], emit)
    assert tokens(engine, prompt(40), 12, ignore_eos=True) == expected
    scored = engine.score(Request("r", prompt(50), 12), prompt(12))
    with pytest.raises(Enough):
        engine.generate([Request("left", prompt(9), 30), Request("too", prompt(90), 30)], emit)
    assert np.array_equal(engine.score(Request("r", prompt(50), 12), prompt(12)), scored)


@pytest.mark.gpu
@pytest.mark.parametrize("max_batch", [1, 3])
def test_a_row_ends_at_the_end_of_text_and_the_others_go_on(directory: Path, max_batch: int) -> None:
    engine = build(directory, max_batch=max_batch)
    requests = [Request(f"r{length}", prompt(length), 40) for length in (20, 21, 22)]
    free = batch_tokens(engine, [replace(each, ignore_eos=True) for each in requests])
    ending = json.loads((directory / "config.json").read_text(encoding="utf-8")) | {"eos_token_id": free[1][6]}
    other = directory.parent / f"ending{max_batch}"
    other.mkdir()
    (other / "config.json").write_text(json.dumps(ending), encoding="utf-8")
    out: list[list[int]] = [[], [], []]
    reasons = build(other, max_batch=max_batch).generate(requests, lambda row, new: out[row].extend(new))
    for got, whole, reason in zip(out, free, reasons, strict=True):
        end = whole.index(free[1][6]) + 1 if free[1][6] in whole else 40
        assert got == whole[:end]
        assert reason == ("length" if end == 40 else "stop")
    assert len(out[1]) <= 7


@pytest.mark.gpu
@pytest.mark.parametrize("max_batch", [1, 4])
def test_the_last_slot_of_the_cache_is_used_and_nothing_beyond_it(
    directory: Path, plain: SkotergyEngine, max_batch: int
) -> None:
    engine = build(directory, max_batch=max_batch, max_model_len=300)
    requests = [Request(f"r{length}", prompt(length), 301 - length, ignore_eos=True) for length in (300, 299, 280, 260)]
    assert batch_tokens(engine, requests) == batch_tokens(plain, requests)


@pytest.mark.gpu
@pytest.mark.parametrize("buckets", [[], [64, 200]])
def test_buckets_change_nothing_but_what_is_captured(
    directory: Path, captured: SkotergyEngine, buckets: list[int]
) -> None:
    engine = build(directory, warmup_buckets=buckets)
    for length in (10, 64, 150, 500):
        assert tokens(engine, prompt(length), 9, ignore_eos=True) == tokens(
            captured, prompt(length), 9, ignore_eos=True
        )


@pytest.mark.gpu
@pytest.mark.parametrize("max_batch", [1, 4])
def test_nothing_is_captured_or_allocated_after_the_load(directory: Path, max_batch: int) -> None:
    engine = build(directory, dtype="bf16", max_batch=max_batch)
    batch_tokens(engine, MIXED)
    engine.score(MIXED[0], prompt(30))
    described = engine.describe()
    assert described["captures_after_warmup"] == 0
    assert described["allocations_after_warmup"] == 0
    assert described["kernel_set"] == ("single-row" if max_batch == 1 else "multi-row")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_the_peak_is_weights_and_cache_and_a_tenth(directory: Path, dtype: str) -> None:
    shape = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 8, "num_attention_heads": 32,
             "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 128256,
             "max_position_embeddings": 4096}  # fmt: skip
    config = json.loads((directory / "config.json").read_text(encoding="utf-8")) | shape
    path = directory.parent / f"wide_{dtype}"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    engine = build(path, dtype=dtype, max_model_len=4096)
    tokens(engine, tuple(range(4000)), 8, ignore_eos=True)
    element = 4 if dtype == "fp32" else 2
    weights, cache = engine.facts.parameters * element, engine.facts.kv_bytes_per_token(element) * 4096
    assert torch.cuda.max_memory_allocated() - before <= 1.1 * (weights + cache)


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("max_batch", [1, 8])
def test_a_thousand_repeats_give_the_same_tokens_and_logits(directory: Path, max_batch: int) -> None:
    """At the width of Llama-3.2-1B, in bf16."""
    shape = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 2, "num_attention_heads": 32,
             "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 128256}  # fmt: skip
    config = json.loads((directory / "config.json").read_text(encoding="utf-8")) | shape
    path = directory.parent / f"repeated{max_batch}"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    engine = build(path, dtype="bf16", max_batch=max_batch, max_model_len=256)
    request, forced = Request("r", prompt(70), 4, ignore_eos=True), prompt(4)
    expected, logits = batch_tokens(engine, [request]), engine.score(request, forced)
    for _ in range(1000):
        assert batch_tokens(engine, [request]) == expected
        assert np.array_equal(engine.score(request, forced), logits)


@pytest.mark.gpu
def test_weights_that_are_not_numbers_are_an_error(directory: Path) -> None:
    engine = build(directory)
    engine._closure._decoder.weights.norm.fill_(torch.nan)  # type: ignore[attr-defined]
    with pytest.raises(EngineError, match="logits of position 2 are not numbers"):
        tokens(engine, prompt(3), 4)


@pytest.mark.gpu
def test_what_ran_is_described(captured: SkotergyEngine) -> None:
    tokens(captured, prompt(5), 4, ignore_eos=True)
    described = captured.describe()
    assert "captured" in described["tier_reason"]
    assert described["paths"]["qkv_gemv"]["triton"] >= 3 * SPEC.layers
    assert described["compile_s"] > 0


@pytest.mark.gpu
def test_the_kernels_of_a_step_are_profiled(captured: SkotergyEngine) -> None:
    calls = {entry["kernel"]: entry["calls"] for entry in captured.profile_step()}
    assert calls["qkv_gemv_kernel"] == SPEC.layers
    assert calls["residual_gemv_kernel"] == 2 * SPEC.layers
    assert calls["head_gemv_kernel"] == calls["greedy_token_kernel"] == 1
