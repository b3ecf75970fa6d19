"""The loop over a fake device: every request gets the tokens of a run by itself, whoever comes and goes meanwhile."""

from __future__ import annotations

import importlib.util
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from skote.runtime.page_list import PageList
from skote.runtime.scheduler import SIZES, Scheduler
from skote.runtime.serving import ListDesk, Serving
from skote.types import CapacityError, EngineError, Request, UsageError

spec = importlib.util.spec_from_file_location("fake_device", Path(__file__).with_name("fake_device.py"))
assert spec is not None
assert spec.loader is not None
fake_device = importlib.util.module_from_spec(spec)
spec.loader.exec_module(fake_device)
FakeDesk, FakeDevice, alone = fake_device.FakeDesk, fake_device.FakeDevice, fake_device.alone

PAGE = 4
DEVICES = pytest.mark.parametrize(("ahead", "lazy"), [(0, False), (1, False), (1, True)])


def serve(
    desk: Any,
    *,
    rows: int = 4,
    pages: int = 40,
    ahead: int = 1,
    lazy: bool = True,
    check: Callable[[Request], None] = lambda _: None,
    device: Any = None,
    eos_ids: tuple[int, ...] = (),
) -> Any:
    device = device or FakeDevice(rows=rows, page=PAGE, ahead=ahead, lazy=lazy)
    scheduler = Scheduler(rows=rows, pages=PageList(pages, PAGE), pieces=2, chunk=8)
    Serving(desk, scheduler, device, check=check, eos_ids=eos_ids).run()
    return device


def request(prompt: int, new: int, name: str = "r") -> Request:
    return Request(name, tuple((7 * prompt + index) % 50 for index in range(prompt)), new, ignore_eos=True)


@DEVICES
@pytest.mark.parametrize("seed", range(20))
def test_whoever_comes_and_goes_each_gets_its_own_tokens_once(seed: int, ahead: int, lazy: bool) -> None:
    draw = random.Random(seed)
    rows = draw.randint(1, 9)
    pages = draw.randint(8, 30)
    requests = [
        Request(str(key), tuple(draw.choices(range(50), k=draw.randint(1, 14))), draw.randint(1, 18), ignore_eos=True)
        for key in range(60)
    ]
    arrivals: dict[int, list[tuple[int, Request]]] = {1: [(0, requests[0])]}
    for key, each in enumerate(requests[1:], 1):
        # While the first loop lasts: a loop that ends is entered again by the next arrival, which is the worker's part.
        arrivals.setdefault(draw.randint(1, 12), []).append((key, each))
    cancels: dict[int, list[int]] = {}
    for key in draw.sample(range(60), 6):
        cancels.setdefault(draw.randint(1, 80), []).append(key)
    by_arrival = [key for turn in sorted(arrivals) for key, _ in arrivals[turn]]
    desk = FakeDesk(arrivals, cancels)

    device = serve(desk, rows=rows, pages=pages, ahead=ahead, lazy=lazy)

    assert set(desk.ends) == set(range(60))
    for key, each in enumerate(requests):
        expected = alone(each)
        if desk.ends[key] is None:
            assert key in desk.cancelled_at
            assert desk.tokens[key] == expected[: len(desk.tokens[key])]
            assert desk.ended_at[key] == max(desk.cancelled_at[key], desk.arrived_at[key])
        else:
            assert desk.ends[key] == "length"
            assert desk.tokens[key] == expected
    assert desk.admitted == [key for key in by_arrival if key in set(desk.admitted)]
    widest = max(size for kind, size in device.launches if kind == "step")
    assert widest <= next(size for size in SIZES if size >= rows)


@DEVICES
def test_a_row_that_is_cancelled_is_free_after_the_step(ahead: int, lazy: bool) -> None:
    """One row: the second request is admitted in the very turn that sees the first one's cancel."""
    desk = FakeDesk({1: [(0, request(3, 99)), (1, request(5, 2))]}, {7: [0]})

    serve(desk, rows=1, ahead=ahead, lazy=lazy)

    assert desk.ended_at[0] == 7
    assert desk.ends == {0: None, 1: "length"}
    assert desk.tokens[1] == alone(request(5, 2))
    assert desk.admitted == [0, 1]


