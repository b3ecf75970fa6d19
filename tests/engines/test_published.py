"""The published package as an arm: what it is handed, and how its absence and its end are told."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from skote.engines import published, published_environment
from skote.engines.published import PublishedEngine
from skote.engines.published_environment import default_environment, find_environment, make_environment
from skote.types import EngineError, RecordError, Request, UsageError

COMMON: dict[str, Any] = {"device": "cpu", "dtype": "fp32", "threads": 1}
FAKE = """
import json, sys
from multiprocessing.connection import Connection
connection = Connection(int(sys.argv[1]))
options = json.loads(sys.argv[3])
connection.send(("ok", {"transformers": "4", "attention": "sdpa", "parameters": 7, "weights_fingerprint": "f"}))
while True:
    try:
        operation, arguments = connection.recv()
    except EOFError:
        break
    if arguments["max_new_tokens"] == 9:
        sys.exit(3)
    if arguments["max_new_tokens"] == 8:
        connection.send(("error", "ValueError: no"))
    else:
        connection.send(("ok", arguments["prompt_ids"][: arguments["max_new_tokens"]]))
"""


@pytest.fixture
def environment(tmp_path: Path) -> Path:
    """A folder that looks like the package's environment."""
    for name in ("skotergy-1.0.1.dist-info", "transformers", "accelerate"):
        (tmp_path / "environment" / name).mkdir(parents=True)
    return tmp_path / "environment"


@pytest.fixture
def engine(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, environment: Path, make_checkpoint: Callable[..., Path]
) -> PublishedEngine:
    """The engine over a driver that answers without a model."""
    driver = tmp_path / "driver.py"
    driver.write_text(FAKE)
    monkeypatch.setattr(published, "_DRIVER", driver)
    return PublishedEngine(local_dir=str(make_checkpoint()), environment=str(environment), **COMMON)


def test_an_answer_is_one_chunk(engine: PublishedEngine) -> None:
    chunks: list[tuple[int, list[int]]] = []
    requests = [Request("a", (5, 6, 7), 2), Request("b", (8, 9), 3)]
    reasons = engine.generate(requests, lambda row, ids: chunks.append((row, list(ids))))
    assert chunks == [(0, [5, 6]), (1, [8, 9])]
    assert reasons == ["length", "stop"]
    assert engine.describe()["weights_fingerprint"] == "f"
    assert "Router.submit" in engine.describe()["tier_reason"]


def test_failures_of_the_package_are_sentences(engine: PublishedEngine) -> None:
    with pytest.raises(EngineError, match=r"skotergy 1\.0\.1 failed: ValueError: no"):
        engine.generate([Request("a", (5,), 8)], lambda *_: None)
    with pytest.raises(EngineError, match=r"The process of skotergy 1\.0\.1 ended"):
        engine.generate([Request("a", (5,), 9)], lambda *_: None)


def test_what_is_missing_is_named_with_the_way_to_make_it(tmp_path: Path, environment: Path) -> None:
    assert find_environment(environment) == environment.resolve()
    with pytest.raises(UsageError, match=r"no skotergy-1\.0\.1: make .* `python -m skote\.engines\.published_environ"):
        PublishedEngine(local_dir=".", environment=str(tmp_path), **COMMON)
    (environment / "accelerate").rmdir()
    with pytest.raises(UsageError, match="has no accelerate"):
        find_environment(environment)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"method": "magic"}, r"engine\.method=magic is not known; choose one of router, runner"),
        ({"dtype": "tf32"}, "has no dtype tf32"),
        ({"layers": 1}, r"leave model\.layers out"),
    ],
)
def test_options_that_do_not_fit(changes: dict[str, Any], sentence: str, environment: Path) -> None:
    with pytest.raises(UsageError, match=sentence):
        PublishedEngine(**{"local_dir": ".", "environment": str(environment)} | COMMON | changes)


def test_an_index_that_does_not_answer_is_a_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(published_environment, "WITH_DEPENDENCIES", ("--no-index", "skotergy==1.0.1"))
    with pytest.raises(RecordError, match="pip could not install"):
        make_environment(tmp_path / "made")


def test_a_checkpoint_is_linked_with_a_tokenizer_that_the_older_transformers_knows(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    target.mkdir()
    (source / "config.json").write_text("{}")
    (source / "tokenizer_config.json").write_text('{"tokenizer_class": "TokenizersBackend", "eos_token": "</s>"}')
    published._link_checkpoint(source, target)
    assert (target / "config.json").resolve() == source / "config.json"
    written = json.loads((target / "tokenizer_config.json").read_text())
    assert written == {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>"}


@pytest.mark.filterwarnings("ignore")
def test_random_weights_become_a_checkpoint_whose_words_are_its_ids(
    make_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    from transformers import AutoTokenizer

    from skote.engines.transformers import TransformersEngine

    published._write_random(make_checkpoint(), tmp_path, "fp32", "cpu", 3, 1)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer("17 5 0 95")["input_ids"] == [17, 5, 0, 95]
    assert tokenizer.decode([17, 5, 0, 95]) == "17 5 0 95"
    common: dict[str, Any] = {"device": "cpu", "dtype": "fp32"}
    written = TransformersEngine(local_dir=str(tmp_path), **common)
    drawn = TransformersEngine(local_dir=str(make_checkpoint()), random_seed=3, layers=1, **common)
    assert written.describe()["weights_fingerprint"] == drawn.describe()["weights_fingerprint"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("method", ["router", "runner"])
def test_the_package_itself(
    method: str, make_checkpoint: Callable[..., Path], reference_ids: Callable[..., list[int]]
) -> None:
    """Through Router.submit it is Transformers; its benchmark's loop never sees a second prompt."""
    try:
        find_environment(default_environment())
    except UsageError:
        pytest.skip("the environment of the published package was not made on this machine")
    from skote.engines.transformers import TransformersEngine

    # No count of threads is how an arm on a GPU is made.
    random: dict[str, Any] = {"local_dir": str(make_checkpoint()), "random_seed": 3, **COMMON, "threads": None}
    engine = PublishedEngine(**random, method=method)
    baseline = TransformersEngine(**random)
    assert engine.describe()["weights_fingerprint"] == baseline.describe()["weights_fingerprint"]
    requests = [Request("a", (5, 6, 7, 8), 6, ignore_eos=True), Request("b", (40, 41), 6, ignore_eos=True)]
    rows: dict[str, list[list[int]]] = {"ours": [[], []], "theirs": [[], []]}
    for name, each in (("theirs", engine), ("ours", baseline)):
        for row, request in enumerate(requests):
            each.generate([request], lambda _, ids, name=name, row=row: rows[name][row].extend(ids))
    assert (rows["theirs"] == rows["ours"]) == (method == "router")
    if method == "router":
        logits = [each.score(requests[0], rows["ours"][0]) for each in (engine, baseline)]
        assert abs(logits[0] - logits[1]).max() < 1e-4


def test_the_driver_imports_nothing_of_ours() -> None:
    source = (Path(published.__file__).parent / "published_driver.py").read_text(encoding="utf-8")
    assert "from skote" not in source
    assert "import skote" not in source
    assert sys.version_info >= (3, 11)
