"""The simulated engine: what it emits, when, and how it fails."""

from __future__ import annotations

import hashlib
import itertools
import struct
import time
from collections.abc import Sequence

import pytest

from skote.engines.simulated import SimulatedEngine
from skote.types import EngineError, Request, UsageError


def run(engine: SimulatedEngine, *requests: Request) -> tuple[list[list[int]], list[str]]:
    rows: list[list[int]] = [[] for _ in requests]

    def emit(row: int, ids: Sequence[int]) -> None:
        assert len(ids) == 1
        rows[row].extend(ids)

    return rows, list(engine.generate(requests, emit))


def test_tokens_are_shake_256_of_the_prompt() -> None:
    digest = hashlib.shake_256(struct.pack("<3I", 5, 6, 700)).digest(16)
    expected = [word % 1000 for word in struct.unpack("=4I", digest)]

    rows, reasons = run(SimulatedEngine(vocab_size=1000), Request("a", (5, 6, 700), 4))

    assert rows == [expected]
    assert reasons == ["length"]


def test_rows_of_a_batch_keep_their_own_limits_and_equal_the_unbatched_rows() -> None:
    engine = SimulatedEngine()
    requests = [Request("a", (1, 2), 5), Request("b", (3,), 1), Request("c", (4, 5, 6), 3)]

    rows, reasons = run(engine, *requests)

    assert [len(row) for row in rows] == [5, 1, 3]
    assert rows == [run(engine, request)[0][0] for request in requests]
    assert reasons == ["length"] * 3


def test_delays_are_never_shorter_than_programmed() -> None:
    stamps: list[int] = []
    engine = SimulatedEngine(prefill_ms=4.0, token_ms=2.0)

    start = time.monotonic_ns()
    engine.generate([Request("a", (1,), 3)], lambda row, ids: stamps.append(time.monotonic_ns()))

    assert stamps[0] - start >= 4_000_000
    assert all(later - earlier >= 2_000_000 for earlier, later in itertools.pairwise(stamps))


def test_drawn_delays_belong_to_the_prompt_and_the_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    monkeypatch.setattr("skote.engines.simulated._wait", waits.append)
    delays = {"distribution": "lognormal", "prefill_ms": 5.0, "prefill_sd_ms": 2.0, "token_ms": 1.0, "token_sd_ms": 0.5}

    def drawn(prompt: tuple[int, ...], seed: int) -> tuple[float, ...]:
        waits.clear()
        run(SimulatedEngine(**delays, delay_seed=seed), Request("a", prompt, 3))  # type: ignore[arg-type]
        return tuple(waits)

    assert len(drawn((1, 2), 0)) == 3
    assert drawn((1, 2), 0) == drawn((1, 2), 0)
    assert len({drawn((1, 2), 0), drawn((1, 3), 0), drawn((1, 2), 1)}) == 3


@pytest.mark.parametrize(("fail_after", "limit", "emitted"), [(0, 4, 0), (2, 4, 2), (9, 4, 3), (1, 1, 0)])
def test_a_failing_launch_keeps_the_tokens_before_the_failure(fail_after: int, limit: int, emitted: int) -> None:
    engine = SimulatedEngine(fail_on=["bad"], fail_after=fail_after)
    tokens: list[int] = []

    with pytest.raises(EngineError, match="told to fail on request 'bad'"):
        engine.generate([Request("bad", (1,), limit)], lambda row, ids: tokens.extend(ids))

    assert tokens == engine.output_ids((1,), limit)[:emitted]


def test_scores_are_highest_at_the_token_that_is_generated() -> None:
    engine = SimulatedEngine(vocab_size=97)
    request = Request("a", (8, 9), 6)

    logits = engine.score(request, [0] * 6)

    assert logits.shape == (6, 97)
    assert logits.argmax(axis=1).tolist() == run(engine, request)[0][0]


def test_common_keywords_are_taken_and_the_reported_ones_reported() -> None:
    engine = SimulatedEngine(local_dir="x", device="cuda:3", dtype="bf16", threads=2, random_seed=1, token_ms=0.5)

    described = engine.describe()

    assert (described["device"], described["dtype"], described["token_ms"]) == ("cuda:3", "bf16", 0.5)


@pytest.mark.parametrize("options", [{"prefill_ms": -1.0}, {"token_ms": -0.1}, {"vocab_size": 0}, {"fail_after": -1}])
def test_senseless_options_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(UsageError, match=next(iter(options))):
        SimulatedEngine(**options)
