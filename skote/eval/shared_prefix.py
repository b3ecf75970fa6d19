"""How much of its prompt each request shares with an earlier one: what a prefix cache could save, declared or not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

Ids = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """The longest prefix that a prompt shares with an earlier one, in the median over the prompts.

    Attributes:
        tokens: of the prefix.
        share: of the prompt's tokens, 0 to 1.
    """

    tokens: float
    share: float


def shared_prefix(prompts: Sequence[Ids]) -> SharedPrefix:
    """The medians over `prompts`, in the order in which a run sends them."""
    shared = shared_prefixes(prompts)
    shares = [tokens / len(ids) for tokens, ids in zip(shared, prompts, strict=True)]
    return SharedPrefix(float(median(shared)), float(median(shares)))


def shared_prefixes(prompts: Sequence[Ids]) -> list[int]:
    """For each of `prompts`: tokens of the longest prefix that it shares with one before it.

    A prompt shares its longest prefix with a neighbour in sorted order. Taken out of that order from the last to the
    first, each prompt has only those before it as neighbours.
    """
    count = len(prompts)
    order = sorted(range(count), key=prompts.__getitem__)
    place = {index: position for position, index in enumerate(order, 1)}
    # With a place before the first and one after the last; `common` is with the left neighbour.
    left, right = list(range(-1, count + 1)), list(range(1, count + 3))
    common = [0, 0, *(_common(prompts[a], prompts[b]) for a, b in pairwise(order)), 0]
    longest = [0] * count
    for index in reversed(range(count)):
        here = place[index]
        before, after = left[here], right[here]
        longest[index] = max(common[here], common[after])
        common[after] = min(common[here], common[after])
        right[before], left[after] = after, before
    return longest


def _common(left: Ids, right: Ids) -> int:
    shorter = min(len(left), len(right))
    return next((index for index, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), shorter)
