"""How long a request waits for its next token, measured in a worker while requests run."""

from __future__ import annotations

from collections.abc import Callable, Hashable

from skote.runtime.launch_rows import CLOCK

LEAST_TOKENS = 16
LEAST_NS = 20_000_000
"""A figure is the mean over as many tokens and as much time as both say: 50 messages a second at most."""


class TokenPace:
    """Tells, again and again, the mean nanoseconds between two tokens of a request, prompts of others in between too.

    One request is watched at a time, until it gets no more: those that run take their steps together, or in turn, so
    that each is as fast as the others.
    """

    def __init__(self, tell: Callable[[int], None]) -> None:
        self._tell = tell
        self._watched: Hashable = None
        self._last_ns = 0
        self._others: dict[Hashable, int] = {}  # who had a token since the watched one, and when
        self._tokens = 0
        self._ns = 0

    def emitted(self, request: Hashable, tokens: int) -> None:
        """Note that a request, known by what is kept of it, has so many new tokens now."""
        now = CLOCK()
        if request is not self._watched:
            if request not in self._others:
                self._others[request] = now
                return
            self._last_ns = self._others[request]  # twice while the watched one had none: it gets no more
        self._ns += now - self._last_ns
        self._tokens += tokens
        self._watched, self._last_ns = request, now
        self._others.clear()
        if self._tokens >= LEAST_TOKENS and self._ns >= LEAST_NS:
            self._tell(self._ns // self._tokens)
            self._tokens = self._ns = 0
