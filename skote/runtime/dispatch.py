"""Hands requests to replicas: one queue and one in-flight cap a replica, and a future that always resolves."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from itertools import islice, takewhile
from types import TracebackType
from typing import Literal, Protocol

from skote.runtime.policies import Load, find_policy, recent_mean
from skote.types import Completion, Request, UsageError


class Launcher(Protocol):
    """What a dispatcher needs of a replica (`skote.runtime.replica.Replica`)."""

    index: int
    device: str

    @property
    def death(self) -> str | None:
        """Why the replica ended, in a sentence; None while it is alive."""

    def generate(self, requests: Sequence[Request]) -> Future[list[Completion]]:
        """One launch; the future never raises."""


@dataclass(frozen=True, slots=True)
class ReplicaCounts:
    """What a replica has had to do. A launch holds one request, or several where a micro-batch window is on."""

    index: int
    device: str
    dispatched: int
    """Requests that were given to the replica's queue."""
    launches: int
    """Launches that were handed to its process."""
    in_flight_peak: int
    """The most launches that were unanswered at one time."""


@dataclass(slots=True)
class _Ticket:
    request: Request
    dispatched_ns: int
    future: Future[Completion]


@dataclass(slots=True)
class _Lane:
    """A replica with its queue; guarded by the dispatcher's lock."""

    replica: Launcher
    queue: deque[_Ticket] = field(default_factory=deque)
    running: int = 0  # requests in unanswered launches
    in_flight: int = 0
    in_flight_peak: int = 0
    dispatched: int = 0
    launches: int = 0
    mean_prompt_tokens: float | None = None


_Status = Literal["error", "cancelled"]
_Launch = tuple[_Lane, list[_Ticket]]


