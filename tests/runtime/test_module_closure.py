"""Models without an adapter: eager here, and captured on a GPU, against Transformers' own generate."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from skote.engines.transformers import TransformersEngine
from skote.kernels.flash_decode_triton import flash_decode_reference
from skote.model.facts import module_facts
from skote.runtime import module_closure
from skote.runtime.engine import SkotergyEngine
from skote.runtime.module_cache import PAGE, DecodeAttention, ModuleCache
from skote.runtime.module_closure import ModuleClosure, difference
from skote.runtime.module_step import StaticStep
from skote.types import CapacityError, FinishReason, Request, Sampling

Make = Callable[..., Any]
Run = Callable[..., tuple[list[list[int]], list[FinishReason]]]


def prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    ids = torch.randint(3, 96, (length,), generator=torch.Generator().manual_seed(100 * length + seed))
    return tuple(ids.tolist())


def build(kind: Any, directory: Path, **options: Any) -> Any:
    return kind(**{"local_dir": str(directory), "device": "cpu", "dtype": "fp32"} | options)


def greedy(ids: Sequence[int], n: int, name: str = "r") -> Request:
    return Request(name, tuple(ids), n, ignore_eos=True)


@pytest.fixture(scope="module")
def engine(module_directory: Path) -> SkotergyEngine:
    made: SkotergyEngine = build(SkotergyEngine, module_directory)
    return made


@pytest.fixture(scope="module")
def baseline(module_directory: Path) -> TransformersEngine:
    made: TransformersEngine = build(TransformersEngine, module_directory)
    return made


class TestEager:
    def test_consecutive_requests_equal_generate(
        self, engine: SkotergyEngine, baseline: TransformersEngine, run: Run
    ) -> None:
        for length, n in ((40, 25), (5, 1), (12, 10), (1, 16)):
            expected = run(baseline, greedy(prompt(length), n))
            assert run(engine, greedy(prompt(length), n)) == expected
            assert n == 1 or len(set(expected[0][0])) > 3

    def test_a_batch_is_its_requests_one_after_another(self, engine: SkotergyEngine, run: Run) -> None:
        batch = [greedy(prompt(7), 6, "a"), greedy(prompt(3), 9, "b")]

        assert run(engine, *batch)[0] == [run(engine, each)[0][0] for each in batch]

    def test_the_end_token_ends_a_row(
        self, engine: SkotergyEngine, module_directory: Path, tmp_path: Path, run: Run
    ) -> None:
        tokens = run(engine, greedy(prompt(12), 10))[0][0]
        index = next(index for index in range(2, 10) if tokens[index] not in tokens[:index])
        for file in module_directory.iterdir():
            (tmp_path / file.name).write_bytes(file.read_bytes())
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, tokens[index]]}))
        stopping = build(SkotergyEngine, tmp_path)

        assert run(stopping, Request("a", prompt(12), 10)) == ([tokens[: index + 1]], ["stop"])
        assert run(stopping, greedy(prompt(12), 10)) == ([tokens], ["length"])

    def test_scores_equal_the_baselines(self, engine: SkotergyEngine, baseline: TransformersEngine) -> None:
        request, forced = greedy(prompt(9), 7), prompt(7, seed=1)

        np.testing.assert_allclose(engine.score(request, forced), baseline.score(request, forced), rtol=1e-5, atol=1e-5)

    def test_sampled_tokens_depend_on_the_seed(self, engine: SkotergyEngine, run: Run) -> None:
        def sampled(seed: int) -> list[list[int]]:
            return run(engine, Request("a", prompt(12), 15, Sampling(1.5, seed=seed), ignore_eos=True))[0]

        assert sampled(3) == sampled(3) != sampled(4)
        small = Request("a", prompt(12), 10, Sampling(1.0, top_p=1e-6), ignore_eos=True)
        assert run(engine, small) == run(engine, greedy(prompt(12), 10))

    def test_requests_that_do_not_fit_are_refused(self, module_directory: Path, run: Run) -> None:
        small = build(SkotergyEngine, module_directory, max_model_len=16)

        run(small, greedy(prompt(9), 8))
        with pytest.raises(CapacityError, match="needs 17 positions"):
            run(small, greedy(prompt(9), 9))
        with pytest.raises(CapacityError, match="outside the vocabulary of 96"):
            run(small, greedy((96,), 1))

    def test_it_is_described(self, engine: SkotergyEngine) -> None:
        described = json.loads(json.dumps(engine.describe()))

        assert described["tier"] == 3
        assert described["tier_reason"].startswith("SeedOssForCausalLM of Transformers ")
        assert "eager, sdpa attention, dynamic cache, because tier 2 needs a CUDA device; " in described["tier_reason"]
        assert "no tier 1, because model_type 'seed_oss' has no adapter" in described["tier_reason"]
        assert described["kv_cache_bytes"] is None
        assert described["max_model_len"] == 64
        assert engine.profile_step() == []


@pytest.mark.parametrize(
    "options",
    [{}, {"dtype": "bf16"}, {"layers": 1}, {"pad_id": 97}, {"random_seed": 5}, {"random_seed": 5, "layers": 1}],
    ids=str,
)
def test_both_arms_hold_the_same_weights(module_directory: Path, options: dict[str, Any]) -> None:
    mine, theirs = (
        build(kind, module_directory, **options).describe() for kind in (SkotergyEngine, TransformersEngine)
    )

    assert mine["weights_fingerprint"] == theirs["weights_fingerprint"]
    assert mine["parameters"] == theirs["parameters"]


def test_an_added_token_adds_one_row(module_directory: Path, engine: SkotergyEngine) -> None:
    request, forced = greedy(prompt(9), 3), prompt(3)

    logits = build(SkotergyEngine, module_directory, pad_id=96).score(request, forced)

    assert logits.shape == (3, 97)
    np.testing.assert_allclose(logits[:, :96], engine.score(request, forced), rtol=1e-5, atol=1e-5)


class TestChoice:
    """Tier 2 where it works, tier 3 with the reason where not, without a device that could capture."""

    @staticmethod
    def closure(module: Any, directory: Path) -> ModuleClosure:
        with torch.no_grad():
            return ModuleClosure(module, module_facts(module, directory, "of no adapter"), capacity=64, refusal=None)

    @pytest.fixture(autouse=True)
    def without_a_graph(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(StaticStep, "capture", lambda step: None)
        self.attend_with(monkeypatch, partial(flash_decode_reference, page=PAGE))

    @staticmethod
    def attend_with(monkeypatch: pytest.MonkeyPatch, attention: DecodeAttention) -> None:
        monkeypatch.setattr(module_closure, "flash_attention", lambda capacity: attention)

    @torch.no_grad()
    def test_a_step_that_agrees_is_taken(
        self, make_module: Make, module_directory: Path, engine: SkotergyEngine
    ) -> None:
        closure = self.closure(make_module("seed_oss, no adapter"), module_directory)
        described = closure.describe()
        request, forced = greedy(prompt(9), 7), prompt(7, seed=1)

        assert described["tier"] == 2
        assert described["tier_reason"].endswith("our attention and cache; no tier 1, because of no adapter")
        assert described["kv_cache_bytes"] == 2 * 2 * 2 * PAGE * 16 * 4  # layers, k and v, heads, slots, dims, fp32
        assert described["compile_s"] > 0
        np.testing.assert_allclose(closure.score(request, forced), engine.score(request, forced), rtol=1e-4, atol=1e-4)

    @torch.no_grad()
    def test_one_that_computes_something_else_is_not(
        self, make_module: Make, module_directory: Path, monkeypatch: pytest.MonkeyPatch, run: Run
    ) -> None:
        def forgetful(
            q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, position: torch.Tensor, table: torch.Tensor
        ) -> torch.Tensor:
            return flash_decode_reference(q, k, v, position - 1, table, page=PAGE)

        self.attend_with(monkeypatch, forgetful)
        module = make_module("seed_oss, no adapter")
        closure = self.closure(module, module_directory)

        assert closure.describe()["tier"] == 3
        assert "its logits came out" in closure.describe()["tier_reason"]
        assert module.config._attn_implementation == "sdpa"

    @torch.no_grad()
    def test_one_that_fails_says_why(
        self, make_module: Make, module_directory: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(_: StaticStep) -> None:
            raise RuntimeError("operation not permitted when stream is capturing\nand more")

        monkeypatch.setattr(StaticStep, "capture", fail)
        closure = self.closure(make_module("seed_oss, no adapter"), module_directory)

        reason = closure.describe()["tier_reason"]
        assert "because operation not permitted when stream is capturing; no tier 1" in reason
        assert closure.score(greedy((3, 4), 2), (5, 6)).shape == (2, 96)

    @pytest.mark.parametrize("name", ["stablelm", "phi3, windows"])
    def test_one_that_must_not_be_tried_is_not(self, make_module: Make, module_directory: Path, name: str) -> None:
        assert self.closure(make_module(name), module_directory).describe()["tier"] == 3


class TestDifference:
    ROWS = torch.tensor([[3.0, 4.0], [0.0, 5.0]])

    @staticmethod
    def asked(found: torch.Tensor, dtype: torch.dtype = torch.float32, layers: int = 1) -> str | None:
        class Text:
            num_hidden_layers = 1

        class Config:
            @staticmethod
            def get_text_config() -> type[Text]:
                return Text

        class Module:
            config = Config

        Module.dtype = dtype  # type: ignore[attr-defined]
        cache = ModuleCache(4, device=torch.device("cpu"), decode_attention=lambda *_: found)
        cache.layers |= dict.fromkeys(range(layers), (found, found))
        return difference(Module, cache, TestDifference.ROWS, found)

    @pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-4), (torch.float16, 1e-2), (torch.bfloat16, 5e-2)])
    def test_the_distance_counts_against_the_norm_of_its_row(self, dtype: torch.dtype, limit: float) -> None:
        """Both rows have norm 5, so that a shift of 5 times the limit in one place is the limit itself."""
        apart = torch.tensor([[0.0, 0.0], [5 * limit, 0.0]])

        assert self.asked(self.ROWS + 0.9 * apart, dtype) is None
        assert f"{limit:.0e} is allowed" in str(self.asked(self.ROWS + 1.1 * apart, dtype))

    def test_what_is_not_a_number_is_a_difference(self) -> None:
        assert "nan" in str(self.asked(self.ROWS * float("nan")))

    def test_a_layer_that_goes_another_way_is_told(self) -> None:
        assert self.asked(self.ROWS, layers=0) == "0 of its 1 layers use the attention function"


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["seed_oss, no adapter", "gemma, one more than the weight"])
class TestCaptured:
    @pytest.fixture
    def directory(self, make_module: Make, tmp_path: Path, name: str) -> Path:
        make_module(name, max_position_embeddings=1024).save_pretrained(tmp_path)
        return tmp_path

    def test_tokens_and_scores_equal_generate(self, directory: Path, run: Run) -> None:
        ours, theirs = (build(kind, directory, device="cuda:0") for kind in (SkotergyEngine, TransformersEngine))
        assert ours.describe()["tier"] == 2, ours.describe()["tier_reason"]

        for length, n in ((700, 300), (12, 40), (1, 20), (255, 4), (40, 1)):
            request = greedy(prompt(length), n)
            assert run(ours, request) == run(theirs, request)
        request, forced = greedy(prompt(20), 9), prompt(9, seed=1)
        np.testing.assert_allclose(ours.score(request, forced), theirs.score(request, forced), rtol=1e-3, atol=1e-3)
        sampled = Request("s", prompt(12), 10, Sampling(1.0, top_p=1e-6), ignore_eos=True)
        assert run(ours, sampled) == run(theirs, greedy(prompt(12), 10))
        assert ours.profile_step()

    def test_half_precision_is_captured_too(self, directory: Path) -> None:
        described = build(SkotergyEngine, directory, device="cuda:0", dtype="bf16").describe()
        assert described["tier"] == 2, described["tier_reason"]


@pytest.mark.gpu
def test_experts_are_right_in_whatever_tier_they_run(make_module: Make, tmp_path: Path, run: Run) -> None:
    """Where their routing waits for the device the capture fails, and must leave the device usable."""
    make_module("mixtral, experts").save_pretrained(tmp_path)
    ours, theirs = (build(kind, tmp_path, device="cuda:0") for kind in (SkotergyEngine, TransformersEngine))

    assert run(ours, greedy(prompt(12), 30)) == run(theirs, greedy(prompt(12), 30))
