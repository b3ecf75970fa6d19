"""Policies on cases worked out by hand."""

from __future__ import annotations

import dataclasses
import random

import pytest

from skote.runtime import policies
from skote.runtime.policies import (
    BUSIER_BY,
    BUSIER_TIMES,
    POLICIES,
    PREFIX_BLOCK,
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


class TestPrefixAware:
    """Blocks are of `PREFIX_BLOCK` tokens; loads are (index, requests, free slots)."""

    @staticmethod
    def loads(*states: tuple[int, int, int]) -> list[Load]:
        return [Load(index, requests, 0, None, free) for index, requests, free in states]

    @staticmethod
    def request(head: int, tail: int = 0, *, blocks: int = 3, salt: str = "") -> Request:
        ids = (head,) * PREFIX_BLOCK * blocks + (tail,) * PREFIX_BLOCK
        return Request("r", ids, 1, cache_salt=salt)

    def test_the_same_beginning_goes_to_the_same_replica(self) -> None:
        policy, idle = PrefixAware(), self.loads((0, 0, 4), (1, 0, 4), (2, 0, 4))
        first = [policy.choose(idle, self.request(head)) for head in range(6)]
        assert first == [0, 1, 2, 0, 1, 2]  # spread, where nobody has seen it
        assert [policy.choose(idle, self.request(head, 9)) for head in range(6)] == first

    def test_the_longest_beginning_wins(self) -> None:
        policy, idle = PrefixAware(), self.loads((0, 0, 4), (1, 0, 4))
        assert policy.choose(idle, self.request(1, 1, blocks=1)) == 0
        assert policy.choose(self.loads((0, 5, 4), (1, 0, 4)), self.request(1, 2)) == 1
        assert policy.choose(idle, self.request(1, 3)) == 1
        assert policy.choose(idle, self.request(1, 1, blocks=1)) == 0

    def test_salts_and_what_comes_after_another_beginning_are_told_apart(self) -> None:
        policy, idle = PrefixAware(), self.loads((0, 0, 4), (1, 0, 4))
        assert policy.choose(idle, self.request(1, salt="a")) == 0
        assert policy.choose(idle, self.request(1, salt="b")) == 1
        shifted = Request("r", (2,) + (1,) * 4 * PREFIX_BLOCK, 1, cache_salt="a")
        assert policy.choose(self.loads((0, 1, 4), (1, 0, 4)), shifted) == 1

    def test_a_replica_that_was_started_again_has_nothing(self) -> None:
        policy, (first, second) = PrefixAware(), self.loads((0, 0, 4), (1, 0, 4))
        assert policy.choose([first, second], self.request(1)) == 0
        assert policy.choose([second], self.request(1)) == 1  # the first one has ended
        back = dataclasses.replace(first, restarts=1)
        assert policy.choose([back, second], self.request(1)) == 1
        assert policy.choose([back, second], self.request(2)) == 0

    def test_less_than_a_block_is_no_beginning(self) -> None:
        policy = PrefixAware()
        short = Request("r", (1,) * (PREFIX_BLOCK - 1), 1)
        assert [policy.choose(self.loads((0, busy, 4), (1, 1, 4)), short) for busy in (0, 2)] == [0, 1]

    @pytest.mark.parametrize(
        ("states", "chosen"),
        [
            ([(0, 4, 9), (1, 0, 9)], 0),
            ([(0, 5, 9), (1, 0, 9)], 1),  # four more than the least busy one are the limit
            ([(0, 30, 9), (1, 20, 9)], 0),  # or half as many again
            ([(0, 31, 9), (1, 20, 9)], 1),
            ([(0, 1, 0), (1, 0, 1)], 1),  # it would wait there, and not here
            ([(0, 4, 0), (1, 3, 0)], 0),  # it waits anyway
            ([(0, 9, 0), (1, 3, 0)], 1),
        ],
    )
    def test_a_busy_replica_does_not_get_it(self, states: list[tuple[int, int, int]], chosen: int) -> None:
        policy = PrefixAware()
        assert policy.choose(self.loads((0, 0, 9), (1, 0, 9)), self.request(1)) == 0
        assert policy.choose(self.loads(*states), self.request(1)) == chosen

    def test_what_is_remembered_is_bounded_and_a_prompts_end_goes_first(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(policies, "PREFIX_BLOCKS", 6)
        policy = PrefixAware()
        one, both = self.loads((0, 0, 9)), self.loads((0, 1, 9), (1, 0, 9))
        policy.choose(one, self.request(1))
        policy.choose(one, self.request(2))  # two of the first one's four blocks are left
        assert policy.choose(both, Request("r", (1,) * 2 * PREFIX_BLOCK, 1)) == 0
        policy.choose(one, self.request(3))
        policy.choose(one, self.request(4))
        assert policy.choose(both, self.request(1)) == 1

    @pytest.mark.parametrize("seed", range(5))
    def test_balanced_loads_follow_the_prefix_and_none_is_left_far_behind(self, seed: int) -> None:
        """Requests that end at random, with more slots than requests: by a model of what each replica was sent."""
        draw, policy = random.Random(seed), PrefixAware()
        running = [0, 0, 0]
        sent: dict[int, set[int]] = {}
        for _ in range(600):
            head = draw.randrange(9)
            states = [(index, busy, 1000 - busy) for index, busy in enumerate(running)]
            chosen = policy.choose(self.loads(*states), self.request(head, draw.randrange(10**6)))
            most = max(min(running) + BUSIER_BY, min(running) * BUSIER_TIMES)
            assert running[chosen] <= most
            known = [index for index in sent.get(head, ()) if running[index] <= most]
            assert not known or chosen in known
            sent.setdefault(head, set()).add(chosen)
            running[chosen] += 1
            for index in range(3):
                running[index] -= sum(draw.random() < 0.25 for _ in range(running[index]))
        assert all(sent.values())
