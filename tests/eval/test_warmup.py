from __future__ import annotations

import pytest

from skote.eval.warmup import warmup_requests
from skote.types import Request, UsageError


def requests(*lengths: int) -> list[Request]:
    return [Request(str(index), (7,) * length, max_new_tokens=4) for index, length in enumerate(lengths)]


@pytest.mark.parametrize(
    ("lengths", "warm"),
    [(range(1, 6), [1, 2, 3, 4, 5]), (range(1, 10), [1, 3, 5, 7, 9]), ([3, 3, 3], [3])],
    ids=["all up to five", "the quartiles of more", "each once"],
)
def test_shapes(lengths, warm):
    assert [len(request.input_ids) for request in warmup_requests(requests(*lengths), 100, 0)] == warm


def test_the_most_new_tokens_are_among_them():
    """Ten prompt lengths, and the longest answer at the second: not an extreme, and not a quartile."""
    measured = requests(*range(1, 11))
    measured[1] = Request("long", (7, 7), max_new_tokens=99)

    assert (2, 99) in {(len(each.input_ids), each.max_new_tokens) for each in warmup_requests(measured, 100, 0)}


@pytest.mark.parametrize("seed", range(5))
def test_none_starts_as_a_measured_one_does(seed):
    measured = [Request(str(first), (first, 5), max_new_tokens=1) for first in range(9)]

    assert [request.input_ids[0] for request in warmup_requests(measured, 10, seed)] == [9]


def test_there_must_be_a_token_that_none_starts_with():
    measured = [Request(str(first), (first,), max_new_tokens=1) for first in range(2)]
    with pytest.raises(UsageError, match="start with all of the 2 tokens of the vocabulary, which leaves none for the"):
        warmup_requests(measured, 2, seed=0)


def test_they_sample_as_the_measured_ones_do_and_never_stop_early():
    request = Request("r", (1, 2), max_new_tokens=3, ignore_eos=False)
    (warm,) = warmup_requests([request], 10, seed=0)

    assert warm.sampling == request.sampling
    assert warm.ignore_eos
