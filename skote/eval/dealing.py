"""Prompts dealt to blocks, one deal after the other, of which none repeats a prompt of those before."""

from __future__ import annotations

import functools
import itertools
import math
import random
from collections.abc import Iterator, Sequence

from skote.eval.codec import Codec
from skote.eval.workload_config import WorkloadConfig

Ids = tuple[int, ...]


class Dealer:
    """Deals prompts to the blocks of a workload.

    Prompts as they stand (`prompt_tokens` null): taken evenly over the lengths where there are more than needed, and
    dealt so that every block of a deal holds a similar mix of lengths; what is left over goes into the next deal. Where
    there are fewer than needed the list is gone through again with a number in front, "(2) ...". Documents
    (`prompt_tokens` N): the sentences in a new order for each request, under a heading with a number of its own, drawn
    at random, cut at N tokens.

    `held_out` are texts for what is not timed; see `undealt`.
    """

    def __init__(
        self, config: WorkloadConfig, texts: Sequence[str], codec: Codec, seed: int, held_out: Sequence[str] = ()
    ) -> None:
        self._config, self._texts, self._codec, self._seed = config, texts, codec, seed
        self._held_out = held_out
        self._deals = itertools.count()
        self._headings, self._other_headings = (itertools.islice(_headings(seed), n, None, 2) for n in (0, 1))
        self._rng = random.Random(f"{seed}/undealt")  # noqa: S311 - of what is not dealt
        self._coming, self._came = _numbered(texts), 0
        self._others = self._reordered()
        self._left: list[Ids] = [] if config.prompt_tokens else [self._encode_next() for _ in texts]

    def deal(self) -> tuple[list[list[Ids]], random.Random]:
        """The prompts of the next `config.blocks` blocks, and the generator that dealt them."""
        number = next(self._deals)
        # A string seed goes through SHA-512: the same shuffle on every machine.
        rng = random.Random(f"{self._seed}/prompts/{number}" if number else f"{self._seed}/prompts")  # noqa: S311
        return (self._deal_texts(rng) if self._config.prompt_tokens is None else self._deal_documents(rng)), rng

    def undealt(self, length: int) -> Ids:
        """A prompt that no block has or will have, of the form of those that it has; after the last deal.

        A document has `length` tokens. A prompt as it stands is one of the texts that are held out, then one that no
        block took, and then one of the list with its words in another order.
        """
        if self._config.prompt_tokens is None:
            return self._spare.pop() if self._spare else self._codec.encode_chat(next(self._others))
        return document(next(self._other_headings), length, self._texts, self._codec, self._rng)

    @functools.cached_property
    def _spare(self) -> list[Ids]:
        held_out = [self._codec.encode_chat(text) for text in self._held_out]
        left, taken = self._rng.sample(self._left, len(self._left)), self._rng.sample(held_out, len(held_out))
        return [*left, *taken]

    def _reordered(self) -> Iterator[str]:
        """The texts, each with its words in another order and with a number in front as often as those of the blocks.

        So a number tells nothing. Where there is no other order that is new, one that no block has is in front.
        """
        turns = math.ceil(self._came / len(self._texts))
        given = set(self._texts)
        for number in itertools.count(turns + 1):
            for text in self._texts:
                words = text.split()
                other = _in_turn(" ".join(self._rng.sample(words, len(words))), self._rng.randint(1, turns))
                if other in given:
                    other = _in_turn(text, number)
                given.add(other)
                yield other

    def _encode_next(self) -> Ids:
        self._came += 1
        return self._codec.encode_chat(next(self._coming))

    def _deal_texts(self, rng: random.Random) -> list[list[Ids]]:
        """Sort by length, pick evenly, and give each block one of every `blocks` neighbours, in a shuffled order."""
        blocks, count = self._config.blocks, self._config.blocks * self._config.requests_per_block
        missing = max(0, count - len(self._left))
        pool = [*self._left, *(self._encode_next() for _ in range(missing))]
        ordered = sorted(pool, key=lambda ids: (len(ids), ids))
        places = [index * len(ordered) // count for index in range(count)]
        picked = [ordered[place] for place in places]
        self._left = [ids for place, ids in enumerate(ordered) if place not in set(places)]
        dealt: list[list[Ids]] = [[] for _ in range(blocks)]
        for start in range(0, count, blocks):
            stratum = picked[start : start + blocks]
            rng.shuffle(stratum)
            for block, ids in zip(dealt, stratum, strict=True):
                block.append(ids)
        for block in dealt:
            rng.shuffle(block)
        return dealt

    def _deal_documents(self, rng: random.Random) -> list[list[Ids]]:
        lengths = document_lengths(self._config)
        return [
            [
                document(next(self._headings), length, self._texts, self._codec, rng)
                for length in itertools.islice(itertools.cycle(lengths), self._config.requests_per_block)
            ]
            for _ in range(self._config.blocks)
        ]


def document_lengths(config: WorkloadConfig) -> list[int]:
    """The tokens of a block's documents, which take these in turn; none where prompts are taken as they stand."""
    return [] if config.prompt_tokens is None else [max(1, round(s * config.prompt_tokens)) for s in config.prompt_mix]


def document(text: str, length: int, sentences: Sequence[str], codec: Codec, rng: random.Random) -> Ids:
    """`text` and then `sentences` in random orders, cut at `length` tokens."""
    ids = codec.encode(text)
    while len(ids) < length:
        text = " ".join([text, *rng.sample(sentences, len(sentences))])
        ids = codec.encode(text)
    return ids[:length]


def _headings(seed: int) -> Iterator[str]:
    """ "Report 4711." and so on: all numbers of four digits, then of five, in an order that tells nothing."""
    rng = random.Random(f"{seed}/headings")  # noqa: S311
    for digits in itertools.count(4):
        numbers = range(10 ** (digits - 1), 10**digits)
        yield from (f"Report {number}." for number in rng.sample(numbers, len(numbers)))


def _numbered(texts: Sequence[str]) -> Iterator[str]:
    """`texts`, then all of them again with "(2) " in front, and so on."""
    for turn in itertools.count(1):
        yield from (_in_turn(text, turn) for text in texts)


def _in_turn(text: str, turn: int) -> str:
    return text if turn == 1 else f"({turn}) {text}"
