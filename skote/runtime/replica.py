"""A replica as its parent sees it: one engine in a process of its own, called through futures, and started again."""

from __future__ import annotations

import dataclasses
import itertools
import pickle
import signal
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType
from typing import Any

from skote import types
from skote.runtime.calls import Call, LaunchCall
from skote.runtime.threads import start_thread
from skote.runtime.worker import CANCEL, PACE, READY, ROW, TOKENS, WATCH
from skote.runtime.worker_process import WorkerProcess
from skote.types import Completion, Emit, EngineSpec, ReplicaError, Request, RowEnded, SkoteError, UsageError, is_number

MOST_HANG_S = 1e6
"""A system's poll takes no more than some two million seconds."""
RESTART_S = 1800.0
_TERM_S = 1.0  # from SIGTERM to SIGKILL


def check_hang_s(hang_s: float | None) -> None:
    """Refuse a watch that cannot be kept; None is no watch.

    Raises:
        UsageError: not a number above 0, or beyond `MOST_HANG_S`; the sentence begins with the name.
    """
    if hang_s is not None and not (is_number(hang_s) and 0 < hang_s <= MOST_HANG_S):
        raise UsageError(
            f"hang_s must lie above 0 and be at most {MOST_HANG_S:g} seconds, or null for no limit, got {hang_s!r}."
        )


