"""Top-k and top-p by hand, against a slow independent implementation, and against Transformers' own."""

from __future__ import annotations

import math
import random

import pytest
import torch
from transformers.generation.logits_process import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from skote.runtime.cutoff import cutoff

# Probabilities 0.1, 0.4, 0.2, 0.3 of the tokens 0 to 3.
FOUR = [math.log(share) for share in (0.1, 0.4, 0.2, 0.3)]


def lowest(rows: list[list[float]], temperature: list[float], top_k: list[int], top_p: list[float]) -> torch.Tensor:
    return cutoff(torch.tensor(rows), torch.tensor(temperature), torch.tensor(top_k), torch.tensor(top_p))


def kept(row: list[float], temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0) -> set[int]:
    least = float(lowest([row], [temperature], [top_k], [top_p]))
    return {index for index, logit in enumerate(torch.tensor(row).tolist()) if logit >= least}


@pytest.mark.parametrize(
    ("top_k", "top_p", "expected"),
    [
        (0, 1.0, {0, 1, 2, 3}),
        (1, 1.0, {1}),
        (3, 1.0, {1, 2, 3}),
        (4, 1.0, {0, 1, 2, 3}),
        (2**40, 1.0, {0, 1, 2, 3}),
        (0, 1e-300, {1}),  # the most likely token always stays
        (0, 0.35, {1}),
        (0, 0.45, {1, 3}),
        (0, 0.95, {0, 1, 2, 3}),
        (2, 0.95, {1, 3}),
        (2, 0.55, {1}),  # among the two the first has 4/7
        (0, 0.55, {1, 3}),  # among all 0.4
    ],
)
def test_four_tokens_by_hand(top_k: int, top_p: float, expected: set[int]) -> None:
    assert kept(FOUR, 1.0, top_k, top_p) == expected


def test_ties_with_the_last_that_is_kept_stay_too() -> None:
    assert kept([1.0, 2.0, 2.0, 3.0], top_k=2) == {1, 2, 3}
    assert kept([1.0, 2.0, 2.0, 3.0], top_k=3) == {1, 2, 3}
    assert kept([0.0] * 4, top_p=0.5) == {0, 1, 2, 3}


def test_temperature_comes_first() -> None:
    # At temperature 0.5 the probabilities are squared: 0.01, 0.16, 0.04, 0.09 of 0.30. Tokens 1 and 3 hold 0.83.
    assert kept(FOUR, 0.5, top_p=0.8) == {1, 3}
    assert kept(FOUR, 1.0, top_p=0.8) == {1, 2, 3}
    assert kept(FOUR, math.inf, top_p=0.7) == {1, 2, 3}
    assert kept(FOUR, 1e-30, top_p=0.7) == {1}


def test_temperature_zero_has_no_limit() -> None:
    assert kept(FOUR, 0.0, top_k=1, top_p=0.1) == {0, 1, 2, 3}


def test_each_row_has_its_own_values_and_its_own_result() -> None:
    temperature, top_k, top_p = [1.0, 1.0, 0.0, 0.5], [0, 1, 1, 0], [0.45, 1.0, 1.0, 0.5]
    together = lowest([FOUR] * 4, temperature, top_k, top_p)
    alone = [lowest([FOUR], *([each[row]] for each in (temperature, top_k, top_p))) for row in range(4)]
    assert torch.equal(together, torch.cat(alone))
    expected = torch.tensor([FOUR[3], FOUR[1], FOUR[0], FOUR[1]])
    assert torch.equal(together, expected)


def slow(row: list[float], temperature: float, top_k: int, top_p: float) -> set[int]:
    """Token by token, in double precision."""
    order = sorted(range(len(row)), key=lambda index: -row[index])
    if top_k:
        order = [index for index in order if row[index] >= row[order[min(top_k, len(row)) - 1]]]
    weight = {index: math.exp((row[index] - row[order[0]]) / temperature) for index in order}
    total, mass, last = sum(weight.values()), 0.0, order[0]
    for index in order:
        if mass >= top_p * total:
            break
        mass, last = mass + weight[index], index
    return {index for index in order if row[index] >= row[last]}


def random_case(rng: random.Random) -> tuple[list[float], float, int, float]:
    row = torch.tensor([rng.gauss(0.0, 3.0) for _ in range(rng.randint(1, 200))]).tolist()
    return row, rng.uniform(0.3, 2.0), rng.choice([0, 1, 5, 50, 500]), rng.choice([1.0, rng.uniform(0.01, 0.999)])


def test_random_rows_equal_the_slow_way() -> None:
    rng = random.Random(4)
    for _ in range(200):
        row, temperature, top_k, top_p = random_case(rng)
        assert kept(row, temperature, top_k, top_p) == slow(row, temperature, top_k, top_p)


def test_random_rows_equal_transformers() -> None:
    rng = random.Random(5)
    ids = torch.zeros(1, 1, dtype=torch.long)
    for _ in range(200):
        row, temperature, top_k, top_p = random_case(rng)
        scores = TemperatureLogitsWarper(temperature)(ids, torch.tensor([row]))
        if top_k:
            scores = TopKLogitsWarper(top_k)(ids, scores)
        if top_p < 1.0:
            scores = TopPLogitsWarper(top_p)(ids, scores)
        assert kept(row, temperature, top_k, top_p) == set(scores[0].isfinite().nonzero()[:, 0].tolist())
