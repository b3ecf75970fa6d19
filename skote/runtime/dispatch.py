"""Hands requests to replicas: one queue and one in-flight cap a replica, and a future that always resolves."""

from __future__ import annotations

import dataclasses
import math
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Literal

from skote.runtime.lane import Lane, Launcher, ReplicaCounts
from skote.runtime.policies import new_policy
from skote.runtime.waiting import Ticket
from skote.types import Completion, Request, SkoteError, UsageError

_Status = Literal["error", "cancelled"]
_Launch = tuple[Lane, list[Ticket]]


@dataclass(frozen=True, slots=True)
class ReplicaEvent:
    """What befell a replica, at `t_ns` (`time.monotonic_ns`)."""

    t_ns: int
    replica: int
    what: Literal["ended", "restarted", "given up"]
    sentence: str


@dataclass(frozen=True, slots=True)
class DispatchOptions:
    """How a dispatcher treats its replicas.

    Attributes:
        policy: a name in `skote.runtime.policies.POLICIES`.
        max_concurrency_per_device: unanswered launches of a replica at one time.
        microbatch_window_ms: how long a request may wait for others to share its launch; 0 is off.
        microbatch_max: the most requests of a launch.
        max_queue: the most requests that may wait for a replica, past which one is refused; None is no limit.
        max_restarts: how often a replica that ended is started again.

    Raises:
        UsageError: an unknown policy, a number out of its range.
    """

    policy: str = "round_robin"
    max_concurrency_per_device: int = 1
    microbatch_window_ms: float = 0.0
    microbatch_max: int = 8
    max_queue: int | None = None
    max_restarts: int = 0

    def __post_init__(self) -> None:
        new_policy(self.policy)
        for name, least in (("max_concurrency_per_device", 1), ("microbatch_max", 1), ("max_restarts", 0)):
            if getattr(self, name) < least:
                raise UsageError(f"{name} must be at least {least}, got {getattr(self, name)}.")
        if self.max_queue is not None and self.max_queue < 0:
            raise UsageError(f"max_queue must be 0 or more, or null for no limit, got {self.max_queue}.")
        if not 0.0 <= self.microbatch_window_ms < math.inf:
            raise UsageError(f"microbatch_window_ms must be 0 (off) or more, got {self.microbatch_window_ms}.")


