"""The replica's process: builds one engine and answers calls over a pipe until told to stop.

Messages, pickled: `(call_id, method, args)` in, `None` to stop; `(call_id, "ok", result)` or
`(call_id, "error", class name in skote.types, sentence)` out, and before it `(call_id, TOKENS, row, token ids)` for
each chunk of a launch whose second argument is true. The first message in is `(spec, setup)`, and its answer
carries the id `READY` and the rows of an engine that batches in flight. Beside them, in plain bytes, which need not
wait for their turn: `CANCEL`, a call's id and a row; `WATCH`, after which `(PACE, "ok", nanoseconds)` tells how fast
tokens come. Shared memory (`skote.runtime.worker_progress`) counts tokens and answers, and says which launches were
begun. The parent's side is `skote.runtime.replica`.

A launch is a call of `generate`. An engine that batches in flight (`skote.types.BatchingEngine`) takes those that come
while others run; it answers each row as it ends, `(call_id, ROW, row, part)`, and calls of other kinds wait until
nothing runs.
"""

from __future__ import annotations

import inspect
import os
import pickle
import pkgutil
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing.connection import Connection
from queue import Empty, SimpleQueue
from typing import Any

from skote import types
from skote.runtime.choices import choices
from skote.runtime.launch_rows import CLOCK, Part, RowRecord
from skote.runtime.own_process import device_is_lost, peak_memory
from skote.runtime.stops import Stopping
from skote.runtime.token_pace import TokenPace
from skote.runtime.worker_desk import Launch, WorkerDesk
from skote.runtime.worker_progress import WorkerProgress
from skote.types import (
    BatchingEngine,
    Emit,
    Engine,
    EngineError,
    EngineSpec,
    FinishReason,
    Request,
    SkoteError,
    StoppingEngine,
    UsageError,
)

PACE = -1
READY = 0
"""The call id of the engine's construction; the parent's calls count from 1."""
LOST_CODE = 74
"""The exit code of a process whose device is lost."""
TOKENS = "tokens"
ROW = "row"
CANCEL = b"cancel "
WATCH = b"watch"


class _CancelledError(Exception):
    """Raised through an engine, out of its emit, where nobody waits for a row of its batch any more."""


class _Inbox:
    """What the parent sends: calls in their order, and rows that are cancelled.

    A thread of its own reads it, so that a cancel, and the parent's death, are seen in the middle of a generation.
    `watched` tells whether the parent wants to know how fast tokens come.
    """

    def __init__(self, connection: Connection) -> None:
        self.watched = False
        self._calls: SimpleQueue[bytes] = SimpleQueue()
        self._held: list[Any] = []  # a call that was looked at, and has to wait
        self._cancelled: dict[int, set[int]] = {}
        self._wake: Callable[[], None] | None = None
        self._waking = threading.Lock()
        threading.Thread(target=self._read, args=(connection,), name="worker-reader", daemon=True).start()

    def receive(self) -> Any:  # noqa: ANN401 - whatever the parent sent
        """The next call, waited for."""
        if self._held:
            return self._held.pop()
        return pickle.loads(self._calls.get())  # noqa: S301 - the parent's own pipe, which no other process holds

    def next_launch(self) -> Launch | None:
        """The next call, where there is one and it asks to generate."""
        if self._held:
            return None
        try:
            call = pickle.loads(self._calls.get_nowait())  # noqa: S301 - as above
        except Empty:
            return None
        if call is None or call[1] != "generate":
            self._held.append(call)
            return None
        return call[0], *call[2]

    def on_arrival(self, wake: Callable[[], None] | None) -> None:
        """Have `wake` called by the reading thread whenever something has come; once this returns, no other is."""
        with self._waking:
            self._wake = wake

    def is_cancelled(self, call_id: int, row: int) -> bool:
        """Whether a row of a call has been cancelled by now."""
        return row in self._cancelled.get(call_id, ())

    def forget(self, call_id: int) -> None:
        """Drop what was noted of a call that has ended."""
        self._cancelled.pop(call_id, None)

    def _read(self, connection: Connection) -> None:
        try:
            while True:
                message = connection.recv_bytes()
                if message.startswith(CANCEL):
                    call_id, row = map(int, message.removeprefix(CANCEL).split())
                    self._cancelled.setdefault(call_id, set()).add(row)
                elif message == WATCH:
                    self.watched = True
                else:
                    self._calls.put(message)
                with self._waking:
                    if self._wake is not None:
                        self._wake()
        except (EOFError, OSError):
            # The worker leads its own session, so this takes the compilers that it may have started along.
            os.killpg(os.getpgrp(), signal.SIGKILL)


