"""Another machine's monotonic clock, told from exchanges of messages with it."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from pathlib import Path

KEPT = 64
"""Of the exchanges, the latest that are looked at: two clocks drift apart by some microseconds a second."""
_BOOT = Path("/proc/sys/kernel/random/boot_id")
_NAMESPACE = Path("/proc/self/ns/time")


@dataclass(frozen=True, slots=True)
class Exchange:
    """A question and its answer; `sent_ns` and `got_ns` by this clock, `received_ns` and `replied_ns` by the other."""

    sent_ns: int
    received_ns: int
    replied_ns: int
    got_ns: int

    @property
    def offset_ns(self) -> int:
        """The other clock minus this one, were both ways equally long (NTP's estimate, RFC 5905, section 8)."""
        return ((self.received_ns - self.sent_ns) + (self.replied_ns - self.got_ns)) // 2

    @property
    def uncertainty_ns(self) -> int:
        """How far the true offset may lie from `offset_ns`: half of the time that the messages were on their way."""
        return ((self.got_ns - self.sent_ns) - (self.replied_ns - self.received_ns) + 1) // 2


class RemoteClock:
    """Brings another clock's stamps to this one; `same` where both are one clock.

    Attributes:
        offset_ns: the other clock minus this one, of the quickest exchange among the latest.
        uncertainty_ns: of `offset_ns`; None where nothing is known of the other clock.
    """

    def __init__(self, *, same: bool) -> None:
        self.same = same
        self.offset_ns = 0
        self.uncertainty_ns: int | None = 0 if same else None
        self._exchanges: deque[Exchange] = deque(maxlen=KEPT)

    def note(self, exchange: Exchange) -> None:
        """Learn from an exchange."""
        if self.same:
            return
        self._exchanges.append(exchange)
        best = min(self._exchanges, key=lambda each: each.uncertainty_ns)
        self.offset_ns, self.uncertainty_ns = best.offset_ns, best.uncertainty_ns

    def here(self, t_ns: int) -> int:
        """A stamp of the other clock, as this clock would have made it."""
        return t_ns - self.offset_ns


def clock_id() -> str | None:
    """What two processes share exactly where their monotonic clocks are one: the system's start, and a namespace.

    None where the system does not say.
    """
    if not _BOOT.exists():
        return None
    namespace = _NAMESPACE.readlink() if _NAMESPACE.is_symlink() else ""
    return f"{_BOOT.read_text(encoding='ascii').strip()} {namespace}"
