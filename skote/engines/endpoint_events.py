"""What a server streams, and how many tokens of it have come: server-sent events of the OpenAI API.

Chunks that carry no token (the role of a chat's answer, empty text, the counts at the end) count as none. Text of a
model's reasoning counts as its answer's does: it was generated, and it was waited for.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from skote.types import UNKNOWN_ID, EngineError, FinishReason, is_whole

_REASONS: dict[str, FinishReason] = {
    "length": "length",
    "stop": "stop",
    "eos_token": "stop",
    "stop_sequence": "stop",
}
_SENTENCE_CHARACTERS = 300


class EventLines:
    """Cuts a byte stream into the data of its events, however the network has cut it."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, received: bytes) -> Iterator[bytes]:
        """The data of the events whose lines are complete by now; comments and other fields are left out."""
        *lines, self._rest = (self._rest + received).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip()


@dataclass(frozen=True, slots=True)
class Event:
    """One chunk of an answer. Ids, and counts of tokens so far, are None where it does not have them."""

    text: str
    token_ids: tuple[int, ...] | None
    output_tokens: int | None
    prompt_tokens: int | None
    cached_tokens: int | None
    finish_reason: FinishReason | None


def read_event(data: bytes) -> Event:
    """The chunk that an event's data is.

    Raises:
        EngineError: it is an error that the server reports, ends for a reason that is none of a text's, or is no chunk
            of an answer.
    """
    try:
        chunk = json.loads(data)
        if chunk.get("error"):
            raise EngineError(f"The server broke off: {error_text(data)}.")
        choice: dict[str, Any] = chunk["choices"][0] if chunk["choices"] else {}
        spoken = choice.get("delta") or choice
        usage = chunk.get("usage") or {}
        ids = choice.get("token_ids")
        return Event(
            text="".join(str(spoken.get(key) or "") for key in ("reasoning_content", "reasoning", "content", "text")),
            token_ids=None if ids is None else tuple(int(token) for token in ids),
            output_tokens=_count(usage.get("completion_tokens")),
            prompt_tokens=_count(usage.get("prompt_tokens")),
            cached_tokens=_count((usage.get("prompt_tokens_details") or {}).get("cached_tokens")),
            finish_reason=_reason(choice.get("finish_reason")),
        )
    except (ValueError, TypeError, LookupError, AttributeError):
        raise EngineError(f"The server sent what is no chunk of an answer: {_shortened(data)!r}.") from None


class TokenCount:
    """Counts the tokens of one answer: by their ids where the server tells them, by its counts, else by its chunks.

    Attributes:
        total: tokens so far.
        by_chunk: of those, the ones that were counted since a chunk had text.
        pieces: the texts of the chunks so far.
        ids_known: whether every token came with its id.
        prompt_tokens: what the server says of the prompt; None where it does not.
        cached_tokens: of the prompt, what the server says that it had from earlier ones; None where it does not.
        reported: what the server says of the answer; None where it does not.
    """

    def __init__(self) -> None:
        self.total = 0
        self.by_chunk = 0
        self.pieces: list[str] = []
        self.ids_known = True
        self.prompt_tokens: int | None = None
        self.cached_tokens: int | None = None
        self.reported: int | None = None

    def new_tokens(self, event: Event) -> Sequence[int]:
        """The ids of the tokens that `event` adds, `UNKNOWN_ID` for those that the server does not tell.

        Tokens that the server reports at the end, and that no chunk of their own announced, are added there.
        """
        self.pieces.append(event.text)
        if event.prompt_tokens is not None:
            self.prompt_tokens = event.prompt_tokens
        if event.cached_tokens is not None:
            self.cached_tokens = event.cached_tokens
        if event.output_tokens is not None:
            self.reported = event.output_tokens
        if event.token_ids is not None:
            ids: Sequence[int] = event.token_ids
        elif event.output_tokens is not None:
            ids = [UNKNOWN_ID] * max(0, event.output_tokens - self.total)
        else:
            ids = [UNKNOWN_ID] * bool(event.text)
            self.by_chunk += len(ids)
        self.ids_known = self.ids_known and UNKNOWN_ID not in ids
        self.total += len(ids)
        return ids


def error_text(body: bytes) -> str:
    """What a server says went wrong, in one line without its full stop: OpenAI's `error.message`, else the body."""
    try:
        said = json.loads(body)
        error = said.get("error", said)
        text = error if isinstance(error, str) else error.get("message") or error.get("detail") or said
    except (ValueError, AttributeError):
        text = _shortened(body) or "nothing"
    return " ".join(str(text).split())[:_SENTENCE_CHARACTERS].rstrip(".")


def _count(value: Any) -> int | None:  # noqa: ANN401 (whatever JSON holds)
    if value is not None and (not is_whole(value) or value < 0):
        raise ValueError(value)
    return None if value is None else int(value)


def _reason(value: object) -> FinishReason | None:
    if value is None or value == "":
        return None
    reason = _REASONS.get(str(value))
    if reason is None:
        raise EngineError(
            f"The server ended the answer for the reason {str(value)[:60]!r}, and not by its length or end."
        )
    return reason


def _shortened(body: bytes) -> str:
    return body[:_SENTENCE_CHARACTERS].decode("utf-8", "replace")
