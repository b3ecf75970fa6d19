from __future__ import annotations

import itertools

import pytest

from skote.eval.warmup import Unmeasured, warmup_requests
from skote.types import Request, UsageError


def requests(*lengths: int) -> list[Request]:
    return [Request(str(index), (7,) * length, max_new_tokens=4) for index, length in enumerate(lengths)]


def counting(measured: list[Request]) -> Unmeasured:
    """Prompts 100, 100; 101, 101; ... of as many tokens as are asked for."""
    numbers = itertools.count(100)
    return Unmeasured(lambda length: (next(numbers),) * length, [request.input_ids for request in measured])


@pytest.mark.parametrize(
    ("lengths", "warm"),
    [(range(1, 6), [1, 2, 3, 4, 5]), (range(1, 10), [1, 3, 5, 7, 9]), ([3, 3, 3], [3])],
    ids=["all up to five", "the quartiles of more", "each once"],
)
def test_shapes(lengths, warm):
    measured = requests(*lengths)

    assert [len(request.input_ids) for request in warmup_requests(measured, counting(measured))] == warm


def test_the_most_new_tokens_are_among_them():
    """Ten prompt lengths, and the longest answer at the second: not an extreme, and not a quartile."""
    measured = requests(*range(1, 11))
    measured[1] = Request("long", (7, 7), max_new_tokens=99)
    warm = warmup_requests(measured, counting(measured))

    assert (2, 99) in {(len(each.input_ids), each.max_new_tokens) for each in warm}


def test_they_sample_as_the_measured_ones_do_and_never_stop_early():
    request = Request("r", (1, 2), max_new_tokens=3, ignore_eos=False)
    (warm,) = warmup_requests([request], counting([request]))

    assert warm.sampling == request.sampling
    assert warm.ignore_eos


def test_a_prompt_that_ends_as_the_only_measured_one_is_cut_at_its_end():
    """A list of one text, which a further block has with a number in front: 3, 4 before 1, 2."""
    assert Unmeasured(lambda length: (3, 4, 1, 2), [(1, 2)]).fitted(2) == (3, 4)


def test_no_prompt_is_a_measured_one_or_comes_twice():
    drawn = iter([(1, 2), (3, 4), (3, 4), (5, 6)])
    prompts = Unmeasured(lambda length: next(drawn), [(1, 2)])

    assert [prompts.drawn(2), prompts.drawn(2)] == [(3, 4), (5, 6)]


def test_prompts_that_are_all_measured_are_refused():
    with pytest.raises(UsageError, match=r"do not make others than the measured ones.*workload\.prompt_tokens"):
        Unmeasured(lambda length: (1,), [(1,)]).drawn(1)


@pytest.mark.parametrize(
    ("length", "fitted"),
    [(6, (8, 8, 1, 2, 3, 9)), (5, (8, 8, 1, 2, 9)), (8, (8, 8, 1, 2, 3, 4, 5, 9)), (3, (8, 8, 9))],
    ids=["as it is", "cut", "goes on", "the marks alone"],
)
def test_a_prompt_of_another_length_keeps_the_marks_that_all_have(length, fitted):
    """8, 8 stands before every turn, 9 after it."""
    drawn = iter([(8, 8, 1, 2, 3, 9), (8, 8, 4, 5, 9)])
    prompts = Unmeasured(lambda length: next(drawn), [(8, 8, 6, 9), (8, 8, 7, 7, 9)])

    assert prompts.fitted(length) == fitted
