"""Timings of a recorded run, played back."""

from __future__ import annotations

import time

import pandas as pd
import pytest

from skote.engines.replay import ReplayEngine, Timing
from skote.engines.simulated import SimulatedEngine
from skote.types import Request, UsageError

MS = 1_000_000
START = 10**12


@pytest.fixture
def recorded(tmp_path):
    """Of the candidate two prompts of 3 tokens and one of 9, of the baseline one; a failure and a warm-up beside."""
    rows, chunks = [], []
    for arm, phase, name, tokens, status, times in (
        ("candidate", "warmup", "w", 3, "ok", ((900, 1),)),
        ("candidate", "measure", "a", 3, "ok", ((4, 1), (6, 2))),
        ("candidate", "measure", "b", 3, "ok", ((8, 1), (9, 1))),
        ("candidate", "measure", "c", 9, "ok", ((2, 1),)),
        ("candidate", "measure", "d", 3, "error", ((1, 1),)),
        ("baseline", "measure", "a", 3, "ok", ((20, 1),)),
    ):
        admitted = START + len(rows) * 50 * MS
        key = {"arm": arm, "block": 0, "round": 0, "phase": phase, "request_id": name}
        rows.append(key | {"input_tokens": tokens, "status": status, "admitted_ns": admitted})
        chunks += [
            key | {"index": i, "t_ns": admitted + ms * MS, "n_tokens": n}
            for i, (ms, n) in reversed([*enumerate(times)])
        ]
    pd.DataFrame(rows).to_parquet(tmp_path / "requests.parquet")
    pd.DataFrame(chunks).to_parquet(tmp_path / "tokens.parquet")
    return str(tmp_path)


def played(engine, *requests):
    started, heard = time.monotonic_ns(), [[] for _ in requests]
    assert engine.generate(
        requests, lambda row, ids: heard[row].append((time.monotonic_ns() - started, list(ids)))
    ) == ["length"] * len(requests)
    return heard


def test_each_prompt_takes_the_times_of_one_as_long_in_turn(recorded):
    engine = ReplayEngine(run=recorded)
    order = [len(prompt) for prompt in ((1, 2, 3), (4, 5, 6), (7, 8, 9), (1,) * 7)]
    firsts = [played(engine, Request("r", (1,) * n, 1))[0][0][0] for n in order]
    for found, expected in zip(firsts, (4, 8, 4, 2), strict=True):
        assert found >= expected * MS


def test_chunks_come_as_they_did_with_the_tokens_of_the_simulated_engine(recorded):
    engine = ReplayEngine(run=recorded, vocab_size=1000)
    first, second = played(engine, Request("r", (1, 2, 3), 5), Request("s", (4, 5, 6), 2))
    assert [len(ids) for _, ids in first] == [1, 2, 2]  # the last of them beyond what was recorded
    for (found, _), expected in zip(first, (4, 6, 8), strict=True):
        assert found >= expected * MS
    assert [token for _, ids in first for token in ids] == SimulatedEngine(vocab_size=1000).output_ids((1, 2, 3), 5)
    assert [len(ids) for _, ids in second] == [1, 1]
    assert second[1][0] >= 9 * MS


def test_beyond_its_end_a_recorded_request_goes_on_at_its_own_pace():
    timing = Timing(3, ((10, 1), (12, 1), (17, 3)))
    assert [timing.chunk(index) for index in range(7)] == [
        *((10, 1), (12, 1), (17, 3)), *((19, 1), (24, 3)), *((26, 1), (31, 3)),
    ]  # fmt: skip
    assert [Timing(3, ((10, 2),)).chunk(index) for index in range(3)] == [(10, 2), (20, 2), (30, 2)]


def test_the_other_arm_and_what_it_says_of_itself(recorded):
    engine = ReplayEngine(run=recorded, arm="baseline", device="cuda:0")
    described = engine.describe()
    assert described["tier_reason"] == f"the baseline's timings of {recorded}, 1 requests, no model"
    assert (described["parameters"], described["speculative"], described["device"]) == (0, False, "cuda:0")
    assert ReplayEngine(run=recorded).describe()["speculative"]


def test_what_cannot_be_played(recorded, tmp_path):
    with pytest.raises(UsageError, match=r"give engine.run=RUN_DIR"):
        ReplayEngine()
    with pytest.raises(UsageError, match=r"has no timings of a run"):
        ReplayEngine(run=str(tmp_path / "nowhere"))
    with pytest.raises(
        UsageError, match=r"no request of the arm other that finished; its arms are baseline, candidate"
    ):
        ReplayEngine(run=recorded, arm="other")
