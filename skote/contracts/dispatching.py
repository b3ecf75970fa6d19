"""E11: one replica a device, each with a queue of its own and a cap on what is in flight."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from pathlib import Path

from skote.contracts.check import Figures, Subject
from skote.runtime.dispatch import ReplicaDispatcher
from skote.runtime.replica import Replica
from skote.types import Completion, EngineSpec, Request

REPLICAS = 2
REQUESTS = 120
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

    def generate(self, requests: Sequence[Request]) -> Future[list[Completion]]:
        """As `Replica.generate`."""
        with self._lock:
            self._running += 1
            self.peak = max(self.peak, self._running)
        future = self._replica.generate(requests)
        future.add_done_callback(self._ended)
        return future

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
                Counting(
                    stack.enter_context(Replica(_simulated(), index=index, device="cpu", log=_log(subject, index)))
                )
                for index in range(REPLICAS)
            ]
            dispatcher = stack.enter_context(ReplicaDispatcher(replicas, max_concurrency_per_device=cap))
            requests = [Request(f"burst-{index}", (1, 2, index + 3), 3) for index in range(REQUESTS)]
            futures = [dispatcher.dispatch(request) for request in requests]
            lost += sum(future.result().status != "ok" for future in futures)
            above = max(above, *(replica.peak - cap for replica in replicas))
            idle += sum(replica.peak == 0 for replica in replicas)
    return {"launches_above_cap": above, "requests_lost": lost, "replicas_idle": idle}


def _simulated() -> EngineSpec:
    return EngineSpec("skote.engines.simulated.SimulatedEngine", {"token_ms": 0.5})


def _log(subject: Subject, index: int) -> Path:
    return subject.directory / f"replica-{index}.log"
