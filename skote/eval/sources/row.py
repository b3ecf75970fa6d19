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
        reply: the answer that the file has; its length is that of the new one.
        sampling: temperature, top_p, top_k and seed, as far as the row has them.
        stops: whether the row has stop strings or stop ids.
    """

    place: str
    at_ns: int | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None
    hash_ids: tuple[int, ...] = ()
    turns: tuple[str, ...] = ()
    messages: tuple[dict[str, Any], ...] = ()
    tools: tuple[dict[str, Any], ...] = ()
    reply: str = ""
    sampling: dict[str, Any] = field(default_factory=dict)
    stops: bool = False
