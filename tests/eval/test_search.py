from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from skote.eval.search import Bracket, SearchConfig, Tried, bracket, check_search, knee, next_load
from skote.types import UsageError


def searched(kept: Callable[[float], int], config: SearchConfig, share: float = 0.9) -> tuple[list[float], Bracket]:
    """The loads that a search tries, where 400 requests are sent at each and `kept(load)` of them meet the limits."""
    tried: dict[float, Tried] = {}
    loads: list[float] = []
    while (load := next_load(list(tried.values()), config, share)) is not None:
        loads.append(load)
        before = tried.pop(load, Tried(load, 0, 0, 0))
        tried[load] = Tried(load, before.scheduled + 400, before.met + kept(load), before.tries + 1)
        assert len(loads) < 50
    return loads, bracket(list(tried.values()), share)


def test_it_doubles_until_it_misses_and_then_takes_the_middle():
    loads, found = searched(lambda load: 400 if load <= 5 else 0, SearchConfig(start=1.0, precision=0.2))
    assert loads == pytest.approx([1, 2, 4, 8, math.sqrt(32), math.sqrt(4 * math.sqrt(32))])
    assert (found.kept, found.missed) == pytest.approx((math.sqrt(4 * math.sqrt(32)), math.sqrt(32)))


def test_it_halves_where_the_first_load_is_too_much():
    loads, found = searched(lambda load: 400 if load <= 0.3 else 0, SearchConfig(start=1.0, precision=1.0))
    assert loads == [1.0, 0.5, 0.25]
    assert found == Bracket(0.25, 0.5)


@pytest.mark.parametrize("capacity", [0.02, 0.7, 1.0, 3.3, 900.0])
@pytest.mark.parametrize("precision", [0.05, 0.5])
def test_the_bracket_holds_the_capacity_and_is_as_narrow_as_asked(capacity, precision):
    config = SearchConfig(start=1.0, precision=precision, max_probes=40)
    _, found = searched(lambda load: 400 if load <= capacity else 0, config)
    assert found.kept is not None
    assert found.missed is not None
    assert found.kept <= capacity < found.missed <= found.kept * (1 + precision)


def test_it_ends_at_the_bounds():
    assert searched(lambda _: 400, SearchConfig(start=1.0, most=3.0)) == ([1.0, 2.0, 3.0], Bracket(3.0, None))
    assert searched(lambda _: 0, SearchConfig(start=1.0, least=0.5)) == ([1.0, 0.5], Bracket(None, 0.5))
    assert searched(lambda _: 400, SearchConfig(start=2.0, least=2.0, most=2.0)) == ([2.0], Bracket(2.0, None))
    assert len(searched(lambda _: 400, SearchConfig(start=1.0, max_probes=5))[0]) == 5


def test_a_load_on_the_edge_is_tried_again_and_then_decided_by_its_share():
    """Of 360 in 400 the interval is 86.7 to 92.6 %: neither kept nor missed at 90 %."""
    assert [Tried(1, 400, met).outcome(0.9) for met in (340, 360, 390)] == ["missed", "undecided", "kept"]
    config = SearchConfig(start=1.0, most=1.0, least=1.0, tries=3)
    assert searched(lambda _: 360, config) == ([1.0, 1.0, 1.0], Bracket(1.0, None))
    assert searched(lambda _: 359, config) == ([1.0, 1.0, 1.0], Bracket(None, 1.0))


def test_a_load_that_is_not_sustained_has_missed():
    assert Tried(1, 400, 400, is_saturated=True).outcome(0.9) == "missed"
    assert bracket([Tried(1, 400, 400), Tried(2, 400, 400, is_saturated=True)], 0.9) == Bracket(1, 2)


def test_a_load_that_was_kept_above_one_that_missed_is_not_believed():
    tried = [Tried(1, 400, 400), Tried(4, 400, 400), Tried(2, 400, 0)]
    assert bracket(tried, 0.9) == Bracket(1, 2)


def test_the_knee_is_farthest_below_the_line_between_the_ends():
    # Scaled: loads 0, 1/4, 1/2, 3/4, 1; latencies 0, 0, 0.1, 0.5, 1: 0.4 below the line at the third.
    assert knee([(1, 10), (2, 10), (3, 11), (4, 15), (5, 20)]) == 3
    assert knee([(5, 20), (1, 10), (3, 11)]) == 3
    assert knee([(1, 10), (2, 20), (3, 30)]) is None
    assert knee([(1, 10), (2, 9), (3, 10)]) is None
    assert knee([(1, 10), (2, 20)]) is knee([]) is None


@pytest.mark.parametrize(
    ("options", "load", "limited", "sentence"),
    [
        ({"start": 1.0}, "closed", True, r"workload\.load=closed has none: choose constant, poisson, gamma or trace"),
        ({"start": 1.0}, "poisson", False, r"A search needs limits to keep: slo\.ttft_ms"),
        ({"start": 0.001}, "poisson", True, r"must ascend from above 0, got 0\.01, 0\.001 and 10000"),
        ({"start": 2.0, "most": 1.0}, "poisson", True, r"must ascend"),
        ({"start": 2.0, "precision": 0.0}, "poisson", True, r"search\.precision must be above 0, got 0"),
        ({"start": 2.0, "tries": 0}, "poisson", True, r"search\.tries must be at least 1, got 0"),
        ({"start": 2.0, "max_probes": 0}, "poisson", True, r"search\.max_probes must be at least 1, got 0"),
    ],
)
def test_a_wrong_option_is_named(options, load, limited, sentence):
    with pytest.raises(UsageError, match=sentence):
        check_search(SearchConfig(**options), load, limited=limited)


def test_no_search_needs_nothing():
    check_search(SearchConfig(), "closed", limited=False)
