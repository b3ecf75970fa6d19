"""E11 and E05: one replica a device, each with a queue and a cap of its own; nothing is lost by a close or a cancel."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import ExitStack

from skote.contracts.check import Figures, Subject
from skote.runtime.dispatch import ReplicaDispatcher
from skote.runtime.replica import Replica
from skote.types import Completion, Emit, EngineSpec, Request, RowEnded

REPLICAS = 2
REQUESTS = 120
QUEUED = 40
LONG = 1000
CAPS = (1, 2, 5)


class Counting:
    """A replica that counts, by itself, how many of its launches are unanswered."""

    def __init__(self, replica: Replica) -> None:
        self._replica = replica
        self._lock = threading.Lock()
        self._running = 0
        self.peak = 0
        self.index, self.device = replica.index, replica.device

    @property
    def death(self) -> str | None:
        """As `Replica.death`."""
        return self._replica.death

    @property
    def rows(self) -> int | None:
        """As `Replica.rows`."""
        return self._replica.rows

    @property
    def kept_tokens(self) -> int:
        """As `Replica.kept_tokens`."""
        return self._replica.kept_tokens

    def generate(
        self, requests: Sequence[Request], hear: Emit | None = None, ended: RowEnded | None = None
    ) -> Future[list[Completion]]:
        """As `Replica.generate`."""
        with self._lock:
            self._running += 1
            self.peak = max(self.peak, self._running)
        future = self._replica.generate(requests, hear, ended)
        future.add_done_callback(self._ended)
        return future

    def cancel(self, launch: Future[list[Completion]], row: int) -> None:
        """As `Replica.cancel`."""
        self._replica.cancel(launch, row)

    def watch_pace(self, heard: Callable[[int], None]) -> None:
        """As `Replica.watch_pace`."""
        self._replica.watch_pace(heard)

    def watch_end(self, heard: Callable[[], None]) -> None:
        """As `Replica.watch_end`."""
        self._replica.watch_end(heard)

    def restart(self) -> None:
        """As `Replica.restart`."""
        self._replica.restart()

    def _ended(self, _: Future[list[Completion]]) -> None:
        with self._lock:
            self._running -= 1


def in_flight(subject: Subject) -> Figures:
    """A burst of 120 requests over two simulated replicas, at caps of 1, 2 and 5 launches.

    `launches_above_cap`: the most by which a replica's launches in flight exceeded the cap. `requests_lost`: without an
    ok answer. `replicas_idle`: that got nothing to do.
    """
    above = lost = idle = 0
    for cap in CAPS:
        with ExitStack() as stack:
            replicas = [
                Counting(stack.enter_context(Replica(_simulated(), index=index, device="cpu", log=subject.log(index))))
                for index in range(REPLICAS)
            ]
            dispatcher = stack.enter_context(ReplicaDispatcher(replicas, max_concurrency_per_device=cap))
            requests = [Request(f"burst-{index}", (1, 2, index + 3), 3) for index in range(REQUESTS)]
            futures = [dispatcher.dispatch(request) for request in requests]
            lost += sum(future.result().status != "ok" for future in futures)
            above = max(above, *(replica.peak - cap for replica in replicas))
            idle += sum(replica.peak == 0 for replica in replicas)
    return {"launches_above_cap": above, "requests_lost": lost, "replicas_idle": idle}


def closing(subject: Subject) -> Figures:
    """Close the dispatcher of a simulated replica on 40 requests that came at once, when the first one is answered.

    `requests_lost`: neither answered nor cancelled, or answered with another number of tokens than asked for.
    `requests_cancelled`: those that the replica had not taken yet.
    """
    with Replica(_simulated(), index=0, device="cpu", log=subject.log(0)) as replica:
        dispatcher = ReplicaDispatcher([replica], max_concurrency_per_device=1)
        futures = [dispatcher.dispatch(Request(f"queued-{index}", (1, 2, 3), 5)) for index in range(QUEUED)]
        futures[0].result()
        dispatcher.close()
        completions = [future.result() for future in futures]
    answered = sum(each.status == "ok" and len(each.output_ids) == 5 for each in completions)
    cancelled = sum(each.status == "cancelled" for each in completions)
    return {"requests_lost": QUEUED - answered - cancelled, "requests_cancelled": cancelled}


def cancelling(subject: Subject) -> Figures:
    """Cancel every fifth of 40 requests that came at once to a simulated replica, the running one among them.

    `requests_lost`: of the others without all their tokens, and of the cancelled ones without an answer.
    `cancelled_too_late`: of those that waited, answered with a token. `running_finished`: the running one, which had
    1,000 tokens to go, went on to its end.
    """
    with (
        Replica(_simulated(), index=0, device="cpu", log=subject.log(0)) as replica,
        ReplicaDispatcher([replica], max_concurrency_per_device=1) as dispatcher,
    ):
        asked = [LONG] + [5] * (QUEUED - 1)
        requests = [Request(f"queued-{index}", (1, 2, 3), tokens) for index, tokens in enumerate(asked)]
        futures = [dispatcher.dispatch(request) for request in requests]
        for future in futures[::5]:
            dispatcher.cancel(future)
        completions = [future.result() for future in futures]
    dropped = completions[::5]
    kept = [each for index, each in enumerate(completions) if index % 5]
    lost = sum(each.status != "ok" or len(each.output_ids) != 5 for each in kept)
    return {
        "requests_lost": lost + sum(each.status != "cancelled" for each in dropped),
        "cancelled_too_late": sum(bool(each.output_ids) for each in dropped[1:]),
        "running_finished": int(len(dropped[0].output_ids) == LONG),
    }


def _simulated() -> EngineSpec:
    return EngineSpec("skote.engines.simulated.SimulatedEngine", {"token_ms": 0.5})
