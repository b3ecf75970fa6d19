"""Text up to the first of several stop strings, piece by piece."""

from __future__ import annotations

from collections.abc import Iterable


class StopStrings:
    """Lets text through up to a stop string, and holds back what may be the beginning of one.

    The stop string whose end comes first counts, the longest where several end there, so that the outcome does not
    depend on how the text is cut into pieces. `found` says whether it was met; no text follows it.
    """

    def __init__(self, stops: Iterable[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.found = False

    def add(self, text: str) -> str:
        """What of `text`, and of what was held back before, can go out."""
        held = self._held + text
        begins = [(at + len(stop), at) for stop in self._stops if (at := held.find(stop)) >= 0]
        if begins:
            self.found, self._held = True, ""
            return held[: min(begins)[1]]
        kept = max((_overlap(held, stop) for stop in self._stops), default=0)
        cut = len(held) - kept
        self._held = held[cut:]
        return held[:cut]

    def finish(self) -> str:
        """What was held back, at the end."""
        held, self._held = self._held, ""
        return held


def cut_text(text: str, stops: Iterable[str]) -> str:
    """`text` up to the first of the stop strings."""
    stop_strings = StopStrings(stops)
    return stop_strings.add(text) + stop_strings.finish()


def _overlap(text: str, stop: str) -> int:
    """How many characters at the end of `text` begin `stop`, short of all of it."""
    longest = min(len(text), len(stop) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(stop[:size])), 0)
