"""Prompts of an exact number of tokens, made of sentences that are encoded once and put together as token ids.

Encoding is what costs: 160 million tokens take minutes of a tokenizer and seconds of this. The ids are shared between
the prompts, a pointer each.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Sequence

from skote.eval.codec import Codec
from skote.types import UsageError

Ids = tuple[int, ...]


class Filler:
    """Makes prompts of `sentences`, in the order of `seed`.

    Each begins with what the tokenizer puts in front of every text, then with the first `shared_prefix` (a share) of
    its tokens as in all other prompts, and then with a number of its own, so that no two are equal from there on.

    Raises:
        UsageError: the sentences have no tokens.
    """

    def __init__(self, sentences: Sequence[str], codec: Codec, seed: int, shared_prefix: float = 0.0) -> None:
        self._codec, self._seed, self._share = codec, seed, shared_prefix
        self._sentences = sentences
        self._head = codec.encode("")
        self._bodies = [body for each in sentences if (body := self._encode(f" {each}"))]
        if not self._bodies:
            raise UsageError("workload.prompts has no tokens to make prompts of: give it sentences.")
        self._mean = sum(map(len, self._bodies)) / len(self._bodies)
        self._common: Ids = ()
        self._measured, self._other = (_Numbers(seed, part) for part in (0, 1))

    def prompt(self, length: int) -> Ids:
        """The next prompt that is measured, of exactly `length` tokens."""
        return self._numbered(length, self._measured)

    def other_prompt(self, length: int) -> Ids:
        """The next prompt that is not, of the same form and of exactly `length` tokens."""
        return self._numbered(length, self._other)

    def other_text(self, length: int) -> str:
        """Text of about `length` tokens or more, a number of its own in front, for prompts that are not measured."""
        count = math.ceil(length / self._mean) + 1
        return " ".join([f"{next(self._other)}.", *self._other.rng.choices(self._sentences, k=count)])

    def of_blocks(self, hash_ids: Sequence[int], block: int, length: int) -> Ids:
        """A prompt of exactly `length` tokens, whose block i of `block` tokens is what `hash_ids[i]` stands for.

        Only the first tokens of all prompts, the tokenizer's own, take the place of some of the first block's.
        """
        ids = tuple(itertools.chain.from_iterable(self._block(each, block) for each in hash_ids))
        return self._exact((*self._head, *ids[len(self._head) :]), length)

    def _block(self, hash_id: int, length: int) -> Ids:
        rng = random.Random(f"{self._seed}/block/{hash_id}")  # noqa: S311 - a string goes through SHA-512
        return (self._encode(f" {hash_id}.") + self._text(length, rng))[:length]

    def _numbered(self, length: int, numbers: _Numbers) -> Ids:
        start = self._head
        if self._share:
            start += self._shared(round(self._share * length))[len(start) :]
        start += self._encode(f" {next(numbers)}.")
        return self._exact(start + self._text(max(0, length - len(start)), numbers.rng), length)

    def _shared(self, length: int) -> Ids:
        if length > len(self._common):
            self._common = self._text(2 * length, random.Random(f"{self._seed}/shared"))  # noqa: S311
        return self._common[:length]

    def _text(self, length: int, rng: random.Random) -> Ids:
        """The first `length` tokens of sentences as `rng` chooses them; the same whatever the length."""
        chosen: list[Ids] = []
        missing = length
        while missing > 0:
            more = rng.choices(self._bodies, k=max(1, round(missing / self._mean)))
            missing -= sum(map(len, more))
            chosen += more
        return tuple(itertools.chain.from_iterable(chosen))[:length]

    def _exact(self, ids: Ids, length: int) -> Ids:
        ids = ids[:length]
        assert len(ids) == length, f"a prompt of {length} tokens came out with {len(ids)}"
        return ids

    def _encode(self, text: str) -> Ids:
        return self._codec.encode(text)[len(self._head) :]


class _Numbers(Iterator[int]):
    """All numbers of four digits, then of five, shuffled, every other one for each `part`; and a generator, `rng`."""

    def __init__(self, seed: int, part: int) -> None:
        self.rng = random.Random(f"{seed}/filler/{part}")  # noqa: S311 - a string goes through SHA-512
        self._numbers = itertools.islice(_shuffled(seed), part, None, 2)

    def __next__(self) -> int:
        return next(self._numbers)


def _shuffled(seed: int) -> Iterator[int]:
    rng = random.Random(f"{seed}/numbers")  # noqa: S311
    for digits in itertools.count(4):
        numbers = range(10 ** (digits - 1), 10**digits)
        yield from rng.sample(numbers, len(numbers))
