"""The prefix cache in scheduler and loop, over a fake device whose tokens depend on all that a request's pages hold."""

from __future__ import annotations

import importlib.util
import random
from pathlib import Path
from typing import Any

import pytest

from skote.runtime.page_list import PageList, page_digests
from skote.runtime.scheduler import Pack, Scheduler
from skote.runtime.serving import Serving
from skote.types import Request, RequestError

spec = importlib.util.spec_from_file_location("fake_device", Path(__file__).with_name("fake_device.py"))
assert spec is not None
assert spec.loader is not None
fake_device = importlib.util.module_from_spec(spec)
spec.loader.exec_module(fake_device)
FakeDesk, FakeDevice, alone = fake_device.FakeDesk, fake_device.FakeDevice, fake_device.alone

PAGE = 4
HEAD = tuple(range(10, 22))  # three pages


def scheduler(pages: PageList, *, rows: int = 4, pieces: int = 2) -> Scheduler:
    return Scheduler(rows=rows, pages=pages, pieces=pieces, chunk=1000, prefix_cache=True)


def request(*ids: int, new: int = 2, salt: str = "") -> Request:
    return Request("r", ids, new, ignore_eos=True, cache_salt=salt)


def packs(each: Scheduler) -> list[list[tuple[int, int, int]]]:
    """Prefill all that has a seat: the pieces of each pack."""
    seen = []
    while isinstance(work := each.next(), Pack):
        seen.append([(piece.seat.key, piece.start, piece.stop) for piece in work.pieces])
        each.launched(work)
    return seen


def ended(each: Scheduler, *requests: Request) -> list[int | None]:
    """Prefill `requests`, one after another, and let each go: their cached tokens."""
    cached = []
    for key, one in enumerate(requests):
        each.offer(key, one)
        (seat,) = each.admit()
        packs(each)
        cached.append(seat.cached)
        each.leave([seat])
    return cached


def test_a_prompt_that_begins_as_an_earlier_one_is_prefilled_from_there_on() -> None:
    each = scheduler(PageList(20, PAGE))
    assert ended(each, request(*HEAD, 1)) == [0]
    each.offer(1, request(*HEAD, 2, 3))
    each.admit()
    assert packs(each) == [[(1, 12, 14)]]


def test_the_page_of_the_last_token_is_always_computed() -> None:
    each = scheduler(PageList(20, PAGE))
    assert ended(each, request(*HEAD), request(*HEAD), request(*HEAD, 1), request(*HEAD, 1)) == [0, 8, 8, 12]


def test_other_tokens_before_a_page_and_other_salts_share_nothing() -> None:
    each = scheduler(PageList(20, PAGE))
    others = request(1, *HEAD[1:], 1), request(*HEAD, 1, salt="a"), request(*HEAD, 1, salt="b")
    assert ended(each, request(*HEAD, 1), *others, request(*HEAD, 1, salt="a")) == [0, 0, 0, 0, 12]
    assert each.kept_tokens == 4 * len(HEAD)


def test_those_that_come_together_compute_what_they_share_once() -> None:
    pages = PageList(40, PAGE)
    each = scheduler(pages, pieces=4)
    for key in range(4):
        each.offer(key, request(*HEAD, key))
    seats = each.admit()
    held = 40 - pages.free
    assert packs(each) == [[(0, 0, 4), (0, 4, 8), (0, 8, 12), (0, 12, 13)], [(key, 12, 13) for key in (1, 2, 3)]]
    assert [seat.cached for seat in seats] == [0, 12, 12, 12]
    assert held - (40 - pages.free) == 9  # the pages that they had got for themselves
    assert len({seat.pages[:3] for seat in seats}) == 1
    assert len({seat.pages[3] for seat in seats}) == 4


def test_a_pack_may_hold_a_page_and_who_goes_on_from_it() -> None:
    each = scheduler(PageList(40, PAGE), pieces=4)
    for key in range(3):
        each.offer(key, request(*HEAD[:4], key))
    each.admit()
    assert packs(each) == [[(0, 0, 4), (0, 4, 5), (1, 4, 5), (2, 4, 5)]]


