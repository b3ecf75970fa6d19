"""The contract checks on a tiny model: what they count where all is well, and that they count what is not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from skote.contracts import cache, check, speed
from skote.contracts.check import Subject, differing, prompts, run_checks
from skote.contracts.paged import paged_figures
from skote.contracts.routing import padded_share, routing_figures
from skote.engines.published_environment import default_environment, find_environment
from skote.kernels.flash_decode_triton import flash_decode_reference
from skote.types import UsageError

EXPECTED = {
    "pad_token": {"rows_added_within": 0, "rows_added_beyond": 1, "logits_difference": 0},
    "loading": {"dtypes_as_asked": 3, "falls_back": 1},
    "device": {"rows_differing": 0},
    "families": {"rows_differing": 0, "families": 23, "in_tier_1": 21, "weight_files": 0},
    "in_flight": {"launches_above_cap": 0, "requests_lost": 0, "replicas_idle": 0},
    "cancelling": {"requests_lost": 0, "cancelled_too_late": 0, "running_finished": 0},
    "flags": {"precision_high": 1, "tf32": 1, "cudnn_autotune": 0},
    "boundary": {"accepted": 0, "refused": 5, "uncounted_calls": 0},
    "padding": {"rows_differing": 0, "rows_differing_baseline": 0},
}


@pytest.fixture
def subject(make_checkpoint: Callable[..., Path], tmp_path: Path) -> Subject:
    directory = make_checkpoint(vocab_size=512, max_position_embeddings=512)
    return Subject({"local_dir": str(directory), "random_seed": None, "layers": None}, "cpu", "fp32", tmp_path)


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the decode step uncompiled, which takes half a second instead of ten."""
    from skote.runtime.engine import SkotergyEngine

    load = SkotergyEngine.__init__
    monkeypatch.setattr(SkotergyEngine, "__init__", lambda self, **options: load(self, **options, compile=False))


@pytest.mark.usefixtures("plain")
@pytest.mark.parametrize("name", EXPECTED)
@pytest.mark.filterwarnings("ignore")
def test_a_check_counts_what_the_claim_says(name: str, subject: Subject) -> None:
    assert run_checks([name], subject, lambda _: None) == {name: EXPECTED[name]}


@pytest.mark.usefixtures("plain")
@pytest.mark.filterwarnings("ignore")
def test_norms_convolutions_and_the_cache(subject: Subject) -> None:
    found = run_checks(["norm", "convolutions"], subject, lambda _: None)
    assert found["norm"]["largest_error"] < 1e-5
    assert found["norm"]["reference_calls"] == 5
    assert found["convolutions"]["calls"] == 0
    assert found["convolutions"]["ops"] > 100


