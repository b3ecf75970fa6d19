"""Policies on cases worked out by hand."""

from __future__ import annotations

import pytest

from skote.runtime.policies import (
    POLICIES,
    LeastWork,
    LengthAware,
    Load,
    PrefixAware,
    RoundRobin,
    ShortestQueue,
    new_policy,
    recent_mean,
)
from skote.types import Request, UsageError


def loads(*states: tuple[int, int, float | None]) -> list[Load]:
    return [Load(index, requests, 0, mean, 0) for index, requests, mean in states]


def prompt(tokens: int) -> Request:
    return Request("r", (1,) * tokens, 1)


def test_round_robin_goes_on_after_the_last_and_skips_the_dead() -> None:
    policy, both = RoundRobin(), loads((0, 9, None), (2, 0, None))
    assert [policy.choose(both, prompt(5)) for _ in range(4)] == [0, 2, 0, 2]
    assert policy.choose(loads((0, 0, None), (1, 0, None), (2, 0, None)), prompt(5)) == 0
    assert policy.choose(loads((7, 0, None)), prompt(5)) == 7
    assert policy.choose(both, prompt(5)) == 0


@pytest.mark.parametrize(
    ("states", "chosen"),
    [
        ([(0, 3, None), (1, 1, None), (2, 2, None)], 1),
        ([(0, 2, None), (1, 1, None), (2, 1, None)], 1),
        ([(3, 0, None)], 3),
    ],
)
def test_shortest_queue_takes_the_least_loaded_then_the_lowest_index(
    states: list[tuple[int, int, float | None]], chosen: int
) -> None:
    assert ShortestQueue().choose(loads(*states), prompt(5)) == chosen


@pytest.mark.parametrize(
    ("states", "chosen"),
    [
        ([(0, 1, 900), (1, 5, 800)], 1),  # five short ones are less work than a long one
        ([(0, 2, 500), (1, 1, 500)], 1),  # as many tokens: the fewer requests
        ([(0, 1, 500), (1, 1, 500)], 0),
    ],
)
def test_least_work_counts_tokens_not_requests(states: list[tuple[int, int, int]], chosen: int) -> None:
    assert LeastWork().choose([Load(*state, None, 0) for state in states], prompt(5)) == chosen


@pytest.mark.parametrize(
    ("states", "prompt_tokens", "chosen"),
    [
        ([(0, 0, 10.0), (1, 9, 100.0)], 80, 1),  # closest wins over load
        ([(0, 0, 10.0), (1, 9, 100.0)], 54, 0),  # 44 against 46
        ([(0, 2, 60.0), (1, 1, 40.0)], 50, 1),  # 10 each: the load decides
        ([(0, 1, 60.0), (1, 1, 40.0)], 50, 0),  # and then the index
        ([(0, 0, 49.0), (1, 5, None)], 50, 1),  # one that has seen nothing fits anything
        ([(0, 1, 50.0), (1, 0, None)], 50, 1),  # a tie at 0: the load decides
        ([(0, 0, 50.0), (1, 0, None)], 50, 0),
    ],
)
def test_length_aware(states: list[tuple[int, int, float | None]], prompt_tokens: int, chosen: int) -> None:
    assert LengthAware().choose(loads(*states), prompt(prompt_tokens)) == chosen


def test_recent_mean_starts_at_the_first_prompt_and_moves_a_fifth_of_the_way() -> None:
    assert recent_mean(None, 100) == 100.0
    assert recent_mean(100.0, 200) == pytest.approx(120.0)
    assert recent_mean(120.0, 20) == pytest.approx(100.0)


def test_every_policy_is_found_by_its_name() -> None:
    assert {name: type(new_policy(name)) for name in POLICIES} == {
        "round_robin": RoundRobin,
        "shortest_queue": ShortestQueue,
        "least_work": LeastWork,
        "length_aware": LengthAware,
        "prefix_aware": PrefixAware,
    }


def test_an_unknown_policy_names_the_known_ones() -> None:
    with pytest.raises(UsageError, match=r"'random'.*round_robin, shortest_queue, least_work, length_aware"):
        new_policy("random")
