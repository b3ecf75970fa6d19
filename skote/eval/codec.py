"""How a workload's text becomes token ids: a tokenizer, or a hash where a model has none."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from typing import Protocol


class Codec(Protocol):
    """Turns text into token ids, the model's way."""

    def encode(self, text: str) -> tuple[int, ...]:
        """The ids of `text` as it stands, with the tokens that the tokenizer itself puts in front."""

    def encode_chat(self, text: str) -> tuple[int, ...]:
        """The ids of `text` as a user's turn, up to where the answer starts; plain ids without a chat template."""


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