class ReplicaDispatcher:
    """Chooses a replica for each request, queues it there, and keeps at most a cap of launches in each process.

    With a micro-batch window a launch gathers greedy requests in the order of their arrival, until there are
    `microbatch_max` or the first has waited `microbatch_window_ms`; a sampled one, with its own seed, goes alone. A
    replica that ends takes its own requests with it, queued ones included; later requests go to the others. The
    replicas stay the caller's to close; close the dispatcher first.

    Raises:
        UsageError: no replica, an unknown policy, a cap or micro-batch below 1, a negative window.
    """

    def __init__(
        self,
        replicas: Sequence[Launcher],
        policy: str = "round_robin",
        *,
        max_concurrency_per_device: int = 1,
        microbatch_window_ms: float = 0.0,
        microbatch_max: int = 8,
    ) -> None:
        if not replicas:
            raise UsageError("A dispatcher needs at least one replica.")
        if max_concurrency_per_device < 1:
            raise UsageError(f"max_concurrency_per_device must be at least 1, got {max_concurrency_per_device}.")
        if microbatch_max < 1:
            raise UsageError(f"microbatch_max must be at least 1, got {microbatch_max}.")
        if not microbatch_window_ms >= 0.0:
            raise UsageError(f"microbatch_window_ms must be 0 (off) or more, got {microbatch_window_ms}.")
        self._choose = find_policy(policy)
        self._cap = max_concurrency_per_device
        self._window_ns = round(microbatch_window_ms * 1e6)
        self._batch_max = microbatch_max if self._window_ns else 1
        self._lanes = {replica.index: _Lane(replica) for replica in sorted(replicas, key=lambda each: each.index)}
        if len(self._lanes) != len(replicas):
            raise UsageError("Every replica of a dispatcher needs an index of its own.")
        self._last = -1
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
            return [
                ReplicaCounts(
                    lane.replica.index,
                    lane.replica.device,
                    lane.dispatched,
                    lane.launches,
                    lane.in_flight_peak,
                )
                for lane in self._lanes.values()
            ]

    def dispatch(self, request: Request) -> Future[Completion]:
        """Choose a replica and queue `request` there; the future never raises and cannot be cancelled.

        It resolves at once, with status "error", where every replica has ended, and "cancelled" after `close`.
        """
        ticket = _Ticket(request, time.monotonic_ns(), Future())
        ticket.future.set_running_or_notify_cancel()
        with self._changed:
            refusal = self._refusal()
            if refusal is None:
                launches = self._take_launches(self._enqueue(ticket))
                self._changed.notify()
        if refusal is None:
            self._launch(launches)
        else:
            _refuse(ticket, *refusal)
        return ticket.future

    def close(self) -> None:
        """Resolve what is queued with status "cancelled" and take no more; launches in flight are still answered."""
        with self._changed:
            self._closed = True
            queued = [(ticket, lane.replica) for lane in self._lanes.values() for ticket in lane.queue]
            for lane in self._lanes.values():
                lane.queue.clear()
            self._changed.notify()
        for ticket, replica in queued:
            _refuse(ticket, "cancelled", "The dispatcher was closed before a replica took the request.", replica)
        if self._timer is not None and self._timer is not threading.current_thread():
            self._timer.join()

    def _refusal(self) -> tuple[_Status, str] | None:
        if self._closed:
            return "cancelled", "The dispatcher was closed before the request came."
        deaths = [lane.replica.death for lane in self._lanes.values()]
        if None in deaths:
            return None
        return "error", f"No replica is left: {' '.join(map(str, deaths))}"

    def _enqueue(self, ticket: _Ticket) -> _Lane:
        prompt_tokens = len(ticket.request.input_ids)
        loads = [
            Load(lane.replica.index, len(lane.queue) + lane.running, lane.mean_prompt_tokens)
            for lane in self._lanes.values()
            if lane.replica.death is None
        ]
        self._last = self._choose(loads, prompt_tokens, self._last)
        lane = self._lanes[self._last]
        lane.queue.append(ticket)
        lane.dispatched += 1
        lane.mean_prompt_tokens = recent_mean(lane.mean_prompt_tokens, prompt_tokens)
        return lane

    def _take_launches(self, lane: _Lane) -> list[_Launch]:
        """Take what may be launched now; called under the lock, while the launches themselves are made outside."""
        launches: list[_Launch] = []
        if lane.replica.death is not None and lane.queue:
            launches.append(self._take(lane, len(lane.queue)))  # it answers them at once, with its sentence
        while lane.queue and lane.in_flight < self._cap:
            size = self._batch_size(lane)
            may_grow = size == len(lane.queue) and size < self._batch_max
            if may_grow and time.monotonic_ns() < self._deadline_ns(lane):
                break
            launches.append(self._take(lane, size))
            lane.launches += 1
            lane.in_flight_peak = max(lane.in_flight_peak, lane.in_flight)
        return launches

    def _take(self, lane: _Lane, size: int) -> _Launch:
        lane.running += size
        lane.in_flight += 1
        return lane, [lane.queue.popleft() for _ in range(size)]

    def _batch_size(self, lane: _Lane) -> int:
        """How many requests from the head of the queue may share a launch."""
        greedy = takewhile(lambda ticket: ticket.request.sampling.greedy, lane.queue)
        return sum(1 for _ in islice(greedy, self._batch_max)) or 1

    def _deadline_ns(self, lane: _Lane) -> int:
        return lane.queue[0].dispatched_ns + self._window_ns

    def _launch(self, launches: Sequence[_Launch]) -> None:
        for lane, tickets in launches:
            future = lane.replica.generate([ticket.request for ticket in tickets])
            future.add_done_callback(partial(self._answer, lane, tickets))

    def _answer(self, lane: _Lane, tickets: Sequence[_Ticket], done: Future[list[Completion]]) -> None:
        """Keep the device busy first, then hand the completions back; runs in the replica's thread."""
        with self._changed:
            lane.in_flight -= 1
            lane.running -= len(tickets)
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
        open_lanes = [lane for lane in self._lanes.values() if lane.queue and lane.in_flight < self._cap]
        if not open_lanes:
            return None
        return max(0.0, min(map(self._deadline_ns, open_lanes)) - time.monotonic_ns()) / 1e9


def _refuse(ticket: _Ticket, status: _Status, sentence: str, replica: Launcher | None = None) -> None:
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