def main(connection: Connection, memory: int) -> None:
    """Serve `connection` until a stop message; at its end of file (the parent died) kill the process group at once.

    `memory` is the descriptor of the shared memory.
    """
    inbox, progress = _Inbox(connection), WorkerProgress(memory)
    spec, setup = inbox.receive()
    try:
        engine = _build(spec, setup)
    except Exception as error:  # noqa: BLE001 - whatever a constructor raises has to reach the parent as a sentence
        connection.send((READY, "error", *_explain(error, f"Loading {spec.target}")))
        sys.exit(1)
    batching = engine if isinstance(engine, BatchingEngine) and engine.rows > 1 else None
    stopping = None if isinstance(engine, StoppingEngine) else Stopping(spec.options.get("local_dir"))
    connection.send((READY, "ok", None if batching is None else batching.rows))

    pace = TokenPace(lambda tpot_ns: connection.send((PACE, "ok", tpot_ns)))

    def answer(call_id: int, row: int, part: Part) -> None:
        progress.tick()
        connection.send_bytes(pickle.dumps((call_id, ROW, row, part)))

    def tell(call_id: int, row: int, token_ids: Sequence[int]) -> None:
        connection.send((call_id, TOKENS, row, token_ids))

    while (message := inbox.receive()) is not None:
        call_id, method, args = message
        watch = pace if inbox.watched else None
        if method == "generate" and batching is not None:
            first = (call_id, *args)
            _serve(
                batching,
                WorkerDesk(type(engine).__name__, first, inbox, answer, tell, progress, stopping, watch),
            )
            continue
        try:
            if method == "generate":
                progress.begin(call_id)
                requests, told = args
                tell_row = partial(tell, call_id) if told else None
                cancelled = partial(inbox.is_cancelled, call_id)
                result: object = _launch(engine, requests, cancelled, tell_row, progress.tick, stopping, watch)
            else:
                result = _call(engine, method, args)
            reply = pickle.dumps((call_id, "ok", result))
        except Exception as error:  # noqa: BLE001 - one failed call must not end the process that serves the others
            reply = pickle.dumps((call_id, "error", *_explain(error, f"{type(engine).__name__}.{method}")))
        inbox.forget(call_id)
        progress.tick()
        connection.send_bytes(reply)


def _build(spec: EngineSpec, setup: Callable[[], None] | None) -> Engine:
    if setup is not None:
        setup()
    try:
        engine_class = pkgutil.resolve_name(spec.target)
    except (ImportError, AttributeError, ValueError) as error:
        raise UsageError(f"Engine {spec.target!r} cannot be imported ({error}); check its target.") from error
    try:
        inspect.signature(engine_class).bind(**spec.options)
    except TypeError as error:
        raise UsageError(f"Engine {spec.target!r} does not take these options: {error}.") from error
    engine: Engine = engine_class(**spec.options)
    return engine


def _call(engine: Engine, method: str, args: tuple[Any, ...]) -> object:
    if method == "peak_memory":
        return peak_memory()
    if method == "choices":
        request, ids = args
        return choices(engine.score(request, ids), ids)
    if method == "profile_step" and method not in dir(engine):
        return []  # an engine need not know its kernels
    if method.startswith("_") or method not in dir(engine):
        raise UsageError(f"{type(engine).__name__} has no public method {method!r}.")
    return getattr(engine, method)(*args)


