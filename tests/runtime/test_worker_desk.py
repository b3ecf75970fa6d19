"""The worker's desk: launches of one row and of several, each answered once, when all of its rows have ended."""

from __future__ import annotations

from dataclasses import replace

import pytest

from skote.runtime.launch_rows import Part
from skote.runtime.stops import Stopping
from skote.runtime.worker_desk import Launch, WorkerDesk
from skote.types import EngineError, Request


def request(name: str, new: int = 3) -> Request:
    return Request(name, (1, 2), new)


class Inbox:
    """Launches and cancels that the test puts there."""

    def __init__(self) -> None:
        self.launches: list[Launch] = []
        self.cancelled: set[tuple[int, int]] = set()
        self.forgotten: list[int] = []

    def next_launch(self) -> Launch | None:
        return self.launches.pop(0) if self.launches else None

    def is_cancelled(self, call_id: int, row: int) -> bool:
        return (call_id, row) in self.cancelled

    def forget(self, call_id: int) -> None:
        self.forgotten.append(call_id)


class Kept:
    """A desk, and what it answered: calls, rows and parts."""

    def __init__(self, *first: Request) -> None:
        self.inbox = Inbox()
        self.answers: list[tuple[int, int, Part]] = []
        self.ticks = 0
        self.begun: list[int] = []
        self.told: list[tuple[int, int, list[int]]] = []
        self.desk = WorkerDesk(
            "Odd",
            (10, first, False),
            self.inbox,
            lambda *answer: self.answers.append(answer),
            lambda call_id, row, ids: self.told.append((call_id, row, list(ids))),
            self,
            Stopping(None),
        )

    def tick(self) -> None:
        self.ticks += 1

    def begin(self, call_id: int) -> None:
        self.begun.append(call_id)

    def keep(self, tokens: int) -> None:
        self.kept_tokens = tokens


def test_each_launch_is_answered_as_it_ends() -> None:
    kept = Kept(request("a"))
    ((first, a),) = kept.desk.arrivals()
    assert a.request_id == "a"
    kept.desk.admit(first)
    kept.desk.emit(first, (7,))
    kept.inbox.launches = [(11, [request("b")], False), (12, [request("c")], False)]
    (b, c) = (key for key, _ in kept.desk.arrivals())
    assert kept.desk.arrivals() == []
    kept.desk.admit(b)
    kept.desk.emit(b, (8, 9))
    kept.desk.end(b, "stop")
    ((call_id, _, part),) = kept.answers
    assert (call_id, part.output_ids, part.chunk_tokens, part.finish_reason) == (11, (8, 9), (2,), "stop")
    assert (part.error, part.cancelled) == (None, False)
    assert part.admitted_ns is not None
    assert part.admitted_ns <= part.chunk_ns[0]
    kept.desk.fail(c, EngineError("No room."))
    kept.desk.end(first, "length")
    assert [call_id for call_id, _, _ in kept.answers] == [11, 12, 10] == kept.inbox.forgotten
    failed = kept.answers[1][2]
    assert (failed.error, failed.admitted_ns, failed.output_ids) == ("No room.", None, ())
    assert kept.ticks == 2
    assert kept.begun == [10, 11]


def test_cached_tokens_are_those_that_the_engine_names() -> None:
    kept = Kept(request("a"), request("b"))
    a, b = (key for key, _ in kept.desk.arrivals())
    kept.desk.admit(a)
    kept.desk.cached(a, 0)
    kept.desk.end(a, "length")
    kept.desk.end(b, "length")
    assert [part.cached_tokens for _, _, part in kept.answers] == [0, None]
    kept.desk.keeps(256)
    assert kept.kept_tokens == 256


def test_a_row_of_a_launch_is_answered_as_it_ends_and_the_launch_forgotten_with_the_last() -> None:
    kept = Kept(request("a"), request("b"), request("c"))
    a, b, c = (key for key, _ in kept.desk.arrivals())
    for number, key in enumerate((c, a, b), 1):
        kept.desk.admit(key)
        kept.desk.emit(key, (key,))
        assert kept.inbox.forgotten == []
        kept.desk.end(key, "length")
        assert len(kept.answers) == number
    assert [(call_id, row, part.output_ids) for call_id, row, part in kept.answers] == [
        (10, 2, (c,)),
        (10, 0, (a,)),
        (10, 1, (b,)),
    ]
    assert kept.inbox.forgotten == [10]


def test_what_comes_after_a_cancel_is_dropped() -> None:
    kept = Kept(request("a"), request("b"))
    a, b = (key for key, _ in kept.desk.arrivals())
    kept.desk.admit(a)
    kept.desk.emit(a, (1,))
    kept.inbox.cancelled = {(10, 0), (10, 1)}
    assert kept.desk.is_cancelled(a)
    kept.desk.emit(a, (2,))
    kept.desk.end(a, "length")
    kept.desk.end(b, None)
    (_, _, first), (_, _, second) = kept.answers
    assert (first.output_ids, first.cancelled, first.finish_reason) == ((1,), True, None)
    assert (second.output_ids, second.cancelled, second.admitted_ns) == ((), True, None)


def test_a_cancel_that_comes_after_the_last_token_is_too_late() -> None:
    kept = Kept(request("a", 1))
    ((key, _),) = kept.desk.arrivals()
    kept.desk.emit(key, (1,))
    kept.inbox.cancelled = {(10, 0)}
    kept.desk.end(key, "length")
    assert kept.answers[0][2].finish_reason == "length"


def test_what_comes_after_a_stop_is_no_part_of_the_answer() -> None:
    stopping = [replace(request(name), stop_ids=(5,)) for name in "ab"]
    kept = Kept(*stopping)
    a, b = (key for key, _ in kept.desk.arrivals())
    kept.desk.emit(a, (4, 5, 6))  # as much as an engine hands over at once
    assert kept.desk.is_cancelled(a)
    assert not kept.desk.is_cancelled(b)
    kept.desk.emit(a, (7,))
    kept.desk.end(a, None)
    kept.desk.emit(b, (4,))
    kept.desk.end(b, "length")
    ((_, (first, second)),) = kept.answers
    assert (first.output_ids, first.chunk_tokens, first.finish_reason, first.cancelled) == ((4, 5), (2,), "stop", False)
    assert (second.output_ids, second.finish_reason) == ((4,), "length")


def test_a_stop_string_without_a_tokenizer_fails_its_request_alone() -> None:
    kept = Kept(replace(request("a"), stop_strings=("x",)), request("b"))
    ((b, _),) = kept.desk.arrivals()
    kept.desk.emit(b, (1,))
    kept.desk.end(b, "length")
    ((_, (first, second)),) = kept.answers
    assert str(first.error).startswith("Stop strings need the model's tokenizer")
    assert (second.error, second.output_ids) == (None, (1,))


def test_what_an_engine_leaves_fails_and_what_it_never_saw_is_left() -> None:
    kept = Kept(request("a"))
    kept.inbox.launches = [(11, [request("b")], False)]
    kept.desk.fail_all("It broke.")
    assert [(call_id, part.error) for call_id, _, part in kept.answers] == [(10, "It broke.")]
    assert len(kept.inbox.launches) == 1


def test_a_chunk_without_tokens_is_an_error() -> None:
    kept = Kept(request("a"))
    ((key, _),) = kept.desk.arrivals()
    with pytest.raises(EngineError, match=r"^Odd emitted a chunk without tokens\.$"):
        kept.desk.emit(key, ())