@pytest.mark.usefixtures("plain")
def test_the_cache_is_timed_several_times(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seconds of a token: 1 and 3 with the cache, 10 and 30 without, at the short and the long context."""
    monkeypatch.setattr(cache, "_token_s", lambda _, prompt: 1.0 if len(prompt) == 64 else 3.0)
    monkeypatch.setattr(cache, "_forward_s", lambda _, prompt: 10.0 if len(prompt) == 64 else 30.0)
    said: list[str] = []
    found = run_checks(["kv_cache"], subject, said.append)["kv_cache"]
    assert found == {"rows_differing": 0, "slope_ratio": [0.1] * check.REPEATS}
    assert said[-1] == "  slope ratio: 0.1 (median of 9, 0.1 to 0.1)"


def test_figures_of_the_norm_are_those_of_the_worst_width_in_each_repeat() -> None:
    narrow = {
        "ours": 2.0,
        "eager": 8.0,
        "torch": 3.0,
        "copy": 1.0,
        1: 4.0,
        2: 2.0,
        4: 2.5,
        8: 3.0,
        16: 5.0,
        "chosen": 2.0,
    }
    wide = {
        "ours": 4.0,
        "eager": 12.0,
        "torch": 8.0,
        "copy": 3.0,
        1: 9.0,
        2: 6.0,
        4: 4.0,
        8: 5.0,
        16: 5.0,
        "chosen": 5.0,
    }
    assert speed.norm_figures([[narrow, wide], [wide, wide]]) == {
        "over_eager": [3.0, 3.0],
        "over_torch": [1.5, 2.0],
        "copy_share": [0.5, 0.75],
        "over_best_cut": [1.25, 1.25],
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_moved_pages_change_nothing_and_a_wrong_table_is_counted(dtype: torch.dtype) -> None:
    """The kernels' reference in their place, on a CPU; then one that takes the pages as they lie."""

    def paged(*inputs: Any) -> torch.Tensor:
        return flash_decode_reference(*inputs[:5], page=32)

    def as_they_lie(*inputs: Any) -> torch.Tensor:
        q, k, v, newest, table, _ = inputs
        return flash_decode_reference(q, k, v, newest, torch.arange(table.numel()).view(table.shape), page=32)

    moved, error = paged_figures(paged, torch.device("cpu"), 300, dtype, 32)
    assert moved == 0
    assert 0 < error < 2 * torch.finfo(dtype).eps
    moved, error = paged_figures(as_they_lie, torch.device("cpu"), 300, dtype, 32)
    assert moved == 3
    assert error > 0.1


def test_closing_cancels_what_is_queued_and_loses_nothing(subject: Subject) -> None:
    """The first of 40 was answered; how many more the replica took before the door closed is its own affair."""
    found = run_checks(["closing"], subject, lambda _: None)["closing"]
    assert found["requests_lost"] == 0
    assert 1 <= found["requests_cancelled"] <= 39


@pytest.mark.usefixtures("plain")
def test_an_engine_that_forgets_its_rows_is_counted(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    from skote.runtime.engine import SkotergyEngine

    def forgetful(self: Any, requests: Any, emit: Any) -> list[str]:
        for row, request in enumerate(requests):
            emit(row, range(len(requests), len(requests) + request.max_new_tokens))
        return ["length"] * len(requests)

    monkeypatch.setattr(SkotergyEngine, "generate", forgetful)
    assert run_checks(["padding"], subject, lambda _: None)["padding"]["rows_differing"] == 4


@pytest.mark.usefixtures("plain")
def test_a_launch_that_goes_through_is_counted(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    from skote.contracts import boundary

    monkeypatch.setattr(boundary, "_launches", lambda *_, **__: {"lax": lambda: None, "strict": lambda: int("no")})
    monkeypatch.setattr(boundary, "greedy", lambda *_: [[]])
    found = boundary.boundary(subject)
    assert (found["accepted"], found["refused"], found["uncounted_calls"]) == (1, 1, 1)


def test_unknown_checks_are_refused(subject: Subject) -> None:
    with pytest.raises(UsageError, match="there are kv_cache, padding"):
        run_checks(["nonsense"], subject, lambda _: None)


@pytest.mark.parametrize("name", ["tf32", "norm_speed", "captures", "paged_kv"])
def test_checks_of_a_gpu_say_so(name: str, subject: Subject) -> None:
    with pytest.raises(UsageError, match="needs a CUDA device: run it with devices=cuda:0, not cpu"):
        run_checks([name], subject, lambda _: None)


def test_the_surface_needs_a_tokenizer(subject: Subject) -> None:
    drawn = Subject(subject.model | {"random_seed": 0}, "cpu", "fp32", subject.directory)
    with pytest.raises(UsageError, match="needs a model with a tokenizer"):
        run_checks(["surface"], drawn, lambda _: None)


@pytest.mark.slow
@pytest.mark.usefixtures("plain")
@pytest.mark.filterwarnings("ignore")
def test_a_tensor_parallel_step_has_two_collectives_a_layer(subject: Subject) -> None:
    try:
        find_environment(default_environment())
    except UsageError:
        pytest.skip("accelerate, which Transformers' plan asks for, is not in the published package's environment")
    found = run_checks(["collectives"], subject, lambda _: None)["collectives"]
    assert (found["per_token"], found["tensor_parallel_per_layer"]) == (0, 2)
    assert found["logits_difference"] < 1e-4


def test_every_check_can_be_found() -> None:
    import pkgutil

    assert all(callable(pkgutil.resolve_name(path)) for path in check.CHECKS.values())


def test_prompts_differ_from_their_first_token_on() -> None:
    rows = prompts(512, (3, 9, 17, 30))
    assert [len(row) for row in rows] == [3, 9, 17, 30]
    assert len({row[0] for row in rows}) == 4
    assert all(3 <= token < 512 for row in rows for token in row)
    assert differing([[1], [2], [3]], [[1], [4], [5]]) == 2


def test_padding_is_what_a_launch_fills_up_to_its_longest_prompt() -> None:
    """2 + 4 of 8 tokens, and 5 of 5: 11 of 13 are prompts."""
    assert padded_share([[2, 4], [5]]) == pytest.approx(2 / 13)
    found = routing_figures([{"round_robin": (0.5, 1.0), "least_work": (0.5, 10.0), "length_aware": (0.4, 11.0)}])
    assert {name: [round(value, 9) for value in values] for name, values in found.items()} == {
        "padding_pct": [-20],
        "p95_pct": [10],
    }


@pytest.mark.slow
def test_length_aware_routing_pads_less_than_round_robin(subject: Subject) -> None:
    found = run_checks(["length_routing"], subject, lambda _: None)["length_routing"]
    assert len(found["padding_pct"]) == len(found["p95_pct"]) == check.REPEATS
    assert sorted(found["padding_pct"])[check.REPEATS // 2] < 0
