"""How a workload's text becomes token ids: a tokenizer, or a hash where a model has none."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol


class Codec(Protocol):
    """Turns text into token ids, the model's way."""

    def encode(self, text: str) -> tuple[int, ...]:
        """The ids of `text` as it stands, with the tokens that the tokenizer itself puts in front."""

    def encode_chat(self, text: str) -> tuple[int, ...]:
        """The ids of `text` as a user's turn, up to where the answer starts; plain ids without a chat template."""

    def encode_messages(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
    ) -> tuple[int, ...]:
        """The ids of a conversation in the OpenAI chat format, and of its tools, up to where the answer starts.

        Raises:
            RequestError: the model has no chat template, or one that refuses the conversation.
        """

    def encode_next_turn(self, messages: Sequence[Mapping[str, Any]]) -> tuple[int, ...]:
        """The ids that follow an answer: its end, the `messages` behind it, up to where the next answer starts.

        Raises:
            RequestError: the model has a chat template that refuses them.
        """


@dataclass(frozen=True, slots=True)
class HashCodec:
    """Ids for models that have no tokenizer (shapes with random weights): text made from them means nothing.

    One id a word or punctuation mark: SHA-256 of it and of all before it, modulo the vocabulary. So equal beginnings
    give equal ids, as with a tokenizer, and texts that differ in one word differ from there on.
    """

    vocab_size: int

    def encode(self, text: str) -> tuple[int, ...]:
        """The ids of `text`, one a word or punctuation mark."""
        state = b""
        ids = []
        for word in re.findall(r"\w+|[^\w\s]", text):
            state = hashlib.sha256(state + word.encode()).digest()
            ids.append(int.from_bytes(state[:8], "little") % self.vocab_size)
        return tuple(ids)

    def encode_chat(self, text: str) -> tuple[int, ...]:
        """The ids of `text` between the marks of a user's and an assistant's turn."""
        return self.encode(f"<user> {text} <assistant>")

    def encode_messages(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
    ) -> tuple[int, ...]:
        """The ids of the tools and of what each role says, each as JSON where it is more than text."""
        said = [f"<{each['role']}> {_text(each.get('content'))} {_text(each.get('tool_calls'))}" for each in messages]
        return self.encode(" ".join([_text(list(tools) or None), *said, "<assistant>"]))

    def encode_next_turn(self, messages: Sequence[Mapping[str, Any]]) -> tuple[int, ...]:
        """The ids of what each role says, up to where the next answer starts."""
        return self.encode_messages(messages, ())


def _text(value: object) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True)
