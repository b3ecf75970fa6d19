"""A replica as a dispatcher sees it: its queue, what it has in flight, and what it has had to do."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Protocol

from skote.runtime.policies import Load, recent_mean
from skote.runtime.tpot_guard import TpotGuard
from skote.runtime.waiting import Ticket, Waiting
from skote.types import Completion, Emit, Request, RowEnded

_UNBOUNDED = sys.maxsize


class Launcher(Protocol):
    """What a dispatcher needs of a replica (`skote.runtime.replica.Replica`)."""

    index: int
    device: str

    @property
    def death(self) -> str | None:
        """Why the replica ended, in a sentence; None while it is alive."""

    @property
    def rows(self) -> int | None:
        """Requests that its engine advances together, joining and leaving; None where launches take their turn."""

    @property
    def kept_tokens(self) -> int:
        """Tokens of prompts that its engine has in store for requests that begin with them, as far as is known."""

    def generate(
        self, requests: Sequence[Request], hear: Emit | None = None, ended: RowEnded | None = None
    ) -> Future[list[Completion]]:
        """One launch; the future never raises. `hear` is told all tokens of its completions before it is done.

        `ended` may be told of rows that end before the last one.
        """

    def cancel(self, launch: Future[list[Completion]], row: int) -> None:
        """Drop a row of a launch, as soon as may be."""

    def watch_pace(self, heard: Callable[[int], None]) -> None:
        """As requests run, call `heard` with the mean nanoseconds between two tokens of one; after restarts too."""

    def watch_end(self, heard: Callable[[], None]) -> None:
        """Call `heard` each time it has ended by an accident, once what it was asked is answered."""

    def restart(self) -> None:
        """Start it again after its death, and wait until it is ready; raises a `SkoteError` where it is not."""


@dataclass(frozen=True, slots=True)
class ReplicaCounts:
    """What a replica has had to do. A launch holds one request, or several where a micro-batch window is on."""

    index: int
    device: str
    dispatched: int
    """Requests that were given to the replica's queue, stayed there until it took them, and were begun there."""
    launches: int
    """Launches that were handed to its process."""
    in_flight_peak: int
    """The most launches that were unanswered at one time."""
    slowed: int = 0
    """Requests that the replica had room for when they came, and that had to wait so that tokens come in time."""


@dataclass(frozen=True, slots=True)
class ReplicaLoad:
    """What a replica has to do now."""

    index: int
    waiting: int
    """Requests in its queue."""
    running: int
    """Requests that its process has been given and has not answered."""
    alive: bool
    """Whether it takes requests; not while it is started again."""
    in_flight: int = 0
    """Launches that its process has not answered."""
    free_slots: int = 0
    """Launches that it could take at once."""
    mean_prompt_tokens: float | None = None
    """The recent mean prompt length (`skote.runtime.policies`), None before the first prompt."""
    kept_tokens: int = 0
    """Tokens of prompts that its engine has in store for requests that begin with them (`engine.prefix_cache`)."""


@dataclass(slots=True, eq=False)
class Lane:
    """Guarded by its dispatcher's lock. `reviving` and `given_up` tell what becomes of a replica that has ended.

    At most `most_launches` may be in flight.
    """

    replica: Launcher
    most_launches: int
    guard: TpotGuard | None = None
    queue: Waiting = field(default_factory=Waiting)
    running: int = 0  # requests in unanswered launches
    tokens: int = 0  # of those and of the queue
    in_flight: int = 0
    in_flight_peak: int = 0
    dispatched: int = 0
    launches: int = 0
    slowed: int = 0
    mean_prompt_tokens: float | None = None
    restarts: int = 0
    reviving: bool = False
    given_up: bool = False

    @property
    def alive(self) -> bool:
        """Whether it can take a launch."""
        return self.replica.death is None and not self.reviving

    @property
    def room(self) -> int:
        """How many requests a replica that lives may be given now.

        No more than the engine has rows for: what it queued by itself would lose its priority.
        """
        room = self._unguarded_room
        return room if self.guard is None else max(0, min(room, self.guard.most - self.running))

    @property
    def is_slowed(self) -> bool:
        """Whether there is no room for the guard's sake alone."""
        return self.guard is not None and self.running >= self.guard.most and self._unguarded_room > 0

    @property
    def _unguarded_room(self) -> int:
        if self.in_flight >= self.most_launches:
            return 0
        rows = self.replica.rows
        return _UNBOUNDED if rows is None else max(0, rows - self.running)

    @property
    def load(self) -> Load:
        """What a policy may know of the replica."""
        waiting = len(self.queue)
        free = max(0, min(self.most_launches - self.in_flight, self.room) - waiting)
        return Load(
            self.replica.index, waiting + self.running, self.tokens, self.mean_prompt_tokens, free, self.restarts
        )

    @property
    def counts(self) -> ReplicaCounts:
        """So far."""
        return ReplicaCounts(
            self.replica.index, self.replica.device, self.dispatched, self.launches, self.in_flight_peak, self.slowed
        )

    @property
    def now(self) -> ReplicaLoad:
        """At this moment."""
        load = self.load
        return ReplicaLoad(
            load.index,
            len(self.queue),
            self.running,
            self.alive,
            self.in_flight,
            load.free_slots if self.alive else 0,
            load.mean_prompt_tokens,
            self.replica.kept_tokens,
        )

    def put(self, ticket: Ticket) -> None:
        """Queue a request."""
        self.queue.put(ticket)
        self.dispatched += 1
        self.tokens += ticket.tokens
        self.mean_prompt_tokens = recent_mean(self.mean_prompt_tokens, len(ticket.request.input_ids))

    def withdraw(self, ticket: Ticket) -> bool:
        """Take a request out of the queue; whether it was there."""
        if not self.queue.remove(ticket):
            return False
        self.dispatched -= 1
        self.tokens -= ticket.tokens
        return True

    def take(self, size: int) -> list[Ticket]:
        """The next launch of the queue, of `size` requests."""
        self.running += size
        self.in_flight += 1
        return self.queue.pop(size)

    def put_back(self, ticket: Ticket) -> None:
        """Queue a request before all that came after it: a replica was given it, and ended before it had begun it."""
        self.put(ticket)
        self.queue.move_up(ticket)

    def answered(self, tickets: Sequence[Ticket], *, over: bool) -> None:
        """Note that requests of a launch are answered, and whether it is `over`."""
        self.running -= len(tickets)
        self.in_flight -= over
        self.tokens -= sum(ticket.tokens for ticket in tickets)