def test_what_a_cancelled_request_has_not_prefilled_is_not_found() -> None:
    each = scheduler(PageList(20, PAGE), pieces=2)
    each.offer(0, request(*HEAD, 1))
    (seat,) = each.admit()
    work = each.next()
    assert isinstance(work, Pack)
    each.launched(work)
    each.leave([seat])
    assert ended(each, request(*HEAD, 1)) == [8]


def test_kept_pages_are_given_up_before_a_request_waits() -> None:
    pages = PageList(5, PAGE)
    each = scheduler(pages)
    assert ended(each, request(*HEAD, 1)) == [0]
    each.offer(1, request(*range(16), new=4))  # five pages
    assert [seat.key for seat in each.admit()] == [1]
    assert pages.share(page_digests((*HEAD, 1), PAGE, "")) == ()


def test_a_request_does_not_give_up_its_own_prefix() -> None:
    each = scheduler(PageList(5, PAGE))
    assert ended(each, request(*HEAD, 1), request(*HEAD, 1, new=8)) == [0, 12]  # five pages, three of them shared


def test_one_that_waits_for_pages_holds_none() -> None:
    pages = PageList(5, PAGE)
    each = scheduler(pages)
    ended(each, request(*HEAD, 1))
    each.offer(1, request(1, 2, 3, 4, 5, new=4))  # two
    (first,) = each.admit()
    each.offer(2, request(*HEAD, 1, new=8))  # five, of which three are there
    assert each.admit() == []
    assert pages.free == 3
    each.leave([first])
    assert [seat.cached for seat in each.admit()] == [12]


def test_without_the_cache_nothing_is_kept_or_counted() -> None:
    pages = PageList(20, PAGE)
    each = Scheduler(rows=4, pages=pages, pieces=2, chunk=8)
    assert ended(each, request(*HEAD, 1), request(*HEAD, 1)) == [None, None]
    assert pages.share(page_digests((*HEAD, 1), PAGE, "")) == ()


def test_a_salt_is_text() -> None:
    with pytest.raises(RequestError, match="cache_salt must be text, got 5"):
        Request("r", (1,), 1, cache_salt=5)  # type: ignore[arg-type]


def serve(desk: Any, pages: PageList, device: Any, *, rows: int) -> None:
    each = Scheduler(rows=rows, pages=pages, pieces=2, chunk=8, prefix_cache=True)
    Serving(desk, each, device, check=lambda _: None, eos_ids=()).run()


@pytest.mark.parametrize(("ahead", "lazy"), [(0, False), (1, False), (1, True)])
@pytest.mark.parametrize("seed", range(20))
def test_whoever_shares_pages_each_gets_its_own_tokens(seed: int, ahead: int, lazy: bool) -> None:
    """Three runs of the loop over the same pages; prompts from a few prefixes, some cancelled at any time."""
    draw = random.Random(seed)
    rows, total = draw.randint(1, 9), draw.randint(10, 60)
    pages = PageList(total, PAGE)
    device = FakeDevice(rows=rows, page=PAGE, ahead=ahead, lazy=lazy)
    heads = [tuple(draw.choices(range(50), k=draw.randint(0, 15))) for _ in range(4)]
    hits = 0
    for _ in range(3):
        requests = [
            Request(
                str(key),
                (*draw.choice(heads), *draw.choices(range(50), k=draw.randint(1, 6))),
                draw.randint(1, 18),
                ignore_eos=True,
                cache_salt=draw.choice("ab"),
            )
            for key in range(40)
        ]
        arrivals: dict[int, list[tuple[int, Request]]] = {1: [(0, requests[0])]}
        for key, each in enumerate(requests[1:], 1):
            arrivals.setdefault(draw.randint(1, 10), []).append((key, each))
        cancels: dict[int, list[int]] = {}
        for key in draw.sample(range(40), 6):
            cancels.setdefault(draw.randint(1, 60), []).append(key)
        desk = FakeDesk(arrivals, cancels)

        serve(desk, pages, device, rows=rows)

        assert set(desk.ends) == set(range(40))
        for key, each in enumerate(requests):
            expected = alone(each)
            if desk.ends[key] is None:
                assert desk.tokens[key] == expected[: len(desk.tokens[key])]
            else:
                assert (desk.ends[key], desk.tokens[key]) == ("length", expected)
                assert desk.cached_tokens[key] in range(0, len(each.input_ids), PAGE)
        hits += sum(desk.cached_tokens.values())
        assert pages.free == total
    assert hits > 0
