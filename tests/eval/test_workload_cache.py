"""A workload that was kept is the one that was made, and what it is made of decides which."""

from __future__ import annotations

import json
import time
from dataclasses import fields, replace

import pytest

from skote.eval import workload_cache
from skote.eval.codec import HashCodec
from skote.eval.sources.lengths import LengthConfig
from skote.eval.sources.source_config import SourceConfig
from skote.eval.workload import Workload, build_workload
from skote.eval.workload_cache import WorkloadCache, ingredients
from skote.eval.workload_config import WorkloadConfig
from skote.types import UsageError

CODEC = HashCodec(49152)


def config(tmp_path, **options) -> WorkloadConfig:
    path = tmp_path / "rows.jsonl"
    path.write_text(
        json.dumps({"turns": ["One?", "Two?"], "stop_token_ids": [5], "timestamp": 1, "temperature": 0.5, "seed": 3})
        + "\n" + json.dumps({"turns": ["Three?", "Four?"], "timestamp": 2, "think_ms": [7]}) + "\n"
    )  # fmt: skip
    source = SourceConfig(str(path), turns="all", think_ms=2.0)
    return WorkloadConfig(load="trace", concurrency=None, blocks=1, requests_per_block=1, source=source, **options)


def kept(tmp_path, monkeypatch, asked: WorkloadConfig, max_blocks: int = 0) -> tuple[Workload, int, list[str]]:
    """The workload by the cache, how often one was made, and what was said."""
    monkeypatch.setattr(workload_cache, "LEAST_TOKENS", 1)
    made, said = [], []

    def build() -> Workload:
        made.append(build_workload(asked, CODEC, 0, max_blocks))
        return made[-1]

    cache = WorkloadCache(tmp_path / "kept", said.append)
    return cache.workload(ingredients(asked, "hash", 0, max_blocks, None), build), len(made), said


def test_the_second_time_it_is_read_and_equal_in_every_field(tmp_path, monkeypatch):
    first, made, said = kept(tmp_path, monkeypatch, config(tmp_path), max_blocks=2)
    assert (made, said) == (1, [])
    again, made, said = kept(tmp_path, monkeypatch, config(tmp_path), max_blocks=2)
    assert made == 0
    assert said[0].startswith("The workload was made before: ")
    assert len(again.spare) == 1
    for field in fields(Workload):
        assert getattr(again, field.name) == getattr(first, field.name), field.name
    assert again.extended(1).sha256 == first.extended(1).sha256


def test_anything_that_it_is_made_of_makes_another(tmp_path, monkeypatch):
    asked = config(tmp_path)
    kept(tmp_path, monkeypatch, asked)
    assert kept(tmp_path, monkeypatch, replace(asked, max_new_tokens=7))[1] == 1
    path = tmp_path / "rows.jsonl"
    path.write_text(path.read_text().replace("Two?", "Too?"))
    assert kept(tmp_path, monkeypatch, asked)[1] == 1
    known = ingredients(asked, "hash", 0, 0, None)
    others = [ingredients(asked, "other", 0, 0, None), ingredients(asked, "hash", 1, 0, None)]
    assert all(each != known for each in others)
    path.unlink()
    with pytest.raises(UsageError, match=r"workload\.source\.path=\S+rows\.jsonl cannot be read: .*No such file"):
        kept(tmp_path, monkeypatch, asked)


def test_what_is_damaged_is_made_again_and_what_is_small_is_not_kept(tmp_path, monkeypatch):
    asked = config(tmp_path)
    first, _, _ = kept(tmp_path, monkeypatch, asked)
    (file,) = (tmp_path / "kept").iterdir()
    file.write_bytes(file.read_bytes()[:-40])
    again, made, _ = kept(tmp_path, monkeypatch, asked)
    assert (again.sha256, made) == (first.sha256, 1)
    assert kept(tmp_path, monkeypatch, asked)[1] == 0
    file.unlink()
    monkeypatch.undo()
    cache = WorkloadCache(tmp_path / "kept", print)
    cache.workload(ingredients(asked, "hash", 0, 0, None), lambda: build_workload(asked, CODEC, 0))
    assert not list((tmp_path / "kept").iterdir())


def test_no_more_than_eight_are_kept(tmp_path, monkeypatch):
    for new in range(1, 11):
        kept(tmp_path, monkeypatch, config(tmp_path, max_new_tokens=new))
    assert len(list((tmp_path / "kept").iterdir())) == workload_cache.MOST_FILES
    assert kept(tmp_path, monkeypatch, config(tmp_path, max_new_tokens=10))[1] == 0


def test_a_folder_that_cannot_be_written_is_said(tmp_path, monkeypatch):
    (tmp_path / "kept").write_text("a file")
    _, made, said = kept(tmp_path, monkeypatch, config(tmp_path))
    assert made == 1
    assert said == [f"The workload could not be kept in {tmp_path / 'kept'}: File exists."]


@pytest.mark.slow
def test_a_fiftieth_of_20000_prompts_of_8192_tokens_takes_a_fiftieth_of_a_minute_of_two_cores():
    """In this process's own time, so that what else runs on the machine does not count; the machine's speed does."""
    source = SourceConfig(input=LengthConfig("fixed", mean=8192), shared_prefix=0.25)
    asked = WorkloadConfig(
        prompts="sentences", load="burst", concurrency=None, blocks=1, requests_per_block=400, source=source
    )
    started = time.process_time()
    workload = build_workload(asked, CODEC, 0)
    seconds = time.process_time() - started
    assert {len(each.input_ids) for each in workload.requests} == {8192}
    assert len({each.input_ids for each in workload.requests}) == 400
    assert workload.prefix.tokens == 2048
    assert seconds < 60 * 2 / 50
