"""Transformers' continuous batching as an engine: the reference's tokens, requests that join, leave and fail."""

from __future__ import annotations

import threading

import pytest

from skote.engines.continuous import ContinuousEngine
from skote.runtime.replica import Replica
from skote.types import EngineError, EngineSpec, Request, Sampling, UsageError

WAIT_S = 60.0
PROMPTS = ((1, 5, 7), (9, 3, 4, 8, 8))


@pytest.fixture(scope="module")
def directory(make_checkpoint, reference_ids):
    """A model that ends its text with the third token after the first prompt."""
    first, second, third = reference_ids(make_checkpoint(), PROMPTS[0], 3)
    assert third not in (first, second)
    return make_checkpoint(eos_token_id=third)


@pytest.fixture(scope="module")
def replica(directory):
    """One process for the module: its generation loop runs in a thread that ends with it."""
    options = {"local_dir": str(directory), "device": "cpu", "dtype": "fp32", "max_model_len": 64}
    with Replica(EngineSpec("skote.engines.continuous.ContinuousEngine", options), index=0, device="cpu") as started:
        started.wait_ready(WAIT_S)
        yield started
    assert not started.alive


def ask(replica, *requests):
    return replica.generate(list(requests)).result(WAIT_S)


def test_it_gives_the_references_tokens_one_by_one(replica, directory, reference_ids):
    rows = ask(replica, *(Request(f"r{i}", ids, 6 - i, ignore_eos=True) for i, ids in enumerate(PROMPTS)))
    for i, (row, prompt) in enumerate(zip(rows, PROMPTS, strict=True)):
        assert (row.status, row.finish_reason) == ("ok", "length")
        assert list(row.output_ids) == reference_ids(directory, prompt, 6 - i)
        assert [chunk.n_tokens for chunk in row.chunks] == [1] * (6 - i)


def test_a_request_ends_with_its_end_of_sequence(replica, directory, reference_ids):
    (row,) = ask(replica, Request("a", PROMPTS[0], 6))
    assert (row.finish_reason, list(row.output_ids)) == ("stop", reference_ids(directory, PROMPTS[0], 3))


def test_a_request_joins_while_another_runs_and_one_is_cancelled(replica):
    heard = threading.Event()
    long = replica.generate([Request("long", PROMPTS[0], 60, ignore_eos=True)], lambda row, ids: heard.set())
    assert heard.wait(WAIT_S)
    (short,) = ask(replica, Request("short", PROMPTS[1], 2, ignore_eos=True))
    assert (short.status, len(short.output_ids)) == ("ok", 2)
    replica.cancel(long, 0)
    (cancelled,) = long.result(WAIT_S)
    assert (cancelled.status, len(cancelled.output_ids)) in {("cancelled", n) for n in range(1, 60)} | {("ok", 60)}
    assert ask(replica, Request("next", PROMPTS[1], 1, ignore_eos=True))[0].status == "ok"


def test_what_it_says_of_itself_and_refuses(replica):
    info = replica.call("describe").result(WAIT_S)
    assert (info["scores"], info["notes"]) == (False, [])
    assert info["tier_reason"].endswith("32 pages of 256 positions")  # 16 x (1 for 64 positions, and 1)
    assert len(info["weights_fingerprint"]) == 64
    (row,) = ask(replica, Request("a", PROMPTS[0], 2, Sampling(1.0)))
    assert row.error == "transformers_continuous is greedy alone: set workload.temperature=0."
    with pytest.raises(EngineError, match="no logits"):
        replica.call("score", Request("a", PROMPTS[0], 2), (1,)).result(WAIT_S)
    with pytest.raises(UsageError, match=r"max_requests must be at least 2"):
        ContinuousEngine(local_dir="", device="cpu", dtype="fp32", max_requests=1)
