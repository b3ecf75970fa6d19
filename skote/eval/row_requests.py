"""Requests of a file's rows: token ids of their own text, or of made text of the length that they state."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

from skote.eval.codec import Codec, HashCodec
from skote.eval.filler import Filler, Ids
from skote.eval.row_turns import NextTurn, rounds_of, think_times
from skote.eval.sources.drawn_rows import DrawnRows
from skote.eval.sources.formats import MOONCAKE_BLOCK
from skote.eval.sources.row import Row
from skote.eval.sources.row_file import RowFile
from skote.eval.sources.source_config import SourceConfig
from skote.types import CapacityError, UsageError


@dataclass(slots=True)
class Changes:
    """How many requests are not what the file has: with a shorter prompt or answer, or without their stop strings."""

    truncated: int = 0
    cut_answers: int = 0
    ignored_stops: int = 0
    dropped_turns: int = 0

    def describe(self) -> dict[str, Any]:
        """JSON values for the manifest."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class RowRequest:
    """A row with its token ids, the tokens of its answer, and its further turns."""

    row: Row
    ids: Ids
    max_new_tokens: int
    later: tuple[NextTurn, ...] = ()


class RowReader:
    """Turns rows into requests; `changes` counts what it had to change.

    Args:
        config: what becomes of prompts that are too long.
        codec: of the model.
        filler: makes the prompts of rows that state lengths alone.
        max_new_tokens: of an answer; rows that say nothing get so many, and none gets more.
        max_positions: of the model; None bounds nothing.
        think: nanoseconds before each further turn whose row does not say.
    """

    def __init__(
        self,
        config: SourceConfig,
        codec: Codec,
        filler: Filler,
        max_new_tokens: int,
        max_positions: int | None,
        think: Iterator[int],
    ) -> None:
        self._config, self._codec, self._filler = config, codec, filler
        self._most_new, self._positions, self._think = max_new_tokens, max_positions, think
        self.changes = Changes()

    def fit(self, row: Row) -> Row | None:
        """The row with the lengths that it has here; None where its prompt is too long and such rows are dropped."""
        if row.input_tokens is not None:
            row = replace(
                row, input_tokens=self._scaled(row.input_tokens), output_tokens=self._scaled(row.output_tokens)
            )
        if self._config.too_long != "drop":
            return row
        length = len(self._encode(row)) if row.input_tokens is None else row.input_tokens
        return row if self._excess(length, self._answer(row, self._reply(row))) == 0 else None

    def read(self, row: Row) -> RowRequest:
        """The request of a row that `fit` has passed.

        Raises:
            CapacityError: its prompt is too long, and such rows are refused.
        """
        reply = self._reply(row)
        new = self._answer(row, reply)
        ids = self._encode(row) if row.input_tokens is None else None
        length = row.input_tokens or len(ids or ())
        excess = self._excess(length, new)
        if excess >= length:
            raise CapacityError(
                f"{self._where(row)}: its answer of {new} tokens leaves no room for "
                "a prompt in the model's context: lower workload.max_new_tokens."
            )
        if excess and self._config.too_long == "refuse":
            raise CapacityError(
                f"{self._where(row)}: its prompt has {length} tokens, and "
                f"{length - excess} fit beside an answer of {new}: truncate or drop such prompts with "
                "workload.source.too_long, or scale all with workload.source.length_scale."
            )
        ids = self._made(row, length - excess) if ids is None else ids[: length - excess]
        self.changes.truncated += excess > 0
        self.changes.cut_answers += (self._stated(row, reply) or 0) > new
        if row.stop_strings and isinstance(self._codec, HashCodec):  # its answers have no text to look at
            self.changes.ignored_stops += 1
            row = replace(row, stop_strings=())
        return RowRequest(row, ids, new, self._later(row, len(ids), new))

    def _later(self, row: Row, length: int, new: int) -> tuple[NextTurn, ...]:
        """The further turns of a row, as far as they fit into the context with their answers."""
        if self._config.turns == "first":
            return ()
        later: list[NextTurn] = []
        rounds = rounds_of(row)[1:]
        for index, each in enumerate(rounds):
            ids = self._codec.encode_next_turn(each.messages)
            length += new + len(ids)
            new = self._answer(row, each.reply)
            if self._excess(length, new):
                break
            think_ns = row.think_ns[index] if index < len(row.think_ns) else next(self._think)
            later.append(NextTurn(ids, new, think_ns))
        self.changes.dropped_turns += len(rounds) - len(later)
        return tuple(later)

    def _where(self, row: Row) -> str:
        return f"workload.source.path={self._config.path}, {row.place}" if self._config.path else f"The {row.place}"

    def _scaled(self, tokens: int | None) -> int | None:
        return None if tokens is None else max(1, round(tokens * self._config.length_scale))

    def _stated(self, row: Row, reply: str) -> int | None:
        return row.output_tokens or (len(self._codec.encode(reply)) if reply else None)

    def _answer(self, row: Row, reply: str) -> int:
        return min(self._stated(row, reply) or self._most_new, self._most_new)

    def _reply(self, row: Row) -> str:
        """The answer that the file has to what is sent first."""
        if self._config.turns == "all" and row.messages:
            return rounds_of(row)[0].reply
        return row.replies[0] if row.replies else ""

    def _excess(self, length: int, new: int) -> int:
        """By how many tokens a prompt of `length` is too long, where its answer takes `new`."""
        bounds = [self._config.max_input_tokens, None if self._positions is None else self._positions - new]
        return max([0, *(length - max(bound, 0) for bound in bounds if bound is not None)])

    def _made(self, row: Row, length: int) -> Ids:
        if not row.hash_ids:
            return self._filler.prompt(length)
        block = math.ceil(MOONCAKE_BLOCK * self._config.length_scale)
        return self._filler.of_blocks(row.hash_ids[: -(-length // block)], block, length)

    def _encode(self, row: Row) -> Ids:
        if row.messages:
            messages = rounds_of(row)[0].messages if self._config.turns == "all" else row.messages
            return self._codec.encode_messages(messages, row.tools)
        return self._codec.encode_chat(row.turns[0])


@dataclass(frozen=True, slots=True)
class TakenRows:
    """Rows as requests, in the order of their times where they have them.

    Attributes:
        undealt: makes a prompt of about so many tokens that none of them has, of their form.
        facts: for the manifest: what was found in the file and what was done with it.
    """

    requests: list[RowRequest]
    undealt: Callable[[int], Ids]
    facts: dict[str, Any]

    def stamps(self) -> list[int]:
        """When the rows were sent, in ns.

        Raises:
            UsageError: some do not say.
        """
        stamps = [each.row.at_ns for each in self.requests if each.row.at_ns is not None]
        if len(stamps) < len(self.requests):
            raise UsageError(
                f"workload.load=trace needs the times of all rows, and {self.facts['path'] or 'drawn lengths'} "
                "has none: choose another workload.load."
            )
        return stamps


def take_rows(
    config: SourceConfig,
    codec: Codec,
    filler: Filler,
    max_new_tokens: int,
    max_positions: int | None,
    sizes: tuple[int, int, int],
    seed: int,
) -> TakenRows:
    """Rows of the file of `config`, or drawn ones, as requests, chosen by `seed` where it says so.

    `sizes` are those of `RowFile.take`: planned rows, spare ones, those of a block. Rows of a block that are out of the
    order of their times are put into it, and counted.

    Raises:
        UsageError: the file or a row cannot be read, there are too few, or a prompt is too long.
    """
    think = think_times(config, random.Random(f"{seed}/think"))  # noqa: S311 - a string goes through SHA-512
    reader = RowReader(config, codec, filler, max_new_tokens, max_positions, think)
    source = RowFile(config) if config.path is not None else DrawnRows(config)
    taken = source.take(*sizes, reader.fit, random.Random(f"{seed}/rows"))  # noqa: S311 - as above
    blocks = [taken[start : start + sizes[2]] for start in range(0, len(taken), sizes[2])]
    rows = [row for block in blocks for row in sorted(block, key=lambda row: row.at_ns or 0)]
    requests = [reader.read(row) for row in rows]
    made = all(row.input_tokens is not None for row in rows)
    facts = {
        **source.facts(),
        **reader.changes.describe(),
        "out_of_order": sum(map(_out_of_order, blocks)),
        "repeated_prompts": len(requests) - len({each.ids for each in requests}),
    }
    return TakenRows(requests, filler.other_prompt if made else partial(_other_turn, filler, codec), facts)


def _out_of_order(rows: Sequence[Row]) -> int:
    """How many rows were sent before the one that stands before them."""
    stamps = [row.at_ns for row in rows if row.at_ns is not None]
    return sum(later < earlier for earlier, later in pairwise(stamps))


def _other_turn(filler: Filler, codec: Codec, length: int) -> Ids:
    """A user's turn of `length` tokens or more, of made text."""
    return codec.encode_chat(filler.other_text(length))
