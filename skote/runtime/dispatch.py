"""Hands requests to replicas: one queue and one in-flight cap a replica, and a future that always resolves."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from types import TracebackType
from typing import Any

from skote.runtime.answers import CALLBACKS_S, Answer, Answers, contained
from skote.runtime.dispatch_options import DispatchOptions
from skote.runtime.lane import Lane, Launcher, ReplicaCounts, ReplicaLoad
from skote.runtime.policies import new_policy
from skote.runtime.revivals import ReplicaEvent, Revivals
from skote.runtime.threads import start_thread
from skote.runtime.tpot_guard import TpotGuard
from skote.runtime.waiting import Refusal, Ticket, hearer
from skote.types import Completion, ReplicaError, Request, UsageError

_CANCELLED = "The request was cancelled before a replica took it."
_Launch = tuple[Lane, list[Ticket]]


class ReplicaDispatcher:
    """Chooses a replica for each request, queues it there, and keeps at most a cap of launches in each process.

    Interactive requests go before batch ones (`skote.runtime.waiting`), also where an engine batches in flight: it is
    given no more requests than it has rows. With `tpot_slo_ms` a replica is given no more than keep it
    (`skote.runtime.tpot_guard`). With a micro-batch window a launch gathers greedy requests in the order of their
    arrival, until there are `microbatch_max` or the first has waited `microbatch_window_ms`; a sampled one, with its
    own seed, goes alone. A replica that ends takes the requests that it has begun with it; what waits for it, or in its
    process, goes to the others, or waits until it was started again, which begins as soon as it has ended. Futures'
    callbacks run in one thread of the dispatcher's own, which holds up no launch. The replicas stay the caller's to
    close; close the dispatcher first.

    The keywords are those of `DispatchOptions`.

    Raises:
        UsageError: no replica, two of one index, or options that `DispatchOptions` refuses.
        ReplicaError: the system has no thread left.
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
        tpot_slo_ms: float | None = None,
    ) -> None:
        if not replicas:
            raise UsageError("A dispatcher needs at least one replica.")
        options = self._options = DispatchOptions(
            policy,
            max_concurrency_per_device,
            microbatch_window_ms,
            microbatch_max,
            max_queue,
            max_restarts,
            tpot_slo_ms,
        )
        self._policy = new_policy(options.policy)
        self._window_ns = round(options.microbatch_window_ms * 1e6)
        self._batch_max = options.microbatch_max if self._window_ns else 1
        cap = options.max_concurrency_per_device
        self._lanes = {each.index: Lane(each, cap) for each in sorted(replicas, key=lambda each: each.index)}
        if len(self._lanes) != len(replicas):
            raise UsageError("Every replica of a dispatcher needs an index of its own.")
        self._tickets: dict[Future[Any], Ticket] = {}
        self._closed = False
        self._changed = threading.Condition()
        self._revivals = Revivals(options.max_restarts, self._changed, self._launch_all)
        self._answers = Answers()
        self._timer: threading.Thread | None = None
        for lane in self._lanes.values():
            lane.replica.watch_end(self._launch_all)
            if tpot_slo_ms is not None:
                lane.guard = TpotGuard(tpot_slo_ms)
                lane.replica.watch_pace(partial(self._hear_pace, lane, lane.guard))
        if self._window_ns:
            try:
                self._timer = start_thread("dispatch-window", self._watch_windows)
            except ReplicaError:
                self._answers.end()
                raise

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
    def loads(self) -> list[ReplicaLoad]:
        """Each replica's load now, in the order of their indices."""
        with self._changed:
            return [lane.now for lane in self._lanes.values()]

    @property
    def events(self) -> list[ReplicaEvent]:
        """Replicas that ended and came back so far, in the order of time."""
        with self._changed:
            return list(self._revivals.events)

    @property
    def in_callback(self) -> bool:
        """Whether the calling thread is the one that runs the callbacks of the futures."""
        return self._answers.in_callback

    def dispatch(self, request: Request, hear: Callable[[Sequence[int]], None] | None = None) -> Future[Completion]:
        """Choose a replica and queue `request` there; the future never raises. `cancel` it here, not by its own method.

        It resolves at once, with status "error", where every replica has ended or every queue is full, and "cancelled"
        after `close`. `hear` is told all tokens of the completion, as they come and before it resolves, in a thread of
        the replica's, which it must not hold up.
        """
        ticket = Ticket(request, time.monotonic_ns(), Answer(), None if hear is None else contained(hear))
        launches: list[_Launch] = []
        with self._changed:
            lanes = self._open_lanes()
            refusal = self._refusal(lanes)
            if refusal is None:
                self._tickets[ticket.future] = ticket
                lane = self._choose(ticket, lanes)
                lane.put(ticket)
                launches = self._take_launches(lane)
                lane.slowed += ticket in lane.queue and lane.is_slowed
                self._changed.notify()
        if refusal is not None:
            ticket.future.set_result(ticket.refused(*refusal))
        self._launch(launches)
        return ticket.future

    def cancel(self, future: Future[Any]) -> bool:
        """Drop the request of a future that `dispatch` gave; False where it was answered already.

        One that runs is left within a step, and keeps the tokens that it has.
        """
        with self._changed:
            ticket = self._tickets.get(future)
            if ticket is None:
                return False
            ticket.cancelled = True
            self._withdraw(ticket)
            drop = ticket.drop
        if drop is not None:
            drop()
        return True

    def withdraw(self, future: Future[Any]) -> bool:
        """`cancel` a request that still waits for a replica; False where one has taken it."""
        with self._changed:
            ticket = self._tickets.get(future)
            return ticket is not None and self._withdraw(ticket)

    def close(self) -> None:
        """Resolve what is queued with status "cancelled" and take no more; launches in flight are still answered.

        Where none is, it returns when all callbacks have returned, or after `CALLBACKS_S` seconds; so call it once more
        when the replicas are closed, to wait for the last ones.
        """
        sentence = "The dispatcher was closed before a replica took the request."
        with self._changed:
            self._closed = True
            self._hand_back(
                [
                    (ticket, ticket.refused("cancelled", sentence, lane.replica.index, lane.replica.device))
                    for lane in self._lanes.values()
                    for ticket in lane.queue.clear()
                ]
            )
            ended = not self._tickets
            self._changed.notify()
        if self._timer is not None:
            self._timer.join(CALLBACKS_S)  # a pipe that nobody reads may hold it, until its replica is closed
        if ended:
            self._answers.join()

    def _withdraw(self, ticket: Ticket) -> bool:
        lane = next((each for each in self._lanes.values() if each.withdraw(ticket)), None)
        if lane is None:
            return False
        self._hand_back([(ticket, ticket.refused("cancelled", _CANCELLED, lane.replica.index, lane.replica.device))])
        return True

    def _hand_back(self, answers: Sequence[tuple[Ticket, Completion]]) -> None:
        """Let the futures be resolved; under the lock, so that the last of a closed dispatcher is known as such."""
        for ticket, _ in answers:
            del self._tickets[ticket.future]
        self._answers.put(answers)
        if self._closed and not self._tickets:
            self._answers.end()

    def _refusal(self, lanes: Sequence[Lane]) -> tuple[Refusal, str] | None:
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
            if lane.replica.death is not None:
                self._revivals.note_end(lane, final=self._closed)
        living = [lane for lane in self._lanes.values() if lane.alive]
        return living or [lane for lane in self._lanes.values() if lane.reviving]

    def _with_room(self, lanes: Sequence[Lane]) -> list[Lane]:
        """Those that can start a request at once, or let one more wait."""
        most = self._options.max_queue
        if most is None:
            return list(lanes)
        return [
            lane
            for lane in lanes
            if len(lane.queue) < most or (lane.alive and len(lane.queue) < min(self._batch_max, lane.room))
        ]

    def _choose(self, ticket: Ticket, lanes: Sequence[Lane]) -> Lane:
        loads = [lane.load for lane in self._with_room(lanes) or lanes]
        return self._lanes[self._policy.choose(loads, ticket.request)]

    def _take_launches(self, lane: Lane) -> list[_Launch]:
        """Take what may be launched now; called under the lock, while the launches themselves are made outside."""
        if not lane.alive:
            return self._abandon(lane)
        launches: list[_Launch] = []
        while lane.queue and (room := lane.room):
            most = min(self._batch_max, room)
            size = lane.queue.batch_size(most)
            greedy = lane.queue.first.request.sampling.greedy
            may_grow = greedy and size == len(lane.queue) and size < most
            if may_grow and time.monotonic_ns() < self._deadline_ns(lane):
                break
            launches.append((lane, lane.take(size)))
            lane.launches += 1
            lane.in_flight_peak = max(lane.in_flight_peak, lane.in_flight)
        if lane.guard is not None:
            lane.guard.hold(lane.running)
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
        for ticket in list(lane.queue):
            lane.withdraw(ticket)
            self._choose(ticket, lanes).put(ticket)
        return [launch for other in lanes for launch in self._take_launches(other)]

    def _take_all(self) -> list[_Launch]:
        return [launch for lane in self._lanes.values() for launch in self._take_launches(lane)]

    def _launch_all(self) -> None:
        """Launch what may be launched now that a replica has ended or is back."""
        with self._changed:
            launches = self._take_all()
            self._changed.notify()
        self._launch(launches)

    def _deadline_ns(self, lane: Lane) -> int:
        return lane.queue.first.dispatched_ns + self._window_ns

    def _launch(self, launches: Sequence[_Launch]) -> None:
        for lane, tickets in launches:
            ended = partial(self._answer_row, lane, tickets) if len(tickets) > 1 else None
            future = lane.replica.generate([ticket.request for ticket in tickets], hearer(tickets), ended)
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
            left = [each for each in zip(tickets, done.result(), strict=True) if each[0].future in self._tickets]
            lane.answered([ticket for ticket, _ in left], over=True)
            outcomes = [(ticket, self._outcome(lane, ticket, completion)) for ticket, completion in left]
            answers = [(ticket, each) for ticket, each in outcomes if each is not None]
            launches = self._take_launches(lane) if len(answers) == len(left) else self._take_all()
            self._changed.notify()
        self._launch(launches)
        with self._changed:
            self._hand_back(answers)

    def _answer_row(self, lane: Lane, tickets: Sequence[Ticket], row: int, completion: Completion) -> None:
        """As `_answer`, for a row that has ended before others of its launch."""
        with self._changed:
            lane.answered([tickets[row]], over=False)
            launches = self._take_launches(lane)
            self._changed.notify()
        self._launch(launches)
        with self._changed:
            self._hand_back([(tickets[row], completion)])

    def _outcome(self, lane: Lane, ticket: Ticket, completion: Completion) -> Completion | None:
        """What a request is answered; None where it waits again, since its replica ended and had not begun it."""
        if not completion.untouched:
            return completion
        if ticket.cancelled:
            return ticket.refused("cancelled", _CANCELLED, lane.replica.index, lane.replica.device)
        lanes = self._open_lanes()
        if self._closed or not lanes:
            return completion
        lane.dispatched -= 1
        ticket.drop = None
        self._choose(ticket, lanes).put_back(ticket)
        return None

    def _hear_pace(self, lane: Lane, guard: TpotGuard, tpot_ns: int) -> None:
        """Launch what the guard lets pass now; runs in the replica's thread."""
        with self._changed:
            guard.measured(tpot_ns)
            launches = self._take_launches(lane)
            self._changed.notify()
        self._launch(launches)

    def _watch_windows(self) -> None:
        """Launch what has waited for its window's length."""
        while True:
            with self._changed:
                if self._closed:
                    return
                launches = self._take_all()
                if not launches:
                    self._changed.wait(self._seconds_to_next_window())
            self._launch(launches)

    def _seconds_to_next_window(self) -> float | None:
        open_lanes = [lane for lane in self._lanes.values() if lane.alive and lane.queue and lane.room]
        if not open_lanes:
            return None
        return max(0.0, min(map(self._deadline_ns, open_lanes)) - time.monotonic_ns()) / 1e9
