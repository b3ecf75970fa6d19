"""The further turns of a file's rows: what follows an answer, how long the next one is, and how long a user thinks."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from skote.eval.filler import Ids
from skote.eval.sources.formats import spoken
from skote.eval.sources.lengths import drawn_lengths
from skote.eval.sources.row import Row
from skote.eval.sources.source_config import SourceConfig

_MS = 1_000_000


@dataclass(frozen=True, slots=True)
class Round:
    """What is said before an answer, by users and by tools, and the answer that the file has; empty where it has none.

    Answers themselves are not among `messages`, since the model gives its own; what an assistant says before anybody
    asks is.
    """

    messages: tuple[dict[str, Any], ...]
    reply: str


@dataclass(frozen=True, slots=True)
class NextTurn:
    """A further turn: its ids are those between the answer before it and its own.

    Attributes:
        think_ns: from the end of the answer before it.
    """

    ids: Ids
    max_new_tokens: int
    think_ns: int


def rounds_of(row: Row) -> list[Round]:
    """The rounds of a row with text, in their order."""
    if row.turns:
        replies = itertools.chain(row.replies, itertools.repeat(""))
        return [
            Round(({"role": "user", "content": text},), reply) for text, reply in zip(row.turns, replies, strict=False)
        ]
    rounds: list[Round] = []
    said: list[dict[str, Any]] = []
    replies_of_round: list[str] = []
    for message in row.messages:
        asked = any(each["role"] not in ("system", "developer", "assistant") for each in said)
        if message["role"] == "assistant" and (rounds or asked):
            replies_of_round.append(spoken(message))
            continue
        if replies_of_round:
            rounds.append(Round(tuple(said), "".join(replies_of_round)))
            said, replies_of_round = [], []
        said.append(message)
    if said:
        rounds.append(Round(tuple(said), "".join((*replies_of_round, *row.replies))))
    return rounds


def think_times(config: SourceConfig, rng: random.Random) -> Iterator[int]:
    """How long users think, in ns, without end: as `config.think` draws it, or `config.think_ms` each time."""
    if config.think.distribution is None:
        return itertools.repeat(round(config.think_ms * _MS))
    return (ms * _MS for ms in drawn_lengths(config.think, rng))
