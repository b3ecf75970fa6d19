"""The next token: ties, top-k and the nucleus by hand, temperatures at their limits, frequencies, seeds."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch

from skote.runtime.sampling import next_token, request_generator
from skote.types import RequestError, Sampling

CPU = torch.device("cpu")
GREEDY = Sampling()
# Probabilities 0.1, 0.4, 0.2, 0.3 of the tokens 0 to 3.
FOUR = torch.tensor([0.1, 0.4, 0.2, 0.3]).log()


def draws(logits: torch.Tensor, sampling: Sampling, n: int = 300) -> Counter[int]:
    generator = request_generator(sampling, CPU)
    return Counter(next_token(logits, sampling, generator) for _ in range(n))


def test_greedy_takes_the_largest_and_the_lowest_id_of_a_tie() -> None:
    assert next_token(torch.tensor([1.0, 3.0, 2.0]), GREEDY, None) == 1
    assert next_token(torch.tensor([1.0, 3.0, 3.0, 3.0]), GREEDY, None) == 1
    ties = torch.zeros(50000)
    ties[[777, 20000, 49999]] = 5.0
    assert next_token(ties, GREEDY, None) == 777


@pytest.mark.parametrize(
    ("top_p", "kept"),
    [
        (0.05, {1}),  # the most likely token always stays
        (0.35, {1}),
        (0.45, {1, 3}),
        (0.65, {1, 3}),
        (0.75, {1, 2, 3}),
        (0.95, {0, 1, 2, 3}),
        (1.0, {0, 1, 2, 3}),
    ],
)
def test_the_nucleus_by_hand(top_p: float, kept: set[int]) -> None:
    assert set(draws(FOUR, Sampling(temperature=1.0, top_p=top_p))) == kept


@pytest.mark.parametrize(
    ("top_k", "kept"), [(1, {1}), (2, {1, 3}), (3, {1, 2, 3}), (4, {0, 1, 2, 3}), (9, {0, 1, 2, 3})]
)
def test_the_most_likely_by_hand(top_k: int, kept: set[int]) -> None:
    assert set(draws(FOUR, Sampling(temperature=1.0, top_k=top_k))) == kept


def test_the_nucleus_is_one_of_the_most_likely_tokens() -> None:
    # Token 1 has 4/7 among the two most likely ones, and 0.4 among all.
    assert set(draws(FOUR, Sampling(temperature=1.0, top_k=2, top_p=0.55))) == {1}
    assert set(draws(FOUR, Sampling(temperature=1.0, top_p=0.55))) == {1, 3}


def test_ties_with_the_last_that_is_kept_stay() -> None:
    for sampling in (Sampling(temperature=1.0, top_p=0.5), Sampling(temperature=1.0, top_k=2)):
        assert len(draws(torch.zeros(4), sampling)) == 4


def test_temperature_comes_before_the_nucleus() -> None:
    # At temperature 0.5 the probabilities are squared: 0.01, 0.16, 0.04, 0.09 of 0.30. Tokens 1 and 3 hold 0.83.
    assert set(draws(FOUR, Sampling(temperature=0.5, top_p=0.8))) == {1, 3}
    assert set(draws(FOUR, Sampling(temperature=1.0, top_p=0.8))) == {1, 2, 3}


@pytest.mark.parametrize(
    ("sampling", "probabilities"),
    [
        (Sampling(temperature=1.0, seed=5), [0.1, 0.4, 0.2, 0.3]),
        (Sampling(temperature=0.5, seed=5), [0.01 / 0.3, 0.16 / 0.3, 0.04 / 0.3, 0.09 / 0.3]),
        (Sampling(temperature=1.0, top_p=0.65, seed=5), [0.0, 4 / 7, 0.0, 3 / 7]),
        (Sampling(temperature=0.5, top_k=3, seed=5), [0.0, 0.16 / 0.29, 0.04 / 0.29, 0.09 / 0.29]),
    ],
)
def test_frequencies_are_the_probabilities(sampling: Sampling, probabilities: list[float]) -> None:
    n = 4000
    seen = draws(FOUR, sampling, n)

    for token, expected in enumerate(probabilities):
        deviation = math.sqrt(expected * (1 - expected) / n)
        assert abs(seen[token] / n - expected) <= 4 * deviation


def test_a_temperature_near_zero_is_greedy_and_a_huge_one_is_uniform() -> None:
    logits = torch.tensor([90.0, 100.0, 99.9])

    for temperature in (1e-3, 1e-30, 1e-300):
        assert set(draws(logits, Sampling(temperature=temperature), 20)) == {1}
    for temperature in (1e30, math.inf):
        seen = draws(logits, Sampling(temperature=temperature), 3000)
        assert all(abs(seen[token] / 3000 - 1 / 3) < 0.04 for token in range(3))
        assert set(draws(logits, Sampling(temperature=temperature, top_k=2), 300)) == {1, 2}


def test_a_seed_gives_the_same_draws_whatever_the_global_state() -> None:
    logits = torch.randn(100, generator=torch.Generator().manual_seed(1))

    def sequence(seed: int) -> list[int]:
        sampling = Sampling(temperature=1.0, seed=seed)
        generator = request_generator(sampling, CPU)
        return [next_token(logits, sampling, generator) for _ in range(20)]

    torch.manual_seed(1)
    first = sequence(7)
    torch.manual_seed(2)

    assert sequence(7) == first
    assert sequence(8) != first


def test_half_precision_logits_are_widened_first() -> None:
    assert draws(FOUR.bfloat16(), Sampling(temperature=1.0)).keys() == {0, 1, 2, 3}


def test_greedy_needs_no_generator() -> None:
    assert request_generator(GREEDY, CPU) is None
    assert request_generator(Sampling(temperature=1.0), CPU) is not None


@pytest.mark.parametrize("temperature", [-0.1, math.nan])
def test_temperatures_that_mean_nothing(temperature: float) -> None:
    with pytest.raises(RequestError, match="temperature must be 0"):
        Sampling(temperature=temperature)


@pytest.mark.parametrize("top_k", [-1, 0.5, 2.5])
def test_limits_that_mean_nothing(top_k: float) -> None:
    with pytest.raises(RequestError, match="top_k must be a whole number, 0 "):
        Sampling(temperature=1.0, top_k=top_k)


@pytest.mark.parametrize("top_p", [0.0, -0.5, 1.1, math.nan])
def test_nuclei_that_mean_nothing(top_p: float) -> None:
    with pytest.raises(RequestError, match="top_p must lie in"):
        Sampling(temperature=1.0, top_p=top_p)
