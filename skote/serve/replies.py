"""Answers in OpenAI's form: whole ones, and the chunks of a stream."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any, Literal
from uuid import uuid4

from skote.serve.generation import Piece

Kind = Literal["completion", "chat"]
_PREFIX = {"completion": "cmpl-", "chat": "chatcmpl-"}


def usage_of(prompt_tokens: int, output_tokens: int, cached_tokens: int | None = None) -> dict[str, Any]:
    """The counts of a request's tokens."""
    cached = {} if cached_tokens is None else {"prompt_tokens_details": {"cached_tokens": cached_tokens}}
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": output_tokens,
        "total_tokens": prompt_tokens + output_tokens,
        **cached,
    }


@dataclass(frozen=True, slots=True)
class Reply:
    """Writes what becomes of one request.

    Attributes:
        token_ids: ids stand beside the text; `prompt_ids` beside the first of it, or beside all in a whole answer.
        usage: a stream ends with the counts of tokens.
        running_usage: every chunk of a stream has them.
    """

    kind: Kind
    model: str
    prompt_ids: tuple[int, ...]
    token_ids: bool = False
    usage: bool = False
    running_usage: bool = False
    created: int = field(default_factory=lambda: int(time.time()))
    number: str = field(default_factory=lambda: uuid4().hex)

    @property
    def id(self) -> str:
        """What it is called, by clients and in the log."""
        return _PREFIX[self.kind] + self.number

    @property
    def counts_tokens(self) -> bool:
        """Whether a chunk says something of its tokens, so that one without text is worth sending."""
        return self.token_ids or self.running_usage

    def whole(self, pieces: list[Piece], usage: dict[str, Any]) -> dict[str, Any]:
        """The answer in one piece."""
        text = "".join(piece.text for piece in pieces)
        content = {"text": text} if self.kind == "completion" else {"message": {"role": "assistant", "content": text}}
        ids = [token for piece in pieces for token in piece.token_ids]
        choice = self._choice(content, pieces[-1].finish_reason, ids, first=True)
        name = "text_completion" if self.kind == "completion" else "chat.completion"
        return {**self._head(name), "choices": [choice], "usage": usage}

    def chunk(self, piece: Piece, usage: dict[str, Any], *, first: bool) -> dict[str, Any]:
        """What of a stream one piece gives; `usage` is what has been counted by now."""
        content: dict[str, Any] = {"text": piece.text}
        if self.kind == "chat":
            role = {"role": "assistant"} if first else {}
            text = {"content": piece.text} if first or piece.text or not piece.finish_reason else {}
            content = {"delta": role | text}
        chunk = self._chunk([self._choice(content, piece.finish_reason, piece.token_ids, first=first)])
        if self.running_usage:
            chunk["usage"] = usage
        elif self.usage:
            chunk["usage"] = None
        return chunk

    def last_chunk(self, usage: dict[str, Any]) -> dict[str, Any]:
        """The counts, at the end of a stream."""
        return {**self._chunk([]), "usage": usage}

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        name = "text_completion" if self.kind == "completion" else "chat.completion.chunk"
        return {**self._head(name), "choices": choices}

    def _head(self, name: str) -> dict[str, Any]:
        return {"id": self.id, "object": name, "created": self.created, "model": self.model}

    def _choice(
        self, content: dict[str, Any], reason: str | None, token_ids: list[int], *, first: bool
    ) -> dict[str, Any]:
        choice = {"index": 0, **content, "logprobs": None, "finish_reason": reason}
        if self.token_ids:
            choice["token_ids"] = token_ids
            if first:
                choice["prompt_token_ids"] = list(self.prompt_ids)
        return choice
