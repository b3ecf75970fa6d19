"""What befalls the replicas of a dispatcher: who ended, who is started again, and who is given up."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

from skote.runtime.lane import Lane
from skote.runtime.threads import start_thread
from skote.types import ReplicaError, SkoteError

What = Literal["ended", "restarted", "given up"]


@dataclass(frozen=True, slots=True)
class ReplicaEvent:
    """What befell a replica, at `t_ns` (`time.monotonic_ns`)."""

    t_ns: int
    replica: int
    what: What
    sentence: str


class Revivals:
    """Starts a replica that has ended again, in a thread of its own, at most `max_restarts` times.

    Args:
        lock: the dispatcher's, under which lanes and events change; the caller holds it.
        over: called without the lock when a replica is back or given up.
    """

    def __init__(self, max_restarts: int, lock: threading.Condition, over: Callable[[], None]) -> None:
        self.events: list[ReplicaEvent] = []
        self._max_restarts = max_restarts
        self._lock = lock
        self._over = over

    def note_end(self, lane: Lane, *, final: bool) -> None:
        """Remember that a replica has ended, where that is not known yet, and start it again unless that is `final`."""
        if lane.reviving or lane.given_up:
            return
        self._note(lane, "ended", str(lane.replica.death))
        if final or lane.restarts >= self._max_restarts:
            lane.given_up = True
            return
        lane.restarts += 1
        lane.reviving = True
        try:
            start_thread(f"revive-{lane.replica.index}", partial(self._revive, lane))
        except ReplicaError as error:
            self._end(lane, str(error))

    def _revive(self, lane: Lane) -> None:
        started = time.monotonic()
        failure: str | None = f"Replica {lane.replica.index} could not be started again: its restart was broken off."
        try:
            lane.replica.restart()
            failure = None
        except (SkoteError, OSError, RuntimeError) as error:  # of the system: no thread or descriptor is left
            failure = str(error)
        finally:  # whatever else was raised: nobody may wait for it for ever
            with self._lock:
                self._end(lane, failure, time.monotonic() - started)
            self._over()

    def _end(self, lane: Lane, failure: str | None, seconds: float = 0.0) -> None:
        lane.reviving = False
        lane.given_up = failure is not None
        if failure is None:
            self._note(lane, "restarted", f"Replica {lane.replica.index} was ready again after {seconds:.1f} s.")
        else:
            self._note(lane, "given up", failure)

    def _note(self, lane: Lane, what: What, sentence: str) -> None:
        self.events.append(ReplicaEvent(time.monotonic_ns(), lane.replica.index, what, sentence))
