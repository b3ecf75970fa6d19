"""A replica that lives in a Ray actor, on whatever machine Ray has found: called as `skote.runtime.replica.Replica`."""

from __future__ import annotations

import dataclasses
import itertools
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType
from typing import Any

from skote.runtime.affinity import Cores
from skote.runtime.ray_cluster import RayCluster, import_ray
from skote.runtime.remote_clock import Exchange, RemoteClock, clock_id
from skote.runtime.replica import RESTART_S, check_hang_s
from skote.runtime.replica_host import Answer, Hosted, Hosting, ReplicaHost
from skote.runtime.threads import start_thread
from skote.types import Chunk, Completion, Emit, EngineError, EngineSpec, ReplicaError, Request, RowEnded, SkoteError

PINGS = 16
TRIES = 3
"""Of a restart: Ray may put an actor on the very machine that was lost, as long as it has not noticed."""
_CLOSE_S = 10.0  # beyond its grace, for the way there and back


@dataclass(slots=True, eq=False)
class _Life:
    """An actor from its start to its end."""

    actor: Any
    ready: Future[Hosted]
    death: str | None = None
    lost: bool = False  # with its machine, or by an accident of Ray's
    clock: RemoteClock = field(default_factory=lambda: RemoteClock(same=False))
    kept_tokens: int = 0
    numbers: Iterator[int] = field(default_factory=itertools.count)  # of launches


@dataclass(frozen=True, slots=True, eq=False)
class _Asked:
    """What was asked of an actor, and what is done with its answer, or with the error in its place."""

    life: _Life
    resolve: Callable[[Any], None]
    fail: Callable[[SkoteError], None]


