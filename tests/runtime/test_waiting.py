"""The order in which waiting requests are launched."""

from __future__ import annotations

import random
from concurrent.futures import Future

import pytest

from skote.runtime.waiting import BATCH_TURN, Ticket, Waiting
from skote.types import Priority, Request, RequestError, Sampling


def ticket(name: str, priority: Priority = "interactive", temperature: float = 0.0) -> Ticket:
    return Ticket(Request(name, (1,), 1, Sampling(temperature), priority=priority), 0, Future())


def names(waiting: Waiting, launches: int) -> list[str]:
    return [waiting.pop(1)[0].request.request_id for _ in range(launches)]


def test_interactive_requests_go_first_and_batch_ones_get_every_fourth_launch() -> None:
    waiting = Waiting()
    for number in range(3):
        waiting.put(ticket(f"b{number}", "batch"))
    for number in range(8):
        waiting.put(ticket(f"i{number}"))
    assert names(waiting, 11) == ["i0", "i1", "i2", "b0", "i3", "i4", "i5", "b1", "i6", "i7", "b2"]
    assert not waiting


def test_a_launch_is_shared_within_a_line_alone() -> None:
    waiting = Waiting()
    for each in (ticket("b", "batch"), ticket("a"), ticket("c"), ticket("hot", temperature=1.0), ticket("d")):
        waiting.put(each)
    assert waiting.batch_size(8) == 2
    assert waiting.batch_size(1) == 1
    assert [each.request.request_id for each in waiting.pop(2)] == ["a", "c"]
    assert waiting.batch_size(8) == 1


def test_whoever_leaves_is_gone_and_whoever_was_not_there_is_not() -> None:
    waiting, batch, other = Waiting(), ticket("b", "batch"), ticket("a")
    waiting.put(batch)
    waiting.put(other)
    assert waiting.remove(batch)
    assert not waiting.remove(batch)
    assert waiting.first is other
    assert waiting.clear() == [other]
    assert len(waiting) == 0


def test_who_was_taken_and_comes_back_goes_before_those_who_came_later() -> None:
    waiting = Waiting()
    arrivals = [Ticket(Request(str(number), (1,), 1), number, Future()) for number in range(6)]
    for each in arrivals:
        waiting.put(each)
    first, second, third = waiting.pop(3)
    for each in (second, first, third):
        waiting.put(each)
        waiting.move_up(each)
    assert waiting.clear() == arrivals


@pytest.mark.parametrize("seed", range(5))
def test_no_batch_request_starves_and_each_line_keeps_its_order(seed: int) -> None:
    """A thousand arrivals at random: between two launches of the batch line, at most three others while it waits."""
    dice, waiting, launched = random.Random(seed), Waiting(), []
    passed = 0
    arrivals = [ticket(f"{number}", dice.choice(["interactive", "interactive", "batch"])) for number in range(1000)]
    for arrival in arrivals:
        waiting.put(arrival)
        while waiting and dice.random() < 0.45:
            batch_waits = any(each.request.priority == "batch" for each in waiting)
            (next_one,) = waiting.pop(1)
            launched.append(next_one)
            passed = passed + 1 if batch_waits and next_one.request.priority == "interactive" else 0
            assert passed < BATCH_TURN
    launched += [waiting.pop(1)[0] for _ in range(len(waiting))]
    assert sorted(int(each.request.request_id) for each in launched) == list(range(1000))
    for priority in ("interactive", "batch"):
        line = [int(each.request.request_id) for each in launched if each.request.priority == priority]
        assert line == sorted(line)


def test_an_unknown_priority_is_refused() -> None:
    with pytest.raises(RequestError, match="priority must be one of interactive, batch, got 'urgent'"):
        Request("r", (1,), 1, priority="urgent")  # type: ignore[arg-type]
