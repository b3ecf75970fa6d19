"""Token ids to text as they come: what a token adds, held back while a character is incomplete."""

from __future__ import annotations

from collections.abc import Callable, Sequence

_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
CONTEXT = 8
"""So many tokens of a prompt are enough to know what the next one adds: whether a space, or half a character."""
WINDOW = 16
"""So many tokens are decoded at a time, and fewer than so many again and again."""


class Detokenizer:
    """The text that token ids add to what was there, piece by piece; the pieces joined are the text of them all.

    What a token adds depends on those before it: a space, the rest of a character. So it is the difference of two
    texts, that of the last tokens and that of these and the new ones, and costs the same however long the whole is. A
    piece never ends in a character that a later token may complete. Bytes that make no character are replaced when a
    whole one follows, or at the end.

    Args:
        decode: the text of token ids, special tokens left out.
        context: tokens of the prompt that the text goes on from; empty where it stands alone.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], context: Sequence[int] = ()) -> None:
        self._decode = decode
        self._ids = list(context[-CONTEXT:])  # the last tokens whose text is out, and those that are held back
        self._out = len(self._ids)
        self._text = decode(self._ids) if self._ids else ""  # of the former

    def add(self, token_ids: Sequence[int]) -> str:
        """The text that `token_ids` complete."""
        self._ids.extend(token_ids)
        text = self._decode(self._ids)
        if len(text) <= len(self._text) or text.endswith(_INCOMPLETE):
            return ""
        return self._put_out(text)

    def finish(self) -> str:
        """What was held back, at the end."""
        text = self._decode(self._ids)
        return self._put_out(text) if len(text) > len(self._text) else ""

    def _put_out(self, text: str) -> str:
        added = text[len(self._text) :]
        if len(self._ids) > WINDOW:  # go on from the tokens of this piece alone
            self._ids = self._ids[self._out :]
            text = self._decode(self._ids)
        self._out, self._text = len(self._ids), text
        return added
