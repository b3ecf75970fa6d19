"""What a router needs of a tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Codec(Protocol):
    """Text to token ids and back (`skote.runtime.text.TextCodec`)."""

    pad_id: int
    has_chat_template: bool

    def encode(self, text: str) -> tuple[int, ...]:
        """The prompt's token ids."""

    def encode_chat(self, text: str) -> tuple[int, ...]:
        """The token ids of `text` as a user's message in the model's chat template."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids."""