class Replica:
    """One engine in its own process, which ends with `close`, with this process, or by an accident of its own.

    `setup` (a module-level function, or a partial of one) runs in the process before the engine is built. The
    process writes its stdout and stderr to the end of `log`, or to this process's stderr where `log` is None. With
    `hide_ids` the engine sees its requests counted, whatever their ids are; completions have the requests' own. A
    launch that brings neither a token nor an answer for `hang_s` seconds ends the process; None waits for ever.

    Raises:
        UsageError: `hang_s` is not above 0, or beyond `MOST_HANG_S`.
        ReplicaError: the process cannot be started.
        RecordError: `log` cannot be written.
    """

    def __init__(
        self,
        spec: EngineSpec,
        *,
        index: int,
        device: str,
        setup: Callable[[], None] | None = None,
        log: Path | None = None,
        hide_ids: bool = False,
        hang_s: float | None = None,
    ) -> None:
        check_hang_s(hang_s)
        self.index = index
        self.device = device
        self._name = f"Replica {index} ({device})"
        self._log = log
        self._hang_s = hang_s
        self._counted = map(str, itertools.count()) if hide_ids else None
        self._first = pickle.dumps((spec, setup))
        self._lock = threading.Lock()
        self._sending = threading.Lock()  # held while a full pipe may block; the reader, who kills, takes it last
        self._closing = False
        self._heard_pace: Callable[[int], None] | None = None
        self._heard_end: Callable[[], None] | None = None
        self._next_id = READY + 1
        self._open()

    def _open(self) -> None:
        """Start a process; the first, or in place of one that has ended."""
        self._process = WorkerProcess(self._name, self._log, self._first)
        self._death: str | None = None
        self._hangs = False
        self._rows: int | None = None
        if self._heard_pace is not None:
            self._watch_pace()
        self._ready = Call()
        self._calls: dict[int, Call] = {READY: self._ready}
        try:
            self._reader = start_thread(f"replica-{self.index}", self._read)
        except ReplicaError as error:
            self._process.reap()
            self._death = str(error)
            raise

    def __enter__(self) -> Replica:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(grace_s=5.0 if error is None else 0.0)

    @property
    def alive(self) -> bool:
        """Whether the process has not ended, as far as this side knows."""
        return self._death is None

    @property
    def death(self) -> str | None:
        """Why the process ended, in a sentence; None while it is alive."""
        return self._death

    @property
    def rows(self) -> int | None:
        """Requests that the engine advances together, joining and leaving between two steps.

        None where its launches take their turn, and before it is built.
        """
        return self._rows

    @property
    def kept_tokens(self) -> int:
        """Tokens of prompts that the engine has in store for requests that begin with them (`engine.prefix_cache`)."""
        with self._lock:  # under which the memory is given back
            return self._process.progress.kept_tokens if self._death is None else 0

    @property
    def pid(self) -> int:
        """The process's id."""
        return self._process.pid

    def wait_ready(self, timeout: float | None = None) -> None:
        """Block until the engine is built, at most `timeout` seconds; a failure ends the process.

        Raises:
            SkoteError: what the engine's constructor raised, of the same class and with the same sentence.
            ReplicaError: the process ended first, or the time is over.
        """
        try:
            self._ready.future.result(timeout)
        except TimeoutError:
            self._end(grace_s=0.0)
            raise ReplicaError(f"{self._name} was not ready after {timeout:g} s.") from None
        except SkoteError:
            self._end()
            raise

    def restart(self, timeout: float | None = RESTART_S) -> None:
        """Start the process of a replica that has ended again, and wait as `wait_ready` does.

        Raises:
            SkoteError: as `wait_ready`.
            ReplicaError: it has not ended, or was closed; or as the constructor.
        """
        with self._lock:
            if self._death is None or self._closing:
                raise ReplicaError(f"{self._name} cannot be started again: it {self._death or 'has not ended'}")
            try:
                self._open()
            except SkoteError as error:
                self._death = self._as_dead_as_before(error)
                raise
        try:
            self.wait_ready(timeout)
        except SkoteError as error:
            with self._lock:
                self._death = self._as_dead_as_before(error)
            raise

    def _as_dead_as_before(self, error: SkoteError) -> str:
        return f"{self._name} could not be started again: {error}"

    def generate(
        self, requests: Sequence[Request], hear: Emit | None = None, ended: RowEnded | None = None
    ) -> Future[list[Completion]]:
        """Hand over `requests` as one launch; launches queue in the process and are answered in order, or as they end
        where the engine batches in flight.

        The future never raises: failures are completions with status "error", or "cancelled" after `close`; those that
        the process ended without having begun are `untouched`. `hear`, and `ended` with each row that ends
        before the last one, are called in the replica's thread, which they must not hold up.
        """
        launch = LaunchCall(tuple(requests), self.index, self.device, hear, ended)
        self._send(launch, "generate", (tuple(map(self._as_seen, launch.requests)), hear is not None))
        return launch.future

    def cancel(self, launch: Future[list[Completion]], row: int) -> None:
        """Drop a row of a launch that `generate` gave; it is left within a step where the engine batches in flight, or
        no other row is waited for.

        Its completion has status "cancelled" and the tokens until then, or "ok" where it had them all.
        """
        with self._sending:
            with self._lock:
                call_id = next((each for each, call in self._calls.items() if call.future is launch), None)
            if call_id is not None:
                self._write(self._process, CANCEL + f"{call_id} {row}".encode())

    def watch_pace(self, heard: Callable[[int], None]) -> None:
        """Call `heard`, in the replica's thread, with the mean nanoseconds between two tokens of a request.

        It is called while requests run, 50 times a second at most, and after a restart too.
        """
        with self._sending, self._lock:
            self._heard_pace = heard
            if self._death is None:
                self._watch_pace()

    def _watch_pace(self) -> None:
        self._write(self._process, WATCH)

    def watch_end(self, heard: Callable[[], None]) -> None:
        """Call `heard`, in the replica's thread, each time the process has ended and what it was asked is answered.

        Not where it was closed.
        """
        self._heard_end = heard

    def call(self, method: str, *args: object) -> Future[Any]:
        """Call a public method of the engine, or one of the worker's own: `peak_memory` (a dict of bytes) and `choices`
        (with `score`'s arguments, what its logits say of the tokens, as `skote.runtime.choices`).

        The future raises the `SkoteError` that the engine raised, `EngineError` for any other exception, or
        `ReplicaError` where the process ended.
        """
        call = Call()
        self._send(call, method, tuple(self._as_seen(each) if isinstance(each, Request) else each for each in args))
        return call.future

    def stop(self) -> None:
        """Ask the process to stop once it has answered what it was given; returns at once, `close` waits."""
        with self._lock:
            self._closing = True
        self._ask_to_stop()

    def close(self, grace_s: float = 5.0) -> None:
        """`stop` the process, terminate it after `grace_s` seconds, then kill it; returns when it is gone."""
        with self._lock:
            self._closing = True
        self._end(grace_s)

    def _end(self, grace_s: float = 5.0) -> None:
        self._ask_to_stop()
        with self._lock:
            process, reader = self._process, self._reader
        reader.join(grace_s)
        process.signal(signal.SIGTERM)
        reader.join(_TERM_S)
        process.signal(signal.SIGKILL)
        reader.join()

    def _ask_to_stop(self) -> None:
        with self._lock:
            process = self._process
        if self._sending.acquire(blocking=False):  # else a full pipe holds it, and no message would be read
            try:
                self._write(process, pickle.dumps(None))
            finally:
                self._sending.release()

    def _as_seen(self, request: Request) -> Request:
        return request if self._counted is None else dataclasses.replace(request, request_id=next(self._counted))

    def _send(self, call: Call, method: str, args: tuple[object, ...]) -> None:
        with self._sending:
            call_id, self._next_id = self._next_id, self._next_id + 1
            try:
                message = pickle.dumps((call_id, method, args))
            except (pickle.PicklingError, TypeError, AttributeError) as error:
                call.fail(UsageError(f"{self._name} cannot be sent what {method} was given: {error}."))
                return
            with self._lock:
                death, process = self._death, self._process
                if death is None:  # and not before: a call that was never sent would look like one that hangs
                    self._calls[call_id] = call
            if death is None:
                self._write(process, message)
                return
        self._lose(call, death, begun=False)

    def _write(self, process: WorkerProcess, message: bytes) -> None:
        """Send `message`; the process ends where it reads nothing of it for `hang_s`, whoever waits here meanwhile."""
        try:
            process.connection.send_bytes(message)
        except BlockingIOError:
            self._hangs = True
            process.signal(signal.SIGKILL)
        except OSError:
            pass  # the reader meets the same end, and answers every call

    def _read(self) -> None:
        try:
            while True:
                call_id, outcome, *content = self._receive()
                if call_id == PACE:
                    if self._heard_pace is not None:
                        self._heard_pace(content[0])
                    continue
                if outcome == TOKENS:
                    self._calls[call_id].hear(*content)
                    continue
                if outcome == ROW:
                    call = self._calls[call_id]
                    if call.rows_left == 1:
                        del self._calls[call_id]
                    call.end_row(*content)
                    continue
                call = self._calls.pop(call_id)
                if outcome == "ok":
                    if call is self._ready:
                        self._rows = content[0]
                        if self._hang_s is not None:  # a process that is still loading may take its time
                            self._process.limit_writes(self._hang_s)
                    call.resolve(content[0])
                else:
                    name, sentence = content
                    call.fail(vars(types)[name](sentence))
        except (EOFError, OSError):
            pass
        finally:
            self._bury()

    def _receive(self) -> Any:  # noqa: ANN401 - whatever the engine's method gave
        """The next message, waited for; a launch that makes no progress meanwhile ends the process."""
        process, seen = self._process, -1
        while not process.connection.poll(self._hang_s):
            progress = process.progress.ticks
            with self._lock:
                launched = isinstance(next(iter(self._calls.values()), None), LaunchCall)
            if launched and progress == seen:
                self._hangs = True
                process.signal(signal.SIGKILL)
            seen = progress if launched else -1
        return process.connection.recv()

    def _bury(self) -> None:
        """End what is left of the process's group, note why it ended, and answer everything that still waits."""
        self._process.signal(signal.SIGKILL)  # so that whoever still writes to it stops
        with self._sending, self._lock:  # nobody writes to the connection while it is closed
            begun = self._process.progress.begun
            death = self._death = self._describe_end(self._process.reap())
            calls = list(self._calls.items())
            self._calls.clear()
        for call_id, call in calls:  # the first one's callback may start the process again
            self._lose(call, death, begun=call_id <= begun)
        if self._heard_end is not None and not self._closing:
            self._heard_end()

    def _lose(self, call: Call, sentence: str, *, begun: bool) -> None:
        call.lose(ReplicaError(sentence), "cancelled" if self._closing else "error", begun=begun)

    def _describe_end(self, end: str) -> str:
        if self._closing:
            return f"{self._name} was closed."
        if self._hangs:
            return f"{self._name} was ended: its engine gave no token for {self._hang_s:g} s (hang_s)."
        return end
