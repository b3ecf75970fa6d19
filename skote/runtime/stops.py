"""Where an answer ends before its length: at a stop id, or at the token that completes a stop string in its text.

That token was generated, so it counts, and is the answer's last; the text ends where the stop string begins. Tokens are
looked at one by one, so that the end does not depend on how many an engine hands over at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property

from skote.runtime.detokenizer import Detokenizer
from skote.runtime.stop_strings import StopStrings
from skote.types import Request, RequestError

Decode = Callable[[Sequence[int]], str]


class AnswerText:
    """The text of an answer as its tokens come, up to the first of `stop_strings`.

    Args:
        decode, context: as those of `Detokenizer`.
    """

    def __init__(self, decode: Decode, stop_strings: Sequence[str], context: Sequence[int] = ()) -> None:
        self._text = Detokenizer(decode, context)
        self._stops = StopStrings(stop_strings)
        self._looks = bool(stop_strings)

    @property
    def is_stopped(self) -> bool:
        """Whether a stop string was met; no text follows it."""
        return self._stops.found

    def add(self, token_ids: Sequence[int]) -> tuple[str, int]:
        """The text that can go out with `token_ids`, and how many of these belong to the answer."""
        if not self._looks:
            return self._text.add(token_ids), len(token_ids)
        out = ""
        for count, token in enumerate(token_ids, 1):
            out += self._stops.add(self._text.add((token,)))
            if self.is_stopped:
                return out, count
        return out, len(token_ids)

    def finish(self) -> str:
        """What was held back, at the end."""
        if self.is_stopped:
            return ""
        out = self._stops.add(self._text.finish())
        return out + self._stops.finish()


class Stops:
    """Looks for the end of one request's answer.

    Args:
        decode: the text of token ids; None where the request has no stop strings.
    """

    def __init__(self, request: Request, decode: Decode | None) -> None:
        self._ids = frozenset(request.stop_ids)
        self._text = None if decode is None else AnswerText(decode, request.stop_strings)

    def end(self, token_ids: Sequence[int]) -> int | None:
        """How many of the next `token_ids` belong to the answer, where it ends among them; None where it goes on."""
        by_id = next((count for count, token in enumerate(token_ids, 1) if token in self._ids), None)
        if self._text is None:
            return by_id
        _, by_text = self._text.add(token_ids[:by_id])
        return by_text if self._text.is_stopped else by_id


class Stopping:
    """Makes the `Stops` of requests to one model, whose tokenizer is loaded for the first stop string.

    Args:
        local_dir: the model's directory; None where there is none.
    """

    def __init__(self, local_dir: str | None) -> None:
        self._local_dir = local_dir

    def watch(self, request: Request) -> Stops | None:
        """What looks for the end of the answer to `request`; None where it has no stops.

        Raises:
            RequestError: it has stop strings, and there is no model directory.
            CheckpointError: the directory's tokenizer cannot be loaded.
        """
        if not request.may_stop:
            return None
        return Stops(request, self._decode if request.stop_strings else None)

    @cached_property
    def _decode(self) -> Decode:
        from skote.runtime.text import load_tokenizer

        if self._local_dir is None:
            raise RequestError(
                "Stop strings need the model's tokenizer, and the engine has no directory: use stop_ids."
            )
        return load_tokenizer(self._local_dir).decode
