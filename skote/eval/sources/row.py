"""One request as a file states it, before it has token ids."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


class RowError(ValueError):
    """A row that cannot be served; its text goes on from "line 7: "."""


@dataclass(frozen=True, slots=True)
class Row:
    """What a file says of a request; what it does not say is None or empty.

    Attributes:
        place: where in the file: "line 7", "entry 7".
        at_ns: when it was sent, from whatever moment the file counts from.
        input_tokens, output_tokens: lengths, where there is no text, or of the answer alone.
        hash_ids: one for each `block_tokens` of the prompt, the last perhaps partial: equal ones are equal tokens after
            equal ones before.
        turns: what the user says, turn by turn.
        messages, tools: a conversation up to the answer, and its tools, as the OpenAI chat format has them.
        replies: the answers that the file has, of `turns` one each (empty where it has none), of `messages` the one
            behind them. Their lengths are those of the new ones.
        think_ns: how long the user thinks before each further turn, as far as the row says so.
        sampling: temperature, top_p, top_k and seed, as far as the row has them.
        stop_ids, stop_strings: what ends an answer (`skote.types.Request`).
    """

    place: str
    at_ns: int | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None
    hash_ids: tuple[int, ...] = ()
    turns: tuple[str, ...] = ()
    messages: tuple[dict[str, Any], ...] = ()
    tools: tuple[dict[str, Any], ...] = ()
    replies: tuple[str, ...] = ()
    think_ns: tuple[int, ...] = ()
    sampling: dict[str, Any] = field(default_factory=dict)
    stop_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()
