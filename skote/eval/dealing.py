"""Prompts dealt to blocks, one deal after the other, of which none repeats a prompt of those before."""

from __future__ import annotations

import itertools
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
    (`prompt_tokens` N): the sentences in a new order for each request, under a numbered heading, cut at N tokens.
    """

    def __init__(self, config: WorkloadConfig, texts: Sequence[str], codec: Codec, seed: int) -> None:
        self._config, self._texts, self._codec, self._seed = config, texts, codec, seed
        self._deals = itertools.count()
        self._headings = itertools.count(1)
        self._coming = _numbered(texts)
        self._left: list[Ids] = [] if config.prompt_tokens else [self._encode_next() for _ in texts]

    def deal(self) -> tuple[list[list[Ids]], random.Random]:
        """The prompts of the next `config.blocks` blocks, and the generator that dealt them."""
        number = next(self._deals)
        # A string seed goes through SHA-512: the same shuffle on every machine.
        rng = random.Random(f"{self._seed}/prompts/{number}" if number else f"{self._seed}/prompts")  # noqa: S311
        return (self._deal_texts(rng) if self._config.prompt_tokens is None else self._deal_documents(rng)), rng

    def _encode_next(self) -> Ids:
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
                document(f"Report {next(self._headings)}.", length, self._texts, self._codec, rng)
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


def _numbered(texts: Sequence[str]) -> Iterator[str]:
    """`texts`, then all of them again with "(2) " in front, and so on."""
    yield from texts
    for turn in itertools.count(2):
        yield from (f"({turn}) {text}" for text in texts)
