"""The pace of tokens on a clock that the test moves."""

from __future__ import annotations

import pytest

from skote.runtime import token_pace
from skote.runtime.token_pace import TokenPace

MS = 1_000_000


class Told:
    """A pace, what it told, and its clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0
        self.figures: list[int] = []
        self.pace = TokenPace(self.figures.append)
        monkeypatch.setattr(token_pace, "CLOCK", lambda: self.now)

    def step(self, ns: int, *requests: object, tokens: int = 1) -> None:
        self.now += ns
        for request in requests:
            self.pace.emitted(request, tokens)


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Told:
    return Told(monkeypatch)


def test_it_tells_the_mean_gap_of_a_request_over_16_tokens(told: Told) -> None:
    told.step(0, "a", "b")
    for ns in [2 * MS] * 12 + [6 * MS] * 4:
        assert told.figures == []
        told.step(ns, "a", "b")
    assert told.figures == [3 * MS]


def test_and_over_20_ms(told: Told) -> None:
    told.step(0, "a")
    for _ in range(39):
        told.step(MS // 2, "a")
    assert told.figures == []
    told.step(MS // 2, "a")
    assert told.figures == [MS // 2]


def test_tokens_that_come_together_share_their_gap(told: Told) -> None:
    told.step(0, "a")
    for _ in range(4):
        told.step(8 * MS, "a", tokens=4)
    assert told.figures == [2 * MS]


def test_another_is_watched_when_one_gets_no_more(told: Told) -> None:
    """Each has 5 tokens, so 4 gaps; what lies between the last of one and the first of the next is no gap."""
    for request in "abcd":
        told.step(100 * MS, request)
        for _ in range(4):
            told.step(2 * MS, request)
    assert told.figures == [2 * MS]


def test_all_that_ran_may_end_at_once(told: Told) -> None:
    told.step(0, "a", "b")
    told.step(2 * MS, "a", "b")
    told.step(100 * MS, "c", "d")
    for _ in range(15):
        told.step(2 * MS, "c", "d")
    assert told.figures == [2 * MS]


def test_requests_of_two_tokens_are_heard_too(told: Told) -> None:
    for number in range(16):
        told.step(50 * MS, number)
        told.step(3 * MS, number)
    assert told.figures == [3 * MS]


def test_those_who_join_and_end_meanwhile_do_not_count(told: Told) -> None:
    told.step(0, "a", "b")
    for number in range(16):
        told.step(5 * MS, "a", f"joins {number}", "b")
    assert told.figures == [5 * MS]
