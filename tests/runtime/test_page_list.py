"""Pages go to one holder at a time, and come back."""

from __future__ import annotations

import random

import pytest

from skote.runtime.page_list import PageList


@pytest.mark.parametrize(("positions", "pages"), [(1, 1), (4, 1), (5, 2), (8, 2), (9, 3)])
def test_positions_are_rounded_up_to_pages(positions: int, pages: int) -> None:
    assert PageList(9, 4).needed(positions) == pages


def test_no_page_is_held_twice_and_none_is_lost() -> None:
    pages, held, draw = PageList(20, 4), [], random.Random(1)
    for _ in range(500):
        if held and draw.random() < 0.5:
            pages.give(held.pop(draw.randrange(len(held))))
        else:
            held.append(pages.take(draw.randint(0, pages.free)))
        taken = [page for each in held for page in each]
        assert len(taken) == len(set(taken)) == 20 - pages.free
        assert set(taken) <= set(range(20))
