"""Our engine, token for token and logit for logit, against Transformers and against itself."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from skote.flags import applied, flags_for
from skote.model.adapters import load_spec
from skote.runtime.engine import SkotergyEngine
from skote.types import CapacityError, CheckpointError, FinishReason, Request, RequestError, Sampling, UsageError

Run = Callable[..., tuple[list[list[int]], list[FinishReason]]]
Reference = Callable[[Path, Sequence[int], int], list[int]]
Make = Callable[..., Path]

MODELS = {
    "grouped": {},
    "one kv head a head": {"num_key_value_heads": 6},
    "tied": {"tie_word_embeddings": True},
    "wide heads": {"head_dim": 16},
    "linear rope": {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}},
    "llama3 rope": {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        }
    },
}


def prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    ids = torch.randint(3, 96, (length,), generator=torch.Generator().manual_seed(100 * length + seed))
    return tuple(ids.tolist())


def build(directory: Path, **options: Any) -> SkotergyEngine:
    return SkotergyEngine(**{"local_dir": str(directory), "device": "cpu", "dtype": "fp32", "compile": False} | options)


def greedy(ids: tuple[int, ...], n: int, name: str = "r") -> Request:
    return Request(name, ids, n, ignore_eos=True)


@pytest.fixture(scope="module")
def engine(make_checkpoint: Make) -> SkotergyEngine:
    return build(make_checkpoint())


@pytest.mark.parametrize("changes", MODELS.values(), ids=MODELS.keys())
def test_consecutive_requests_equal_transformers(
    make_checkpoint: Make, run: Run, reference_ids: Reference, changes: dict[str, Any]
) -> None:
    """Three prompts of one engine, a short one after a long one: what an earlier request left must not be read."""
    directory = make_checkpoint(**changes)
    engine = build(directory)

    for length, n in ((12, 10), (40, 20), (1, 16), (5, 1), (12, 10)):
        ids = prompt(length)
        assert run(engine, greedy(ids, n)) == ([reference_ids(directory, ids, n)], ["length"])


def test_outputs_vary(make_checkpoint: Make, reference_ids: Reference) -> None:
    """A model that repeats one token would make the equalities above worthless."""
    outputs = [reference_ids(make_checkpoint(), prompt(length), 20) for length in (1, 12, 40)]

    assert all(len(set(output)) > 5 for output in outputs)
    assert len({tuple(output) for output in outputs}) == 3


def test_a_padded_ragged_batch_equals_the_unbatched_requests(engine: SkotergyEngine, run: Run) -> None:
    """Mixed lengths and limits, so that rows end at different steps; twice, over the cache that the first left."""
    batch = [greedy(prompt(length), n, f"r{length}") for length, n in ((3, 9), (17, 4), (1, 12), (9, 1))]
    alone = [run(engine, request)[0][0] for request in batch]

    for requests, expected in ((batch, alone), (batch[::-1], alone[::-1])):
        assert run(engine, *requests) == (expected, ["length"] * 4)


def test_a_longer_batch_after_a_shorter_one(engine: SkotergyEngine, run: Run) -> None:
    for length, n in ((2, 2), (30, 20), (2, 2)):
        batch = [greedy(prompt(length), n), greedy(prompt(length + 3), n)]
        assert run(engine, *batch)[0] == [run(engine, request)[0][0] for request in batch]


def test_rows_that_fit_alone_fit_together(make_checkpoint: Make, run: Run) -> None:
    """A long prompt beside a long output: the batch is wider than the context, no row is."""
    engine = build(make_checkpoint(), max_model_len=24)
    batch = [greedy(prompt(24), 1, "prompt"), greedy(prompt(1), 24, "output")]
    alone = [run(engine, request)[0][0] for request in batch]

    assert run(engine, *batch) == (alone, ["length", "length"])


def first_repeat(tokens: list[int]) -> tuple[int, int]:
    """An index past the first token whose token did not come before, and that token."""
    index = next(index for index in range(2, len(tokens)) if tokens[index] not in tokens[:index])
    return index, tokens[index]


@pytest.fixture(scope="module")
def stopping(make_checkpoint: Make, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[int], int]:
    """A checkpoint whose end-of-sequence token comes up in the greedy output for `prompt(12)`; its index there."""
    tokens: list[int] = []
    build(make_checkpoint()).generate([greedy(prompt(12), 20)], lambda _, ids: tokens.extend(ids))
    index, eos = first_repeat(tokens)
    directory = tmp_path_factory.mktemp("stopping")
    for file in make_checkpoint().iterdir():
        (directory / file.name).write_bytes(file.read_bytes())
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [eos, 2]}))
    return directory, tokens, index


def test_the_end_token_ends_a_row_and_is_returned_unless_it_is_ignored(
    stopping: tuple[Path, list[int], int], run: Run
) -> None:
    directory, tokens, index = stopping
    engine = build(directory)

    assert run(engine, Request("a", prompt(12), 20)) == ([tokens[: index + 1]], ["stop"])
    assert run(engine, greedy(prompt(12), 20)) == ([tokens], ["length"])
    assert run(engine, Request("a", prompt(12), index + 1)) == ([tokens[: index + 1]], ["stop"])
    assert run(engine, Request("a", prompt(12), index)) == ([tokens[:index]], ["length"])
    assert run(engine, Request("a", prompt(12), 20), greedy(prompt(12), 20)) == (
        [tokens[: index + 1], tokens],
        ["stop", "length"],
    )


class TestScore:
    def test_it_equals_transformers_logits_over_the_whole_text(
        self, engine: SkotergyEngine, make_checkpoint: Make
    ) -> None:
        from transformers import LlamaForCausalLM

        ids, forced = prompt(9), prompt(7, seed=1)
        model = LlamaForCausalLM.from_pretrained(make_checkpoint(), dtype=torch.float32).eval()
        with torch.no_grad():
            expected = model(torch.tensor([ids + forced])).logits[0, 8:-1].numpy()

        logits = engine.score(greedy(ids, 7), forced)

        assert (logits.shape, logits.dtype) == ((7, 96), np.float32)
        np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=1e-4)

    def test_its_best_tokens_are_those_that_generate_chose_before_and_after(
        self, engine: SkotergyEngine, run: Run
    ) -> None:
        request = greedy(prompt(12), 10)
        tokens = run(engine, request)[0][0]

        assert engine.score(request, tokens).argmax(-1).tolist() == tokens
        assert run(engine, request)[0][0] == tokens

    def test_an_earlier_score_leaves_nothing_behind(self, engine: SkotergyEngine) -> None:
        request = greedy(prompt(12), 10)
        first = engine.score(request, prompt(10))
        engine.score(greedy(prompt(30), 20), prompt(20, seed=2))

        np.testing.assert_array_equal(engine.score(request, prompt(10)), first)

    def test_more_forced_tokens_than_the_context_holds_are_refused(self, make_checkpoint: Make) -> None:
        engine = build(make_checkpoint(), max_model_len=8)

        assert engine.score(greedy(prompt(5), 1), prompt(4)).shape == (4, 96)
        with pytest.raises(CapacityError, match="needs 9 positions"):
            engine.score(greedy(prompt(5), 1), prompt(5))

    @pytest.mark.parametrize("token", [-1, 96])
    def test_forced_tokens_beyond_the_vocabulary_are_refused(self, engine: SkotergyEngine, token: int) -> None:
        with pytest.raises(CapacityError, match="a token id outside the vocabulary of 96"):
            engine.score(greedy(prompt(5), 1), (3, token))

    def test_no_forced_tokens_are_refused(self, engine: SkotergyEngine) -> None:
        with pytest.raises(RequestError, match="at least 1, got 0"):
            engine.score(greedy(prompt(5), 1), ())


class TestSampling:
    SAMPLING = Sampling(temperature=1.5, top_p=0.95, seed=3)

    def test_a_seed_gives_the_same_tokens_again_and_another_others(self, engine: SkotergyEngine, run: Run) -> None:
        request = Request("a", prompt(12), 20, self.SAMPLING, ignore_eos=True)
        first = run(engine, request)[0]
        run(engine, Request("b", prompt(3), 5, Sampling(temperature=1.0, seed=9)))
        torch.manual_seed(99)

        assert run(engine, request)[0] == first
        other = Request("a", prompt(12), 20, Sampling(temperature=1.5, top_p=0.95, seed=4), ignore_eos=True)
        assert run(engine, other)[0] != first

    def test_rows_of_a_batch_draw_from_their_own_seeds(self, engine: SkotergyEngine, run: Run) -> None:
        batch = [
            Request("a", prompt(12), 10, self.SAMPLING, ignore_eos=True),
            Request("b", prompt(3), 10, Sampling(temperature=0.7, seed=8), ignore_eos=True),
            greedy(prompt(3), 10),
        ]

        assert run(engine, *batch)[0] == [run(engine, request)[0][0] for request in batch]

    def test_a_small_nucleus_is_greedy(self, engine: SkotergyEngine, run: Run) -> None:
        sampled = Request("a", prompt(12), 10, Sampling(temperature=1.0, top_p=1e-6), ignore_eos=True)

        assert run(engine, sampled) == run(engine, greedy(prompt(12), 10))


class TestLimits:
    def test_a_request_that_fits_exactly_gets_the_tokens_of_a_larger_context(
        self, engine: SkotergyEngine, make_checkpoint: Make, run: Run
    ) -> None:
        small = build(make_checkpoint(), max_model_len=16)

        for length, n in ((1, 16), (9, 8), (16, 1)):
            assert run(small, greedy(prompt(length), n)) == run(engine, greedy(prompt(length), n))

    def test_one_position_more_is_refused_before_any_token(self, make_checkpoint: Make) -> None:
        engine = build(make_checkpoint(), max_model_len=16)
        emitted: list[int] = []

        with pytest.raises(CapacityError) as refused:
            engine.generate([greedy(prompt(3), 1), greedy(prompt(10), 8, "long")], lambda _, ids: emitted.extend(ids))

        assert str(refused.value) == (
            "Request 'long' needs 17 positions (10 prompt tokens and 8 new ones, the last of which takes none), the "
            "context holds 16: shorten the prompt or ask for fewer tokens."
        )
        assert emitted == []

    @pytest.mark.parametrize("token", [96, 10**6, -1])
    def test_a_token_outside_the_vocabulary_is_refused(self, engine: SkotergyEngine, run: Run, token: int) -> None:
        with pytest.raises(CapacityError, match="'r' has a token id outside the vocabulary of 96"):
            run(engine, greedy((3, token, 4), 2))

    @pytest.mark.parametrize("positions", [0, -1, 65])
    def test_a_context_beyond_the_model_is_refused(self, make_checkpoint: Make, positions: int) -> None:
        with pytest.raises(CapacityError, match=f"max_model_len={positions} must lie between 1 and the model's 64"):
            build(make_checkpoint(), max_model_len=positions)

    def test_the_smallest_context(self, engine: SkotergyEngine, make_checkpoint: Make, run: Run) -> None:
        small = build(make_checkpoint(), max_model_len=1)

        assert run(small, greedy((7,), 1)) == run(engine, greedy((7,), 1))


class TestOptions:
    def test_options_that_have_no_effect_here_are_noted(self, make_checkpoint: Make) -> None:
        described = build(
            make_checkpoint(), max_batch=3, prefill_chunk=64, prefix_cache=True, warmup_buckets=[64]
        ).describe()

        assert described["max_batch"] == 3
        assert [note.split(" of ")[0] for note in described["notes"]] == [
            "The 3 rows",
            "engine.prefill_chunk has no effect: only captured steps",
            "engine.prefix_cache has no effect: only captured steps",
            "engine.warmup_buckets has no effect: only the single-row kernels prefill by buckets.",
        ]
        assert build(make_checkpoint()).describe()["notes"] == []

    @pytest.mark.parametrize("rows", [0, 129, -1, "two"])
    def test_other_numbers_of_rows_are_refused(self, make_checkpoint: Make, rows: object) -> None:
        with pytest.raises(UsageError, match=rf"engine\.max_batch={rows} must lie between 1 and 128"):
            build(make_checkpoint(), max_batch=rows)

    @pytest.mark.parametrize("tokens", [0, -1, 1.5])
    def test_other_chunks_are_refused(self, make_checkpoint: Make, tokens: object) -> None:
        with pytest.raises(UsageError, match=rf"engine\.prefill_chunk={tokens} must be a whole number"):
            build(make_checkpoint(), prefill_chunk=tokens)

    @pytest.mark.parametrize("bucket", [0, -3, 1.5])
    def test_buckets_are_lengths(self, make_checkpoint: Make, bucket: float) -> None:
        build(make_checkpoint(), warmup_buckets=[1, 128])
        with pytest.raises(UsageError, match=rf"engine\.warmup_buckets holds {bucket}"):
            build(make_checkpoint(), warmup_buckets=[32, bucket])

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("warmup_buckets", 256),
            ("warmup_buckets", "256"),
            ("compile", "few"),
            ("compile", None),
            ("prefix_cache", 1),
        ],
    )
    def test_options_of_another_kind_are_refused(self, make_checkpoint: Make, name: str, value: object) -> None:
        with pytest.raises(UsageError, match=rf"engine\.{name}={value} must be (true or false|a list of prompt)"):
            build(make_checkpoint(), **{name: value})

    def test_a_context_from_free_memory_is_the_models_where_there_is_plenty(self, make_checkpoint: Make) -> None:
        assert build(make_checkpoint(), max_model_len="auto").describe()["max_model_len"] == 64


class TestPadding:
    """The embeddings grow where, and only where, the padding token lies beyond them."""

    @pytest.mark.parametrize("tied", [False, True])
    def test_a_token_that_was_there_changes_nothing(self, make_checkpoint: Make, tied: bool) -> None:
        directory = make_checkpoint(tie_word_embeddings=tied)
        plain, padded = build(directory), build(directory, pad_id=95)

        assert padded.facts.vocab == 96
        assert padded.describe()["weights_fingerprint"] == plain.describe()["weights_fingerprint"]

    @pytest.mark.parametrize("tied", [False, True])
    def test_an_added_token_adds_one_row_and_keeps_the_other_logits(self, make_checkpoint: Make, tied: bool) -> None:
        directory = make_checkpoint(tie_word_embeddings=tied)
        request, forced = greedy(prompt(9), 5), prompt(5)
        plain, padded = build(directory), build(directory, pad_id=96)

        logits = padded.score(request, forced)

        assert logits.shape == (5, 97)
        np.testing.assert_allclose(logits[:, :96], plain.score(request, forced), rtol=1e-5, atol=1e-6)
        assert (logits[:, 96] == 0).all()

    def test_tokens_of_a_ragged_batch_stay_the_same(
        self, engine: SkotergyEngine, make_checkpoint: Make, run: Run
    ) -> None:
        batch = [greedy(prompt(3), 6), greedy(prompt(11), 6)]

        assert run(build(make_checkpoint(), pad_id=96), *batch) == run(engine, *batch)


class TestDescribe:
    def test_it_is_json_and_says_what_runs(self, make_checkpoint: Make, run: Run) -> None:
        engine = build(make_checkpoint(), max_model_len=32)
        run(engine, greedy(prompt(5), 3))

        with applied(flags_for("fp32", threads=1)):
            described = json.loads(json.dumps(engine.describe()))

        assert described["tier"] == 1
        assert "plain" in described["tier_reason"]
        assert described["parameters"] == engine.facts.parameters
        assert described["max_model_len"] == 32
        assert described["compile_s"] is None
        # A prefill and two steps of two layers with two norms each, and the last norm.
        assert described["paths"] == {"rms_norm": {"reference": 3 * 5}}
        assert described["flags"] == {
            "tf32": False,
            "matmul_precision": "highest",
            "cudnn_autotune": False,
            "threads": 1,
        }

    def test_random_weights_depend_on_the_seed(self, make_checkpoint: Make) -> None:
        prints = [build(make_checkpoint(), random_seed=seed).describe()["weights_fingerprint"] for seed in (1, 1, 2)]

        assert prints[0] == prints[1] != prints[2]

    def test_layers_cut_the_model(self, make_checkpoint: Make) -> None:
        engine = build(make_checkpoint(), layers=1)

        assert engine.facts == load_spec(make_checkpoint(), 1)
        assert engine.describe()["parameters"] == engine.facts.parameters


def test_half_precision_is_close_to_fp32_through_the_step(engine: SkotergyEngine, make_checkpoint: Make) -> None:
    request, forced = greedy(prompt(9), 12), prompt(12)
    exact = engine.score(request, forced)

    for dtype, limit in (("bf16", 0.04), ("fp16", 0.005)):
        logits = build(make_checkpoint(), dtype=dtype).score(request, forced)
        assert 0 < np.linalg.norm(logits - exact) / np.linalg.norm(exact) < limit


def test_a_directory_that_cannot_be_loaded(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no model directory"):
        build(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        build(tmp_path)


@pytest.fixture(scope="module")
def compiled(make_checkpoint: Make) -> Iterator[SkotergyEngine]:
    torch._dynamo.reset()
    engine = build(make_checkpoint(), compile=True)
    if not engine.describe()["compile_s"]:
        pytest.fail(f"the step was not compiled: {engine.describe()['notes']}")
    yield engine
    torch._dynamo.reset()


@pytest.mark.slow
class TestCompiled:
    """The same through the compiled step. Compiling takes seconds, so that one engine serves all tests."""

    def test_consecutive_requests_equal_transformers(
        self, compiled: SkotergyEngine, make_checkpoint: Make, run: Run, reference_ids: Reference
    ) -> None:
        for length, n in ((12, 10), (40, 24), (1, 16), (5, 1), (1, 2)):
            ids = prompt(length)
            assert run(compiled, greedy(ids, n)) == ([reference_ids(make_checkpoint(), ids, n)], ["length"])

    def test_score_equals_the_plain_step(self, compiled: SkotergyEngine, engine: SkotergyEngine) -> None:
        request, forced = greedy(prompt(9), 20), prompt(20)

        np.testing.assert_allclose(compiled.score(request, forced), engine.score(request, forced), rtol=1e-4, atol=1e-4)

    def test_the_context_is_used_to_its_end(self, compiled: SkotergyEngine, engine: SkotergyEngine, run: Run) -> None:
        assert run(compiled, greedy(prompt(3), 62)) == run(engine, greedy(prompt(3), 62))

    def test_it_is_described(self, compiled: SkotergyEngine, run: Run) -> None:
        before = compiled.describe()["paths"]["rms_norm"]["compiled"]
        run(compiled, greedy(prompt(5), 3))
        described = compiled.describe()

        assert "compiled" in described["tier_reason"]
        assert described["paths"]["rms_norm"]["compiled"] == before + 2 * 5