def test_a_request_joins_while_others_run_and_is_answered_first() -> None:
    desk = FakeDesk({1: [(0, request(3, 30))], 6: [(1, request(9, 3))]}, {})
    serve(desk)
    assert list(desk.ends) == [1, 0]
    assert desk.tokens == {0: alone(request(3, 30)), 1: alone(request(9, 3))}


@DEVICES
def test_the_end_of_text_frees_a_row_and_the_others_go_on(ahead: int, lazy: bool) -> None:
    requests = [Request(str(key), (key, 1, 2), 30) for key in range(6)]
    stop = alone(requests[2])[4]
    desk = FakeDesk({1: list(enumerate(requests))}, {})

    serve(desk, rows=3, ahead=ahead, lazy=lazy, eos_ids=(stop,))

    for key, each in enumerate(requests):
        expected = alone(each)
        if stop in expected:
            assert desk.tokens[key] == expected[: expected.index(stop) + 1]
            assert desk.ends[key] == "stop"
        else:
            assert (desk.tokens[key], desk.ends[key]) == (expected, "length")
    assert "stop" in desk.ends.values()


def test_steps_are_as_wide_as_the_rows_in_use_need() -> None:
    desk = FakeDesk({1: [(key, request(4, 12 + 4 * key)) for key in range(5)]}, {})
    device = serve(desk, rows=5)
    steps = [size for kind, size in device.launches if kind == "step"]
    assert max(steps) == 8
    assert steps[-4:] == [1, 1, 1, 1]
    assert sorted(steps[steps.index(8) :], reverse=True) == steps[steps.index(8) :]


def test_a_long_prompt_lets_the_rows_that_run_go_on() -> None:
    desk = FakeDesk({1: [(0, request(3, 40))], 4: [(1, request(40, 2))]}, {})
    device = serve(desk)
    kinds = [kind for kind, _ in device.launches[1:]]
    first, last = kinds.index("prefill"), len(kinds) - 1 - kinds[::-1].index("prefill")
    assert kinds[first : last + 1] == ["prefill", "step"] * 4 + ["prefill"]


class TestFailures:
    def test_a_request_that_does_not_fit_fails_alone(self) -> None:
        def check(each: Request) -> None:
            if each.request_id == "bad":
                raise UsageError("It is bad.")

        arrivals = {
            1: [(0, request(3, 5)), (1, request(200, 1, "long")), (2, request(3, 5, "bad")), (3, request(4, 5))]
        }
        desk = FakeDesk(arrivals, {})
        serve(desk, check=check)
        assert desk.ends[2] == "It is bad."
        assert str(desk.ends[1]).startswith("Request 'long' needs 50 pages")
        assert desk.admitted == [0, 3]
        assert (desk.tokens[0], desk.tokens[3]) == (alone(request(3, 5)), alone(request(4, 5)))

    def test_a_row_whose_logits_are_no_numbers_fails_alone(self) -> None:
        class Damaged(FakeDevice):
            def tokens(self, mark: int) -> list[int]:
                given = super().tokens(mark)
                return [-1, *given[1:]] if len(given) == 2 and mark == 5 else given

        device = Damaged(rows=4, page=PAGE, ahead=1, lazy=True)
        desk = FakeDesk({1: [(0, request(3, 9)), (1, request(4, 9))]}, {})
        serve(desk, device=device)
        assert str(desk.ends[0]).startswith("The logits of position 6 are not numbers")
        assert desk.tokens[0] == alone(request(3, 4))
        assert (desk.ends[1], desk.tokens[1]) == ("length", alone(request(4, 9)))

    def test_what_an_emit_raises_ends_the_loop_and_the_next_one_starts_afresh(self) -> None:
        device = FakeDevice(rows=4, page=PAGE, ahead=1, lazy=True)

        def emit(row: int, ids: Any) -> None:
            raise EngineError("enough")

        with pytest.raises(EngineError, match="enough"):
            serve(ListDesk([request(3, 9), request(4, 9)], emit), device=device)
        got: dict[int, list[int]] = {0: [], 1: []}
        desk = ListDesk([request(5, 9), request(6, 2)], lambda row, ids: got[row].extend(ids))
        serve(desk, device=device)
        assert got == {0: alone(request(5, 9)), 1: alone(request(6, 2))}
        assert desk.reasons == ["length", "length"]

    def test_a_list_of_requests_fails_as_a_whole(self) -> None:
        with pytest.raises(CapacityError, match="'long' needs"):
            serve(ListDesk([request(3, 2), request(300, 2, "long")], lambda *_: None))
