"""Requests that warm an engine up at the measured shapes, without showing it a measured prompt."""

from __future__ import annotations

import bisect
import random
from collections.abc import Iterator, Sequence

from skote.types import Request, UsageError


def warmup_requests(requests: Sequence[Request], vocab_size: int, seed: int) -> tuple[Request, ...]:
    """Requests at the shapes of `requests` that share no prefix with any of them.

    One for each distinct shape (prompt tokens, new tokens) where there are at most five, else for the shortest, the
    longest, the quartiles between them by prompt length, and the shape with the most new tokens. Their ids are drawn at
    random and start with an id that none of `requests` starts with. They never stop early.

    Raises:
        UsageError: `requests` start with every token that there is.
    """
    rng = random.Random(f"{seed}/warmup")  # noqa: S311
    taken = sorted({request.input_ids[0] for request in requests})
    free = vocab_size - len(taken)
    if free < 1:
        raise UsageError(
            f"The measured prompts start with all of the {vocab_size} tokens of the vocabulary, which leaves none for "
            "the warm-up: lower workload.requests_per_block or workload.blocks."
        )
    warmup = []
    for index, (length, new) in enumerate(_shapes(requests)):
        first = _nth_free(taken, rng.randrange(free))
        ids = (first, *(rng.randrange(vocab_size) for _ in range(length - 1)))
        warmup.append(Request(f"w{index:02d}", ids, new, requests[0].sampling, ignore_eos=True))
    return tuple(warmup)


def _shapes(requests: Sequence[Request]) -> Iterator[tuple[int, int]]:
    shapes = sorted({(len(request.input_ids), request.max_new_tokens) for request in requests})
    last = len(shapes) - 1
    indices = {round(last * quarter / 4) for quarter in range(5)}
    indices.add(max(range(len(shapes)), key=lambda index: (shapes[index][1], shapes[index][0])))
    return (shapes[index] for index in sorted(indices))


def _nth_free(taken: Sequence[int], n: int) -> int:
    """The n-th (from 0) of the ids that are not in `taken`, which is sorted."""
    return n + bisect.bisect_right([used - index for index, used in enumerate(taken)], n)
