"""Seats, pages and rows: who is admitted when, what runs next, and where rows go."""

from __future__ import annotations

import pytest

from skote.runtime.page_list import PageList
from skote.runtime.scheduler import Idle, Join, Move, Pack, Scheduler, Seat, Step, sizes_for
from skote.types import CapacityError, Request


def scheduler(rows: int = 4, pages: int = 100, *, page: int = 4, pieces: int = 2, chunk: int = 8) -> Scheduler:
    return Scheduler(rows=rows, pages=PageList(pages, page), pieces=pieces, chunk=chunk)


def request(prompt: int, new: int = 3, name: str = "r") -> Request:
    return Request(name, tuple(range(1, prompt + 1)), new)


def run(each: Scheduler) -> list[tuple[str, object, list[object]]]:
    """The next launch, noted: what it was, of whom, and the changes after it."""
    work = each.next()
    if work is None:
        return []
    if isinstance(work, Pack):
        return [("pack", [(p.seat.key, p.start, p.stop) for p in work.pieces], list(each.launched(work)))]
    return [("step", (work.size, [seat.key for seat in work.seats]), list(each.launched(work)))]


@pytest.mark.parametrize(
    ("rows", "sizes"),
    [(1, (1,)), (2, (1, 2)), (3, (1, 2, 4)), (16, (1, 2, 4, 8, 16)), (17, (1, 2, 4, 8, 16, 32)), (128, None)],
)
def test_sizes_end_at_the_first_that_covers_all_rows(rows: int, sizes: tuple[int, ...] | None) -> None:
    assert sizes_for(rows) == (sizes or (1, 2, 4, 8, 16, 32, 64, 128))


def test_a_prompt_is_cut_at_pages_and_several_share_a_pack() -> None:
    each = scheduler(chunk=8)
    each.offer(7, request(6, 2))
    each.offer(8, request(3, 1))
    assert [seat.key for seat in each.admit()] == [7, 8]
    assert run(each) == [("pack", [(7, 0, 4), (7, 4, 6)], [Join(0, 1)])]
    assert run(each) == [("step", (1, [7]), [Idle(0, 1)])]
    assert run(each) == [("pack", [(8, 0, 3)], [])]
    assert each.next() is None
    assert each.seats == []


def test_between_two_steps_no_more_than_a_chunk_is_prefilled() -> None:
    each = scheduler(pieces=1, chunk=8)
    each.offer(0, request(2, 9))
    each.admit()
    run(each)
    each.offer(1, request(19, 9))
    each.admit()
    kinds = [run(each)[0][0] for _ in range(9)]
    assert kinds == ["pack", "step", "pack", "pack", "step", "pack", "pack", "step", "step"]


def test_without_running_rows_prompts_need_not_wait_for_a_step() -> None:
    each = scheduler(pieces=1, chunk=4)
    each.offer(0, request(12))
    each.admit()
    assert [run(each)[0][0] for _ in range(4)] == ["pack", "pack", "pack", "step"]


def seated(each: Scheduler, count: int, new: int = 50) -> list[Seat]:
    """`count` requests in the first rows."""
    for key in range(count):
        each.offer(key, request(2, new))
    seats = each.admit()
    while any(seat.row is None for seat in seats):
        work = each.next()
        assert isinstance(work, Pack | Step)
        each.launched(work)
    return seats


def test_the_last_row_takes_the_place_of_one_that_is_left() -> None:
    each = scheduler(rows=4)
    seats = seated(each, 4)
    assert each.leave([seats[1]]) == [Move(1, 3), Idle(3, 4)]
    assert [seat.row for seat in seats] == [0, None, 2, 1]
    assert each.next() == Step(4, (seats[0], seats[3], seats[2]))
    assert each.leave([seats[2]]) == [Idle(2, 3)]
    assert each.next() == Step(2, (seats[0], seats[3]))


def test_rows_that_are_left_together_move_as_little_as_may_be() -> None:
    each = scheduler(rows=4)
    seats = seated(each, 4)
    assert each.leave(seats) == [Idle(0, 4)]
    each = scheduler(rows=4)
    seats = seated(each, 4)
    assert each.leave([seats[0], seats[3]]) == [Move(0, 2), Idle(2, 4)]
    assert [seat.row for seat in seats] == [None, 1, 0, None]


def test_none_passes_one_that_waits_for_pages() -> None:
    each = scheduler(rows=4, pages=4)
    each.offer(0, request(4, 9))  # 3 pages
    each.offer(1, request(4, 5))  # 2
    each.offer(2, request(1, 1))  # 1
    assert [seat.key for seat in each.admit()] == [0]
    assert each.admit() == []
    each.leave(each.seats[-1:])
    assert [seat.key for seat in each.admit()] == [1, 2]


def test_pages_are_free_once_the_last_token_was_asked_for() -> None:
    each = scheduler(rows=4, pages=2)
    each.offer(0, request(4, 2))
    each.offer(1, request(8, 1))
    assert [seat.key for seat in each.admit()] == [0]
    run(each)
    assert each.admit() == []
    assert run(each) == [("step", (1, [0]), [Idle(0, 1)])]
    assert [seat.key for seat in each.admit()] == [1]


def test_what_can_never_fit_is_refused_with_the_numbers() -> None:
    each = scheduler(pages=2, page=4)
    each.offer(0, request(8, 1))
    with pytest.raises(CapacityError, match=r"'long' needs 3 pages of 4 positions, the cache has 2: shorten"):
        each.offer(1, request(8, 2, "long"))


def test_one_that_waits_or_is_prefilled_can_leave() -> None:
    each = scheduler(rows=1, pages=3, pieces=1)
    each.offer(0, request(12, 1))
    each.offer(1, request(4, 1))
    each.offer(2, request(12, 1))
    (first,) = each.admit()
    run(each)
    waiting = each.seats[0]
    assert waiting.key == 1
    assert each.leave([first, waiting]) == []
    assert [seat.key for seat in each.admit()] == [2]
    assert each.leave([first]) == []  # it holds nothing
    assert [seat.key for seat in each.seats] == [2]
