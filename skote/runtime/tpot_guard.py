"""How many requests a replica may hold, so that each token comes within a limit: learned from how fast they come.

The replica tells the mean time between two tokens of the requests that it runs (`skote.runtime.token_pace`). Where it
keeps the limit, more may be held: at most twice as many as ran, and no more than would keep it if the time grew with
their number; an eighth more, one at least, in any case. Where it does not, nothing is given to the replica while it has
anything to do, until the limit is kept again, and then as many as kept it before. One more is tried after a second, and
after twice as long for each try that fails. So a slow moment costs little, and what is too much is seldom asked for.
"""

from __future__ import annotations

import time

CLOCK = time.monotonic_ns
FIRST_WAIT_NS = 1_000_000_000
MOST_WAIT_NS = 60_000_000_000
"""Until as many requests as were too slow are tried again: after the first time, and at most."""


class TpotGuard:
    """See the file's head. A replica that has nothing to do may always take a request.

    Args:
        slo_ms: the limit, milliseconds between two tokens of a request.
    """

    def __init__(self, slo_ms: float) -> None:
        self._slo_ns = slo_ms * 1e6
        self._most = 1
        self._keeps = True
        self._kept = 1  # the most requests that have kept it
        self._wait_ns = FIRST_WAIT_NS
        self._retry_ns: int | None = None  # when one more is tried; None where nothing was too slow
        self._held = self._fewest = self._highest = 0  # now, and since the last measurement

    @property
    def most(self) -> int:
        """How many requests the replica may hold now."""
        return self._most if self._keeps else 1

    def hold(self, requests: int) -> None:
        """Note how many requests the replica holds from now on."""
        self._held = requests
        self._fewest = min(self._fewest, requests)
        self._highest = max(self._highest, requests)

    def measured(self, tpot_ns: float) -> None:
        """Learn from the mean nanoseconds a token since the last call."""
        fewest, highest = self._fewest, self._highest
        self._fewest = self._highest = self._held
        self._keeps = tpot_ns <= self._slo_ns
        if self._keeps:
            self._grow(fewest, tpot_ns)
        elif highest > 1:
            self._shrink(highest)

    def _grow(self, requests: int, tpot_ns: float) -> None:
        if self._tried(requests):
            self._retry_ns, self._wait_ns = None, FIRST_WAIT_NS
        self._kept = max(self._kept, requests)
        step = requests + 1 + requests // 8
        more = max(step, min(2 * requests, int(requests * self._slo_ns / max(tpot_ns, 1))))
        if self._retry_ns is not None:
            more = min(more, self._kept + 1 if CLOCK() >= self._retry_ns else self._kept)
        self._most = max(self._most, more)

    def _shrink(self, requests: int) -> None:
        if self._tried(requests):
            self._wait_ns = min(2 * self._wait_ns, MOST_WAIT_NS)
        elif self._retry_ns is None or requests <= self._kept:
            self._wait_ns = FIRST_WAIT_NS
        self._kept = max(1, min(self._kept, requests - 1))
        self._most = self._kept
        self._retry_ns = CLOCK() + self._wait_ns

    def _tried(self, requests: int) -> bool:
        """Whether `requests` were one more than keep the limit for all that is known, after a time of waiting."""
        return self._retry_ns is not None and requests > self._kept and self._most > self._kept
