"""The baseline arm: Transformers' own tokens, the same contracts as ours, and the same weights."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from skote.engines.transformers import TransformersEngine
from skote.flags import applied, flags_for
from skote.model.causal_lm import load_causal_lm
from skote.runtime.engine import SkotergyEngine
from skote.types import CheckpointError, Engine, FinishReason, Request, Sampling, UsageError

Run = Callable[..., tuple[list[list[int]], list[FinishReason]]]
Reference = Callable[[Path, Sequence[int], int], list[int]]
Make = Callable[..., Path]

UP = "model.layers.1.mlp.up_proj.weight"


def prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    ids = torch.randint(3, 96, (length,), generator=torch.Generator().manual_seed(100 * length + seed))
    return tuple(ids.tolist())


def build(directory: Path, **options: Any) -> TransformersEngine:
    return TransformersEngine(**{"local_dir": str(directory), "device": "cpu", "dtype": "fp32"} | options)


def ours(directory: Path, **options: Any) -> SkotergyEngine:
    return SkotergyEngine(**{"local_dir": str(directory), "device": "cpu", "dtype": "fp32", "compile": False} | options)


def greedy(ids: tuple[int, ...], n: int, name: str = "r") -> Request:
    return Request(name, ids, n, ignore_eos=True)


def fingerprint(engine: Engine) -> str:
    return str(engine.describe()["weights_fingerprint"])


@pytest.fixture(scope="module")
def engine(make_checkpoint: Make) -> TransformersEngine:
    return build(make_checkpoint())


def test_tokens_are_those_of_a_bare_generate(
    engine: TransformersEngine, make_checkpoint: Make, run: Run, reference_ids: Reference
) -> None:
    for length, n in ((12, 10), (40, 20), (5, 1), (1, 12)):
        ids = prompt(length)
        assert run(engine, greedy(ids, n)) == ([reference_ids(make_checkpoint(), ids, n)], ["length"])


def test_the_static_cache_gives_the_same_tokens_and_logits(
    engine: TransformersEngine, make_checkpoint: Make, run: Run
) -> None:
    """A longer request after a shorter one, so that its cache has to grow."""
    static = build(make_checkpoint(), cache="static")

    for length, n in ((12, 10), (40, 20), (5, 3)):
        assert run(static, greedy(prompt(length), n)) == run(engine, greedy(prompt(length), n))
    request, forced = greedy(prompt(9), 4), prompt(4, seed=1)
    np.testing.assert_allclose(static.score(request, forced), engine.score(request, forced), atol=1e-5)
    assert static.describe()["tier_reason"].endswith("static cache")


def test_an_unknown_cache_is_named(make_checkpoint: Make) -> None:
    with pytest.raises(UsageError, match=r"engine\.cache=paged is not known; choose one of dynamic, static"):
        build(make_checkpoint(), cache="paged")


def test_a_padded_ragged_batch_equals_the_unbatched_requests(engine: TransformersEngine, run: Run) -> None:
    batch = [greedy(prompt(length), n, f"r{length}") for length, n in ((3, 9), (17, 4), (1, 12), (9, 1))]
    alone = [run(engine, request)[0][0] for request in batch]

    assert run(engine, *batch) == (alone, ["length"] * 4)


def test_every_request_is_prefilled_once_and_then_fed_token_by_token(engine: TransformersEngine, run: Run) -> None:
    lengths: list[int] = []
    embeddings = engine._model.get_input_embeddings()
    hook = embeddings.register_forward_pre_hook(lambda module, args: lengths.append(args[0].shape[1]))
    run(engine, greedy(prompt(12), 4))
    run(engine, greedy(prompt(5), 3))
    hook.remove()

    assert lengths == [12, 1, 1, 1, 5, 1, 1]


@pytest.fixture(scope="module")
def stopping(
    make_checkpoint: Make, reference_ids: Reference, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[int], int]:
    """A checkpoint whose end-of-sequence token comes up in the greedy output for `prompt(12)`; its index there."""
    tokens = reference_ids(make_checkpoint(), prompt(12), 20)
    index = next(index for index in range(2, 20) if tokens[index] not in tokens[:index])
    directory = tmp_path_factory.mktemp("stopping")
    for file in make_checkpoint().iterdir():
        (directory / file.name).write_bytes(file.read_bytes())
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [tokens[index], 2]}))
    return directory, tokens, index


@pytest.mark.parametrize("load", [build, ours], ids=["transformers", "skotergy"])
def test_the_end_token_in_both_arms(
    stopping: tuple[Path, list[int], int], run: Run, load: Callable[[Path], Engine]
) -> None:
    directory, tokens, index = stopping
    engine = load(directory)
    stop, ignore = Request("a", prompt(12), 20), greedy(prompt(12), 20)

    assert run(engine, ignore) == ([tokens], ["length"])
    assert run(engine, stop) == ([tokens[: index + 1]], ["stop"])
    assert run(engine, ignore) == ([tokens], ["length"])  # what the request before it switched on is off again
    assert run(engine, Request("a", prompt(12), index + 1)) == ([tokens[: index + 1]], ["stop"])
    assert run(engine, Request("a", prompt(12), index)) == ([tokens[:index]], ["length"])
    assert run(engine, stop, ignore) == ([tokens[: index + 1], tokens], ["stop", "length"])


def test_a_generation_config_without_an_end_token_has_none_in_both_arms(
    copy_checkpoint: Make, reference_ids: Reference, make_checkpoint: Make, run: Run
) -> None:
    tokens = reference_ids(make_checkpoint(), prompt(12), 20)
    directory = copy_checkpoint()
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"eos_token_id": tokens[4]}))
    (directory / "generation_config.json").write_text("{}")

    for engine in (build(directory), ours(directory)):
        assert run(engine, Request("a", prompt(12), 20)) == ([tokens], ["length"])


class TestScore:
    def test_it_equals_ours_and_leaves_the_choice_of_tokens_alone(
        self, engine: TransformersEngine, make_checkpoint: Make, run: Run
    ) -> None:
        request, forced = greedy(prompt(9), 7), prompt(7, seed=1)
        before = run(engine, request)

        logits = engine.score(request, forced)

        assert (logits.shape, logits.dtype) == ((7, 96), np.float32)
        np.testing.assert_allclose(logits, ours(make_checkpoint()).score(request, forced), rtol=1e-4, atol=1e-4)
        assert run(engine, request) == before

    def test_its_best_tokens_are_those_that_generate_chose(self, engine: TransformersEngine, run: Run) -> None:
        request = greedy(prompt(12), 10)
        tokens = run(engine, request)[0][0]

        assert engine.score(request, tokens).argmax(-1).tolist() == tokens

    def test_a_forced_end_token_does_not_end_it(self, stopping: tuple[Path, list[int], int]) -> None:
        directory, tokens, index = stopping

        logits = build(directory).score(greedy(prompt(12), 20), tokens)

        assert len(logits) == 20 > index + 1


def test_sampled_tokens_depend_on_the_seed(engine: TransformersEngine, run: Run) -> None:
    def sampled(seed: int) -> list[list[int]]:
        return run(engine, Request("a", prompt(12), 15, Sampling(1.5, top_p=0.95, seed=seed), ignore_eos=True))[0]

    first = sampled(3)
    torch.manual_seed(99)

    assert sampled(3) == first
    assert sampled(4) != first
    for nearly_greedy in (Sampling(1.0, top_p=1e-6), Sampling(5.0, top_k=1)):
        assert run(engine, Request("a", prompt(12), 10, nearly_greedy, ignore_eos=True)) == run(
            engine, greedy(prompt(12), 10)
        )


class TestWeights:
    """Both arms multiply by the same numbers."""

    @pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": True}, {"head_dim": 16}])
    @pytest.mark.parametrize(
        "options",
        [
            {},
            {"dtype": "bf16"},
            {"layers": 1},
            {"pad_id": 95},
            {"pad_id": 96},
            {"random_seed": 5},
            {"random_seed": 5, "layers": 1},
            {"random_seed": 5, "pad_id": 98},
            {"random_seed": 5, "dtype": "fp16"},
        ],
        ids=str,
    )
    def test_fingerprints_and_counts_are_equal(
        self, make_checkpoint: Make, changes: dict[str, Any], options: dict[str, Any]
    ) -> None:
        theirs, mine = (load(make_checkpoint(**changes), **options).describe() for load in (build, ours))

        assert theirs["weights_fingerprint"] == mine["weights_fingerprint"]
        assert theirs["parameters"] == mine["parameters"]

    def test_different_models_have_different_fingerprints(self, make_checkpoint: Make) -> None:
        options: list[dict[str, Any]] = [{}, {"layers": 1}, {"pad_id": 96}, {"random_seed": 5}, {"random_seed": 6}]

        assert len({fingerprint(build(make_checkpoint(), **each)) for each in options}) == len(options)

    def test_random_weights_are_one_model(self, make_checkpoint: Make, run: Run) -> None:
        request = greedy(prompt(9), 5)
        theirs, mine = (load(make_checkpoint(), random_seed=5) for load in (build, ours))

        np.testing.assert_allclose(
            theirs.score(request, prompt(5)), mine.score(request, prompt(5)), rtol=1e-4, atol=1e-4
        )
        assert run(theirs, request) == run(mine, request)

    def test_one_layer_is_one_model(self, make_checkpoint: Make, run: Run) -> None:
        assert run(build(make_checkpoint(), layers=1), greedy(prompt(9), 9)) == run(
            ours(make_checkpoint(), layers=1), greedy(prompt(9), 9)
        )


class TestPadding:
    @pytest.mark.parametrize("tied", [False, True])
    def test_a_token_that_was_there_changes_nothing(self, make_checkpoint: Make, tied: bool) -> None:
        directory = make_checkpoint(tie_word_embeddings=tied)
        padded = build(directory, pad_id=95)

        assert fingerprint(padded) == fingerprint(build(directory))
        assert padded.describe()["notes"] == []

    @pytest.mark.parametrize("tied", [False, True])
    def test_an_added_token_adds_one_row_and_keeps_the_other_logits(self, make_checkpoint: Make, tied: bool) -> None:
        directory = make_checkpoint(tie_word_embeddings=tied)
        request, forced = greedy(prompt(9), 5), prompt(5)
        padded = build(directory, pad_id=96)

        logits = padded.score(request, forced)

        assert logits.shape == (5, 97)
        np.testing.assert_allclose(logits[:, :96], build(directory).score(request, forced), rtol=1e-5, atol=1e-6)
        assert (logits[:, 96] == 0).all()
        assert padded.describe()["notes"] == ["The embeddings were extended by a row for the padding token."]


def test_both_arms_record_the_same_flags(engine: TransformersEngine, make_checkpoint: Make) -> None:
    mine = ours(make_checkpoint())

    for dtype in ("fp32", "tf32"):
        with applied(flags_for(dtype, threads=1)):
            theirs = json.loads(json.dumps(engine.describe()))
            assert theirs["flags"] == mine.describe()["flags"]
            assert theirs["flags"]["tf32"] is (dtype == "tf32")
            assert theirs["flags"]["cudnn_autotune"] is False


class TestLoading:
    def test_dtype_is_given_by_its_new_name(self) -> None:
        assert load_causal_lm(lambda source, dtype: (source, dtype), "here", torch.float32) == ("here", torch.float32)

    def test_and_by_its_old_one_where_the_new_is_unknown(self) -> None:
        def old(source: str, torch_dtype: torch.dtype, attn_implementation: str) -> tuple[object, ...]:
            return source, torch_dtype, attn_implementation

        loaded = load_causal_lm(old, "here", torch.bfloat16, attn_implementation="sdpa")

        assert loaded == ("here", torch.bfloat16, "sdpa")

    def test_another_type_error_is_not_taken_for_an_old_version(self) -> None:
        calls = []

        def broken(source: str, **options: object) -> None:
            calls.append(options)
            raise TypeError("unsupported operand")

        with pytest.raises(TypeError, match="unsupported operand"):
            load_causal_lm(broken, "here", torch.float32)
        assert len(calls) == 1

    def test_the_attention_is_said(self, engine: TransformersEngine) -> None:
        assert "sdpa attention, dynamic cache" in engine.describe()["tier_reason"]


def rewrite(directory: Path, **changes: torch.Tensor | None) -> None:
    path = directory / "model.safetensors"
    tensors = load_file(path) | changes
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, path, {"format": "pt"})


def truncate(directory: Path) -> None:
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:5000])


def change_config(directory: Path, **changes: object) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def index_of_nothing(directory: Path) -> None:
    (directory / "model.safetensors").unlink()
    (directory / "model.safetensors.index.json").write_text("[]")


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (lambda directory: (directory / "config.json").unlink(), r"no config\.json"),
        (lambda directory: (directory / "config.json").write_text("{"), r"config\.json is not readable JSON"),
        (lambda directory: (directory / "config.json").write_text("[]"), "must hold a JSON object"),
        (lambda directory: change_config(directory, vocab_size="many"), "vocab_size"),
        (lambda directory: change_config(directory, model_type="nothing"), "nothing"),
        (lambda directory: (directory / "model.safetensors").unlink(), r"model\.safetensors"),
        (lambda directory: rewrite(directory, **{UP: None}), f"no tensor {UP}"),
        (lambda directory: rewrite(directory, **{UP: torch.zeros(3, 48)}), rf"{UP} as \(3, 48\), .*\(80, 48\)"),
        (truncate, "Transformers cannot load"),
        (index_of_nothing, "Transformers cannot load"),
    ],
    ids=["config", "json", "object", "type", "family", "weights", "tensor", "shape", "truncated", "index"],
)
def test_a_damaged_directory_is_a_checkpoint_error_of_one_sentence(
    copy_checkpoint: Make, damage: Callable[[Path], object], sentence: str
) -> None:
    directory = copy_checkpoint()
    damage(directory)

    with pytest.raises(CheckpointError, match=sentence) as refused:
        build(directory)

    assert str(directory) in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_directory_that_is_missing_is_not_looked_up_on_a_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    with pytest.raises(CheckpointError, match="no model directory some/model"):
        build(Path("some/model"))


def test_a_split_model_has_no_static_cache(make_checkpoint: Make) -> None:
    with pytest.raises(UsageError, match=r"engine\.split goes with engine\.cache=dynamic, got static"):
        build(make_checkpoint(), split=True, cache="static")


@pytest.mark.gpu
def test_a_model_split_over_two_gpus_gives_its_own_tokens_and_tells_what_it_moves(
    make_checkpoint: Make, run: Run
) -> None:
    """The hidden state goes to the second GPU and the logits come back, whatever else its hooks send."""
    pytest.importorskip("accelerate")
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    directory = make_checkpoint(num_hidden_layers=6)
    whole = build(directory, device="cuda:0")
    split = build(directory, device="cuda:0+cuda:1", split=True)

    for length, n in ((12, 10), (5, 3)):
        assert run(split, greedy(prompt(length), n)) == run(whole, greedy(prompt(length), n))
    assert fingerprint(split) == fingerprint(whole)
    told = split.describe()
    assert told["device_transfers"]["tensors_per_token"] >= 2
    assert told["device_transfers"]["bytes_per_token"] >= 4 * (48 + 96)
    assert "cuda:0 holds model.embed_tokens to" in told["notes"][-1]
    assert "device_transfers" not in whole.describe()


def test_a_split_engine_tells_what_lies_where(
    make_checkpoint: Make, run: Run, engine: TransformersEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dealt out by hand over a CPU called twice: nothing crosses, and the tokens are the whole model's."""

    def deal(module: Any, devices: Sequence[torch.device]) -> None:
        assert devices == [torch.device("cpu")] * 2
        module.hf_device_map = {"model.embed_tokens": devices[0], "model.layers.0": devices[1], "lm_head": devices[1]}

    monkeypatch.setattr("skote.engines.transformers.split_module", deal)
    split = build(make_checkpoint(), device="cpu+cpu", split=True)

    assert run(split, greedy(prompt(12), 5)) == run(engine, greedy(prompt(12), 5))
    told = split.describe()
    assert told["device_transfers"] == {"tensors_per_token": 0, "bytes_per_token": 0}
    [note] = told["notes"]
    assert note.startswith("cpu holds model.embed_tokens to lm_head (0.00 GB); a token of one request moves 0 tensors")