class RayReplica:
    """One engine in a process beside a Ray actor, in the bundle `index` of `cluster`.

    Arguments and errors as those of `Replica`, but for `setup`, which gets the cores that are near the device there,
    and `log`, which is written only where the actor's machine is this one. Stamps of another machine are brought to
    this machine's clock (`skote.runtime.remote_clock`). Close it before the cluster.
    """

    def __init__(
        self,
        cluster: RayCluster,
        spec: EngineSpec,
        *,
        index: int,
        device: str,
        setup: Callable[[Cores | None], None] | None = None,
        log: Path | None = None,
        hide_ids: bool = False,
        hang_s: float | None = None,
    ) -> None:
        check_hang_s(hang_s)
        self.index = index
        self.device = device
        self._name = f"Replica {index} ({device})"
        self._ray = import_ray()
        self._new_actor = cluster.actors(index, ReplicaHost, list(sys.path))
        log = None if log is None else log.absolute()
        self._hosting = Hosting(spec, index, device, setup, log, clock_id(), hide_ids, hang_s)
        self._lock = threading.RLock()
        self._closing = False
        self._pending = 0
        self._launches: dict[Future[list[Completion]], tuple[_Life, int]] = {}
        self._heard_pace: Callable[[int], None] | None = None
        self._heard_end: Callable[[], None] | None = None
        self._answers: SimpleQueue[tuple[_Asked, Future[Any]] | None] = SimpleQueue()
        self._reader = start_thread(f"replica-{index}", self._read)
        self._open()

    def _open(self) -> None:
        """Start an actor; what `close` has to end is known to it, since both hold the lock."""

        def start(hosted: Hosted) -> None:
            life.clock = RemoteClock(same=hosted.clock is not None and hosted.clock == self._hosting.clock)
            self._ask(life, life.actor.ended.remote(), note, lambda error: note(str(error)))
            life.ready.set_result(hosted)
            if self._heard_pace is not None:
                self._hear_pace(life, self._heard_pace)

        with self._lock:
            if self._closing:
                raise ReplicaError(f"{self._name} was closed.")
            life = self._life = _Life(self._new_actor(), Future())
            note = partial(self._note_death, life)
            self._ask(life, life.actor.open.remote(self._hosting), start, life.ready.set_exception)

    def __enter__(self) -> RayReplica:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(grace_s=5.0 if error is None else 0.0)

    @property
    def alive(self) -> bool:
        """Whether it has not ended, as far as this side knows."""
        return self._life.death is None

    @property
    def death(self) -> str | None:
        """Why the engine's process or its actor ended, in a sentence; None while both are alive."""
        return self._life.death

    @property
    def rows(self) -> int | None:
        """As `Replica.rows`."""
        ready = self._life.ready
        return ready.result().rows if ready.done() and ready.exception() is None else None

    @property
    def kept_tokens(self) -> int:
        """As `Replica.kept_tokens`, when it last answered."""
        return self._life.kept_tokens

    @property
    def pid(self) -> int:
        """The engine's process, on its own machine; waits until that is known."""
        return self._life.ready.result().pid

    @property
    def here(self) -> bool:
        """Whether its machine is this one."""
        return self._life.clock.same

    @property
    def placement(self) -> dict[str, Any]:
        """Where it lives, and what its stamps are worth, as JSON values; once it is ready.

        `clock` is null on this machine; otherwise nanoseconds by which the other clock is ahead, and their uncertainty,
        which every time from a dispatch to a token has, and no time between two tokens.
        """
        clock, hosted = self._life.clock, self._life.ready.result()
        offset = {"offset_ns": clock.offset_ns, "uncertainty_ns": clock.uncertainty_ns}
        cores = None if hosted.cores is None else list(hosted.cores)
        return {"cores": cores, "node": hosted.node, "clock": None if clock.same else offset}

    def wait_ready(self, timeout: float | None = None) -> None:
        """As `Replica.wait_ready`; the time until Ray has placed the actor is part of `timeout`."""
        life = self._life
        try:
            life.ready.result(timeout)
            self._compare_clocks(life)
        except TimeoutError:
            sentence = f"{self._name} was not ready after {timeout:g} s."
            self._note_death(life, sentence)
            self._ray.kill(life.actor)
            raise ReplicaError(sentence) from None
        except SkoteError as error:
            self._note_death(life, str(error))
            self._ray.kill(life.actor)
            raise

    def restart(self, timeout: float | None = RESTART_S) -> None:
        """As `Replica.restart`, where Ray finds room for it."""
        with self._lock:
            if self._life.death is None or self._closing:
                raise ReplicaError(f"{self._name} cannot be started again: it {self._life.death or 'has not ended'}")
        self._ray.kill(self._life.actor)  # where the engine's process ended alone
        for tries_left in reversed(range(TRIES)):
            self._open()
            try:
                self.wait_ready(timeout)
                return
            except SkoteError as error:
                if not self._life.lost or not tries_left:
                    self._life.death = f"{self._name} could not be started again: {error}"
                    raise

    def generate(
        self, requests: Sequence[Request], hear: Emit | None = None, ended: RowEnded | None = None
    ) -> Future[list[Completion]]:
        """As `Replica.generate`; `hear` is told all tokens of a row with its answer, and rows are answered together."""
        del ended
        requests = tuple(requests)
        future: Future[list[Completion]] = Future()
        future.set_running_or_notify_cancel()
        sent_ns = time.monotonic_ns()

        def resolve(answer: Answer) -> None:
            got_ns = time.monotonic_ns()
            life.clock.note(Exchange(sent_ns, answer.received_ns, answer.replied_ns, got_ns))
            life.kept_tokens = answer.kept_tokens
            if answer.death is not None:
                self._note_death(life, answer.death)
            del self._launches[future]
            for row, completion in enumerate(answer.completions):
                if hear is not None and completion.output_ids:
                    hear(row, completion.output_ids)
            future.set_result([_by_this_clock(each, life.clock, sent_ns, got_ns) for each in answer.completions])

        def fail(error: SkoteError, *, untouched: bool = False) -> None:
            self._launches.pop(future, None)
            future.set_result([self._lost(request, sent_ns, str(error), untouched=untouched) for request in requests])

        with self._lock:  # a reader that ends with its replica's death must not miss what is asked
            life = self._life
            death = life.death
            if death is None:
                number = next(life.numbers)
                self._launches[future] = (life, number)
                self._ask(life, life.actor.generate.remote(number, requests), resolve, fail)
        if death is not None:
            fail(ReplicaError(death), untouched=True)
        return future

    def cancel(self, launch: Future[list[Completion]], row: int) -> None:
        """As `Replica.cancel`, after the way to the other machine."""
        life, number = self._launches.get(launch, (None, 0))
        if life is not None:
            life.actor.cancel.remote(number, row)

    def watch_pace(self, heard: Callable[[int], None]) -> None:
        """As `Replica.watch_pace`, each time after a way there and back."""
        with self._lock:
            self._heard_pace, life = heard, self._life
            if life.ready.done() and life.death is None:
                self._hear_pace(life, heard)

    def watch_end(self, heard: Callable[[], None]) -> None:
        """As `Replica.watch_end`, before all that it was asked is answered."""
        self._heard_end = heard

    def _hear_pace(self, life: _Life, heard: Callable[[int], None]) -> None:
        def hear(tpot_ns: int) -> None:
            heard(tpot_ns)
            self._hear_pace(life, heard)

        self._ask(life, life.actor.pace.remote(), hear, lambda _: None)

    def call(self, method: str, *args: object) -> Future[Any]:
        """As `Replica.call`."""
        future: Future[Any] = Future()
        future.set_running_or_notify_cancel()
        with self._lock:
            life = self._life
            death = life.death
            if death is None:
                self._ask(life, life.actor.call.remote(method, args), future.set_result, future.set_exception)
        if death is not None:
            future.set_exception(ReplicaError(death))
        return future

    def stop(self) -> None:
        """As `Replica.stop`."""
        with self._lock:
            self._closing = True
        if self._life.death is None and self._life.ready.done():
            self._life.actor.stop.remote()

    def close(self, grace_s: float = 5.0) -> None:
        """As `Replica.close`; the actor goes, too."""
        with self._lock:
            if self._closing and not self._reader.is_alive():
                return
            self._closing = True
            life = self._life
        if life.death is None and life.ready.done():
            self._ray.wait([life.actor.close.remote(grace_s)], timeout=grace_s + _CLOSE_S)
        self._ray.kill(life.actor)
        self._note_death(life, f"{self._name} was closed.")
        self._answers.put(None)
        self._reader.join()

    def _ask(
        self,
        life: _Life,
        ref: Any,  # noqa: ANN401 - Ray's
        resolve: Callable[[Any], None],
        fail: Callable[[SkoteError], None],
    ) -> None:
        """Have the answer that `ref` stands for handed to `resolve`, or its error to `fail`, in the reader's thread."""
        with self._lock:
            self._pending += 1
        asked = _Asked(life, resolve, fail)
        ref.future().add_done_callback(lambda done: self._answers.put((asked, done)))

    def _read(self) -> None:
        while True:
            answer = self._answers.get()
            if answer is not None:
                self._settle(*answer)
            with self._lock:
                self._pending -= answer is not None
                if self._closing and self._life.death is not None and not self._pending:
                    return

    def _settle(self, asked: _Asked, done: Future[Any]) -> None:
        error = done.exception()
        if error is None:
            asked.resolve(done.result())
            return
        if isinstance(error, self._ray.exceptions.RayTaskError):
            cause = error.cause
            asked.fail(cause if isinstance(cause, SkoteError) else EngineError(f"{self._name}: {_first_line(cause)}"))
        else:  # the actor or its machine is gone, or out of reach
            self._ray.kill(asked.life.actor)
            asked.life.lost = True
            self._note_death(asked.life, f"{self._name} was lost with its Ray actor: {_first_line(error)}")
            asked.fail(ReplicaError(str(asked.life.death)))

    def _note_death(self, life: _Life, sentence: str) -> None:
        with self._lock:
            news = life.death is None
            if news:
                life.death = f"{self._name} was closed." if self._closing else sentence
        if news and not self._closing and self._heard_end is not None:
            self._heard_end()

    def _compare_clocks(self, life: _Life) -> None:
        if life.clock.same:
            return
        for _ in range(PINGS):
            sent_ns = time.monotonic_ns()
            received_ns, replied_ns = self._ray.get(life.actor.ping.remote())
            life.clock.note(Exchange(sent_ns, received_ns, replied_ns, time.monotonic_ns()))

    def _lost(self, request: Request, sent_ns: int, error: str, *, untouched: bool) -> Completion:
        return Completion(
            request.request_id,
            len(request.input_ids),
            (),
            (),
            sent_ns,
            None,
            time.monotonic_ns(),
            "cancelled" if self._closing else "error",
            error=error,
            replica=self.index,
            device=self.device,
            untouched=untouched and not self._closing,
        )


def _by_this_clock(completion: Completion, clock: RemoteClock, sent_ns: int, got_ns: int) -> Completion:
    """A completion with stamps of this machine, where the host's were of its own."""
    admitted = completion.admitted_ns
    return dataclasses.replace(
        completion,
        dispatched_ns=sent_ns,
        admitted_ns=None if admitted is None else clock.here(admitted),
        chunks=tuple(Chunk(clock.here(each.t_ns), each.n_tokens) for each in completion.chunks),
        end_ns=got_ns,
    )


def _first_line(error: BaseException) -> str:
    line = str(error).strip().partition("\n")[0].rstrip(".:")
    return f"{line or type(error).__name__}."
