"""The contract checks on a tiny model: what they count where all is well, and that they count what is not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from skote.contracts import check
from skote.contracts.check import Subject, differing, prompts, run_checks
from skote.engines.published_environment import default_environment, find_environment
from skote.types import UsageError

EXPECTED = {
    "pad_token": {"rows_added_within": 0, "rows_added_beyond": 1, "logits_difference": 0},
    "loading": {"dtypes_as_asked": 3, "falls_back": 1},
    "device": {"rows_differing": 0},
    "families": {"rows_differing": 0, "families": 3, "weight_files": 0},
    "in_flight": {"launches_above_cap": 0, "requests_lost": 0, "replicas_idle": 0},
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


@pytest.mark.parametrize("name", ["tf32", "norm_speed", "captures"])
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