class ReplicaDispatcher:
    """Chooses a replica for each request, queues it there, and keeps at most a cap of launches in each process.

    Interactive requests go before batch ones (`skote.runtime.waiting`). With a micro-batch window a launch gathers
    greedy requests in the order of their arrival, until there are `microbatch_max` or the first has waited
    `microbatch_window_ms`; a sampled one, with its own seed, goes alone. A replica that ends takes the requests that it
    has begun with it; those that wait for it go to the others, or wait until it was started again. The replicas stay
    the caller's to close; close the dispatcher first.

    The keywords are those of `DispatchOptions`.

    Raises:
        UsageError: no replica, two of one index, or options that `DispatchOptions` refuses.
    """

    def __init__(
        self,
        replicas: Sequence[Launcher],
        policy: str = "round_robin",
        *,
        max_concurrency_per_device: int = 1,
        microbatch_window_ms: float = 0.0,
        microbatch_max: int = 8,
        max_queue: int | None = None,
        max_restarts: int = 0,
    ) -> None:
        if not replicas:
            raise UsageError("A dispatcher needs at least one replica.")
        options = self._options = DispatchOptions(
            policy, max_concurrency_per_device, microbatch_window_ms, microbatch_max, max_queue, max_restarts
        )
        self._policy = new_policy(options.policy)
        self._window_ns = round(options.microbatch_window_ms * 1e6)
        self._batch_max = options.microbatch_max if self._window_ns else 1
        self._lanes = {replica.index: Lane(replica) for replica in sorted(replicas, key=lambda each: each.index)}
        if len(self._lanes) != len(replicas):
            raise UsageError("Every replica of a dispatcher needs an index of its own.")
        self._events: list[ReplicaEvent] = []
        self._tickets: dict[Future[Completion], Ticket] = {}
        self._closed = False
        self._changed = threading.Condition()
        self._timer: threading.Thread | None = None
        if self._window_ns:
            self._timer = threading.Thread(target=self._watch_windows, name="dispatch-window", daemon=True)
            self._timer.start()

    def __enter__(self) -> ReplicaDispatcher:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def counts(self) -> list[ReplicaCounts]:
        """Each replica's counts so far, in the order of their indices."""
        with self._changed:
            return [lane.counts for lane in self._lanes.values()]

    @property
    def events(self) -> list[ReplicaEvent]:
        """Replicas that ended and came back so far, in the order of time."""
        with self._changed:
            return list(self._events)

    def dispatch(self, request: Request) -> Future[Completion]:
        """Choose a replica and queue `request` there; the future never raises. `cancel` it here, not by its own method.

        It resolves at once, with status "error", where every replica has ended or every queue is full, and "cancelled"
        after `close`.
        """
        ticket = Ticket(request, time.monotonic_ns(), Future())
        ticket.future.set_running_or_notify_cancel()
        launches: list[_Launch] = []
        with self._changed:
            lanes = self._open_lanes()
            refusal = self._refusal(lanes)
            if refusal is None:
                self._tickets[ticket.future] = ticket
                launches = self._take_launches(self._enqueue(ticket, lanes))
                self._changed.notify()
        if refusal is not None:
            _refuse(ticket, *refusal)
        self._launch(launches)
        return ticket.future

    def cancel(self, future: Future[Completion]) -> bool:
        """Drop the request of a future that `dispatch` gave; False where it was answered already.

        One that runs is left within a step, and keeps the tokens that it has.
        """
        with self._changed:
            ticket = self._tickets.get(future)
            if ticket is None:
                return False
            ticket.cancelled = True
            lane = next((each for each in self._lanes.values() if each.withdraw(ticket)), None)
            if lane is not None:
                del self._tickets[future]
            drop = ticket.drop
        if lane is not None:
            _refuse(ticket, "cancelled", "The request was cancelled before a replica took it.", lane.replica)
        elif drop is not None:
            drop()
        return True

    def close(self) -> None:
        """Resolve what is queued with status "cancelled" and take no more; launches in flight are still answered."""
        with self._changed:
            self._closed = True
            queued = [(ticket, lane.replica) for lane in self._lanes.values() for ticket in lane.queue.clear()]
            for ticket, _ in queued:
                del self._tickets[ticket.future]
            self._changed.notify()
        for ticket, replica in queued:
            _refuse(ticket, "cancelled", "The dispatcher was closed before a replica took the request.", replica)
        if self._timer is not None and self._timer is not threading.current_thread():
            self._timer.join()

    def _refusal(self, lanes: Sequence[Lane]) -> tuple[_Status, str] | None:
        if self._closed:
            return "cancelled", "The dispatcher was closed before the request came."
        if not lanes:
            deaths = " ".join(str(lane.replica.death) for lane in self._lanes.values())
            return "error", f"No replica is left: {deaths}"
        if not self._with_room(lanes):
            state = "; ".join(
                f"replica {lane.replica.index}: {len(lane.queue)} wait, {lane.running} run" for lane in lanes
            )
            return "error", f"Every queue is full ({state}; max_queue={self._options.max_queue}): try again later."
        return None

    def _open_lanes(self) -> list[Lane]:
        """Those that live; where none does, those that are being started again.

        A replica may end at any moment: whoever acts on the answer asks once.
        """
        for lane in self._lanes.values():
            if lane.replica.death is not None and not (lane.reviving or lane.given_up):
                self._note_end(lane)
        living = [lane for lane in self._lanes.values() if lane.alive]
        return living or [lane for lane in self._lanes.values() if lane.reviving]

    def _with_room(self, lanes: Sequence[Lane]) -> list[Lane]:
        """Those that can start a request at once, or let one more wait."""
        most = self._options.max_queue
        if most is None:
            return list(lanes)
        cap = self._options.max_concurrency_per_device
        return [
            lane
            for lane in lanes
            if len(lane.queue) < most or (lane.alive and lane.in_flight < cap and len(lane.queue) < self._batch_max)
        ]

    def _enqueue(self, ticket: Ticket, lanes: Sequence[Lane]) -> Lane:
        loads = [lane.load for lane in self._with_room(lanes) or lanes]
        lane = self._lanes[self._policy.choose(loads, len(ticket.request.input_ids))]
        lane.put(ticket)
        return lane

    def _take_launches(self, lane: Lane) -> list[_Launch]:
        """Take what may be launched now; called under the lock, while the launches themselves are made outside."""
        if not lane.alive:
            return self._abandon(lane)
        launches: list[_Launch] = []
        while lane.queue and lane.in_flight < self._options.max_concurrency_per_device:
            size = lane.queue.batch_size(self._batch_max)
            greedy = lane.queue.first.request.sampling.greedy
            may_grow = greedy and size == len(lane.queue) and size < self._batch_max
            if may_grow and time.monotonic_ns() < self._deadline_ns(lane):
                break
            launches.append((lane, lane.take(size)))
            lane.launches += 1
            lane.in_flight_peak = max(lane.in_flight_peak, lane.in_flight)
        return launches

    def _abandon(self, lane: Lane) -> list[_Launch]:
        """What becomes of the queue of a replica that has ended: others take it, or it waits for the replica."""
        lanes = self._open_lanes()
        if not lane.queue or (lane in lanes and lane.reviving):
            return []
        if not lanes:
            lost = []
            while lane.queue:  # it answers them at once, with its sentence
                lost.append((lane, lane.take(lane.queue.batch_size(len(lane.queue)))))
            return lost
        others = []
        for ticket in list(lane.queue):
            lane.withdraw(ticket)
            others.append(self._enqueue(ticket, lanes))
        return [launch for other in {each.replica.index: each for each in others}.values()
                for launch in self._take_launches(other)]  # fmt: skip

    def _note_end(self, lane: Lane) -> None:
        """Remember that a replica has ended, and start it again where that may be."""
        self._note(lane, "ended", str(lane.replica.death))
        if self._closed or lane.restarts >= self._options.max_restarts:
            lane.given_up = True
            return
        lane.restarts += 1
        lane.reviving = True
        name = f"revive-{lane.replica.index}"
        threading.Thread(target=self._revive, args=(lane,), name=name, daemon=True).start()

    def _revive(self, lane: Lane) -> None:
        started = time.monotonic()
        try:
            lane.replica.restart()
            failure = None
        except (SkoteError, OSError, RuntimeError) as error:  # of the system: no thread or descriptor is left
            failure = str(error)
        with self._changed:
            lane.reviving = False
            lane.given_up = failure is not None
            if failure is None:
                took = time.monotonic() - started
                self._note(lane, "restarted", f"Replica {lane.replica.index} was ready again after {took:.1f} s.")
            else:
                self._note(lane, "given up", failure)
            launches = [launch for each in self._lanes.values() for launch in self._take_launches(each)]
            self._changed.notify()
        self._launch(launches)

    def _note(self, lane: Lane, what: Literal["ended", "restarted", "given up"], sentence: str) -> None:
        self._events.append(ReplicaEvent(time.monotonic_ns(), lane.replica.index, what, sentence))

    def _deadline_ns(self, lane: Lane) -> int:
        return lane.queue.first.dispatched_ns + self._window_ns

    def _launch(self, launches: Sequence[_Launch]) -> None:
        for lane, tickets in launches:
            future = lane.replica.generate([ticket.request for ticket in tickets])
            with self._changed:
                for row, ticket in enumerate(tickets):
                    ticket.drop = partial(lane.replica.cancel, future, row)
                cancelled = [ticket.drop for ticket in tickets if ticket.cancelled and ticket.drop]
            for drop in cancelled:
                drop()
            future.add_done_callback(partial(self._answer, lane, tickets))

    def _answer(self, lane: Lane, tickets: Sequence[Ticket], done: Future[list[Completion]]) -> None:
        """Keep the device busy first, then hand the completions back; runs in the replica's thread."""
        with self._changed:
            lane.answered(tickets)
            for ticket in tickets:
                del self._tickets[ticket.future]
            launches = self._take_launches(lane)
            self._changed.notify()
        self._launch(launches)
        for ticket, completion in zip(tickets, done.result(), strict=True):
            ticket.future.set_result(
                dataclasses.replace(completion, dispatched_ns=ticket.dispatched_ns, end_ns=time.monotonic_ns())
            )

    def _watch_windows(self) -> None:
        """Launch what has waited for its window's length."""
        while True:
            with self._changed:
                if self._closed:
                    return
                launches = [launch for lane in self._lanes.values() for launch in self._take_launches(lane)]
                if not launches:
                    self._changed.wait(self._seconds_to_next_window())
            self._launch(launches)

    def _seconds_to_next_window(self) -> float | None:
        cap = self._options.max_concurrency_per_device
        open_lanes = [lane for lane in self._lanes.values() if lane.alive and lane.queue and lane.in_flight < cap]
        if not open_lanes:
            return None
        return max(0.0, min(map(self._deadline_ns, open_lanes)) - time.monotonic_ns()) / 1e9


def _refuse(ticket: Ticket, status: _Status, sentence: str, replica: Launcher | None = None) -> None:
    """Resolve a ticket that no replica took."""
    ticket.future.set_result(
        Completion(
            request_id=ticket.request.request_id,
            input_tokens=len(ticket.request.input_ids),
            output_ids=(),
            chunks=(),
            dispatched_ns=ticket.dispatched_ns,
            admitted_ns=None,
            end_ns=time.monotonic_ns(),
            status=status,
            error=sentence,
            replica=-1 if replica is None else replica.index,
            device="none" if replica is None else replica.device,
        )
    )