def _launch(
    engine: Engine,
    requests: Sequence[Request],
    is_cancelled: Callable[[int], bool],
    tell: Emit | None,
    tick: Callable[[], None],
    stopping: Stopping | None,
    pace: TokenPace | None,
) -> list[Part]:
    """Run one engine call; an exception becomes the rows' error, beside the tokens that had already come.

    A batch that fails before its first token is run again row by row, so that one request does not fail the others.
    """
    parts = _generate(engine, requests, is_cancelled, tell, tick, stopping, pace)
    if len(parts) > 1 and all(part.error is not None and not part.output_ids for part in parts):
        return [
            part
            for row, request in enumerate(requests)
            for part in _generate(engine, [request], *_of_row(row, is_cancelled, tell), tick, stopping, pace)
        ]
    return parts


def _of_row(
    row: int, is_cancelled: Callable[[int], bool], tell: Emit | None
) -> tuple[Callable[[int], bool], Emit | None]:
    """What a launch of this row alone asks and tells."""
    return lambda _: is_cancelled(row), None if tell is None else lambda _, token_ids: tell(row, token_ids)


def _generate(
    engine: Engine,
    requests: Sequence[Request],
    is_cancelled: Callable[[int], bool],
    tell: Emit | None,
    tick: Callable[[], None],
    stopping: Stopping | None,
    pace: TokenPace | None,
) -> list[Part]:
    name = type(engine).__name__
    records = [
        RowRecord(request, name, None if tell is None else partial(tell, row)) for row, request in enumerate(requests)
    ]
    rows = range(len(records))
    admitted_ns = CLOCK()
    for record in records:
        record.admitted_ns = admitted_ns

    def awaited(row: int) -> bool:
        return not records[row].complete and not is_cancelled(row)

    def emit(row: int, token_ids: Sequence[int]) -> None:
        dropped = is_cancelled(row)
        records[row].emit(token_ids, dropped=dropped)
        tick()
        if pace is not None:
            pace.emitted(records[row], len(token_ids))
        if (dropped or records[row].stopped) and not any(map(awaited, rows)):
            raise _CancelledError

    reasons: Sequence[FinishReason | None] = [None] * len(requests)
    sentence: str | None = None
    try:
        _watch(records, stopping)
        if any(map(awaited, rows)):
            finished = engine.generate(requests, emit)
            if len(finished) != len(requests):
                raise EngineError(f"{name} ended {len(finished)} rows of {len(requests)}.")
            reasons = finished
        else:
            raise _CancelledError
    except _CancelledError:
        reasons = ["length"] * len(requests)  # of those that have all their tokens
        for record in records:
            record.cancelled |= not record.complete
    except Exception as error:  # noqa: BLE001 - the launch fails with a sentence, the worker lives on
        _, sentence = _explain(error, f"{name}.generate")
    tick()
    return [record.part(reason, sentence) for record, reason in zip(records, reasons, strict=True)]


def _watch(records: Sequence[RowRecord], stopping: Stopping | None) -> None:
    if stopping is not None:
        for record in records:
            record.stops = stopping.watch(record.request)


def _serve(engine: BatchingEngine, desk: WorkerDesk) -> None:
    """Let the engine serve the desk; what it leaves unanswered, it has failed on."""
    sentence = f"{type(engine).__name__}.serve ended and had not answered the request."
    try:
        engine.serve(desk)
    except Exception as error:  # noqa: BLE001 - the batch fails with a sentence, the worker lives on
        _, sentence = _explain(error, f"{type(engine).__name__}.serve")
    desk.fail_all(sentence)


def _explain(error: Exception, what: str) -> tuple[str, str]:
    """The class in `skote.types` and the sentence that the parent raises; a trace of the unexpected goes to stderr.

    Where that has cost the process its device, it ends here: it would fail whatever comes, and a new one might not.
    """
    if isinstance(error, SkoteError):
        known = next(base for base in type(error).__mro__ if base.__module__ == types.__name__)
        return known.__name__, str(error)
    traceback.print_exception(error, file=sys.stderr)
    lost = device_is_lost()
    if lost:
        sys.stderr.write("Its CUDA device is lost to this process, which ends.\n")
    sys.stderr.flush()
    if lost:
        os._exit(LOST_CODE)  # an orderly end would wait for the device
    detail = str(error).strip().partition("\n")[0]
    name = type(error).__name__
    return EngineError.__name__, f"{what} failed with {name}: {detail}" if detail else f"{what} failed with {name}."
