"""What the router adds at 64 streams, and whether a long queue slows it: `python benchmarks/router_overhead.py [N]`.

N requests a figure (2,000). Of a request: a dispatcher over a replica in this process that answers at once, 64 in
flight, so that neither pipe nor engine counts. Of a token: launches of 64 rows through dispatcher, pipe and stamps,
with an engine that does nothing, less the same engine called directly. With 10,000 waiting: CPU time of an admission
over that with none, and of a cancel. Exits with 1 beyond a limit.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from queue import SimpleQueue

from skote.engines.simulated import SimulatedEngine
from skote.runtime.dispatch import ReplicaDispatcher
from skote.runtime.replica import Replica
from skote.types import Completion, Emit, EngineSpec, Request, RowEnded

STREAMS = 64
TOKENS = 65
WAITING = 10_000
PROMPT = tuple(range(1, 129))
LIMITS = {"us_per_request": 50.0, "us_per_token": 20.0, "admission_ratio": 2.0, "us_per_cancel": 50.0}
ROUNDS = 5
"""Each figure is the best of so many: what the code takes, not what else the machine does."""


class Instant:
    """A replica in this process whose launches are answered by a thread of its own; `idle` ones are not answered."""

    index, device, death, rows, kept_tokens = 0, "none", None, None, 0

    def __init__(self, *, idle: bool = False) -> None:
        self._launches: SimpleQueue[tuple[Sequence[Request], Future[list[Completion]]]] = SimpleQueue()
        self._idle = idle
        threading.Thread(target=self._answer, daemon=True).start()

    def generate(
        self, requests: Sequence[Request], hear: Emit | None = None, ended: RowEnded | None = None
    ) -> Future[list[Completion]]:
        """As `Replica.generate`."""
        del hear, ended  # its launches are answered whole
        future: Future[list[Completion]] = Future()
        if not self._idle:
            self._launches.put((requests, future))
        return future

    def cancel(self, launch: Future[list[Completion]], row: int) -> None:
        """As `Replica.cancel`; it is too late."""

    def watch_pace(self, heard: Callable[[int], None]) -> None:
        """As `Replica.watch_pace`; it has none."""

    def watch_end(self, heard: Callable[[], None]) -> None:
        """As `Replica.watch_end`; it never does."""

    def restart(self) -> None:
        """As `Replica.restart`; it never ends."""

    def _answer(self) -> None:
        while True:
            requests, future = self._launches.get()
            future.set_result([Completion(each.request_id, 1, (), (), 0, None, 0, "ok") for each in requests])


def us_per_request(count: int) -> float:
    """Wall time of a request that needs nothing, `STREAMS` in flight: dispatched, answered, handed back, waited for."""
    requests = [Request(str(number), PROMPT, 1) for number in range(count)]
    with ReplicaDispatcher([Instant()], max_concurrency_per_device=STREAMS) as dispatcher:
        started = time.perf_counter()
        running = deque(dispatcher.dispatch(each) for each in requests[:STREAMS])
        for each in requests[STREAMS:]:
            running.popleft().result()
            running.append(dispatcher.dispatch(each))
        for future in running:
            future.result()
        return (time.perf_counter() - started) / count * 1e6


def us_per_token(dispatcher: ReplicaDispatcher) -> float:
    """What a token takes beyond the first, in launches of `STREAMS` rows, less the engine's own time."""
    return (_row_us(dispatcher, TOKENS) - _row_us(dispatcher, 1) - _engine_us(TOKENS) + _engine_us(1)) / (TOKENS - 1)


def _row_us(dispatcher: ReplicaDispatcher, tokens: int) -> float:
    requests = [Request(str(row), PROMPT, tokens, ignore_eos=True) for row in range(STREAMS)]
    started = time.perf_counter()
    for future in [dispatcher.dispatch(each) for each in requests]:
        future.result()
    return (time.perf_counter() - started) / STREAMS * 1e6


def _engine_us(tokens: int) -> float:
    requests = [Request(str(row), PROMPT, tokens, ignore_eos=True) for row in range(STREAMS)]
    engine = SimulatedEngine()
    started = time.perf_counter()
    engine.generate(requests, lambda *_: None)
    return (time.perf_counter() - started) / STREAMS * 1e6


def queue_costs(count: int) -> tuple[float, float]:
    """An admission with `WAITING` requests before it over one with none, and the us of a cancel among them."""
    with ReplicaDispatcher([Instant(idle=True)]) as dispatcher:
        alone, _ = _admit(dispatcher, count)
        _admit(dispatcher, WAITING)
        behind, futures = _admit(dispatcher, count)
        dropped = futures[::20]  # 5 %
        started = time.thread_time()
        for future in dropped:
            dispatcher.cancel(future)
        return behind / alone, (time.thread_time() - started) / len(dropped) * 1e6


def _admit(dispatcher: ReplicaDispatcher, count: int) -> tuple[float, list[Future[Completion]]]:
    requests = [Request(str(number), PROMPT, 1) for number in range(count)]
    started = time.thread_time()
    futures = [dispatcher.dispatch(each) for each in requests]
    return time.thread_time() - started, futures


def main() -> None:
    """Measure, print each figure with its limit, and judge them."""
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 2000
    figures = {"us_per_request": min(us_per_request(count) for _ in range(ROUNDS))}
    spec = EngineSpec("skote.engines.simulated.SimulatedEngine")
    with (
        Replica(spec, index=0, device="cpu") as replica,
        ReplicaDispatcher([replica], microbatch_window_ms=1e6, microbatch_max=STREAMS) as dispatcher,
    ):
        replica.wait_ready(60.0)
        figures["us_per_token"] = min(us_per_token(dispatcher) for _ in range(ROUNDS))
    costs = [queue_costs(count) for _ in range(ROUNDS)]
    figures["admission_ratio"] = min(ratio for ratio, _ in costs)
    figures["us_per_cancel"] = min(us for _, us in costs)
    for name, figure in figures.items():
        print(f"{name} {figure:.2f} (limit {LIMITS[name]:g})")
    sys.exit(0 if all(figure <= LIMITS[name] for name, figure in figures.items()) else 1)


if __name__ == "__main__":
    main()
