"""The replica's process: builds one engine and answers calls over a pipe until told to stop.

Messages, pickled: `(call_id, method, args)` in, `None` to stop; `(call_id, "ok", result)` or
`(call_id, "error", class name in skote.types, sentence)` out. The first message in is `(spec, setup)`, and its answer
carries the id `READY`. Beside them `CANCEL`, a call's id and a row, in plain bytes: it need not wait for its turn. A
number in shared memory counts tokens and answers, so that the parent can tell a busy engine from one that hangs. The
parent's side is `skote.runtime.replica`.
"""

from __future__ import annotations

import inspect
import mmap
import os
import pickle
import pkgutil
import resource
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing.connection import Connection
from operator import index
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

from skote import types
from skote.types import Engine, EngineError, EngineSpec, FinishReason, Request, SkoteError, UsageError

_CLOCK = time.monotonic_ns  # bound before an engine's code is there to put another in its place

READY = 0
"""The call id of the engine's construction; the parent's calls count from 1."""
CANCEL = b"cancel "
PROGRESS_BYTES = 8
"""Size of the shared memory: one unsigned number, as the machine stores it."""


class Part(NamedTuple):
    """What the worker knows of one row of a launch; plain integers, since a pickled `Chunk` costs microseconds."""

    output_ids: tuple[int, ...]
    chunk_ns: tuple[int, ...]
    chunk_tokens: tuple[int, ...]
    admitted_ns: int
    finish_reason: FinishReason | None
    error: str | None
    cancelled: bool


class _CancelledError(Exception):
    """Raised through an engine, out of its emit, where nobody waits for a row of its batch any more."""


class _Inbox:
    """What the parent sends: calls in their order, and rows that are cancelled.

    A thread of its own reads it, so that a cancel, and the parent's death, are seen in the middle of a generation.
    """

    def __init__(self, connection: Connection) -> None:
        self._calls: SimpleQueue[bytes] = SimpleQueue()
        self._cancelled: dict[int, set[int]] = {}
        threading.Thread(target=self._read, args=(connection,), name="worker-reader", daemon=True).start()

    def receive(self) -> Any:  # noqa: ANN401 - whatever the parent sent
        """The next call, waited for."""
        return pickle.loads(self._calls.get())  # noqa: S301 - the parent's own pipe, which no other process holds

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
                else:
                    self._calls.put(message)
        except (EOFError, OSError):
            # The worker leads its own session, so this takes the compilers that it may have started along.
            os.killpg(os.getpgrp(), signal.SIGKILL)


class _Progress:
    """The number that the parent watches, in the file `fd`."""

    def __init__(self, fd: int) -> None:
        self._count = memoryview(mmap.mmap(fd, PROGRESS_BYTES)).cast("Q")

    def tick(self) -> None:
        """Tell the parent that something was done."""
        self._count[0] += 1


def main(connection: Connection, memory: int) -> None:
    """Serve `connection` until a stop message; at its end of file (the parent died) kill the process group at once.

    `memory` is the descriptor of the shared memory.
    """
    inbox, progress = _Inbox(connection), _Progress(memory)
    spec, setup = inbox.receive()
    try:
        engine = _build(spec, setup)
    except Exception as error:  # noqa: BLE001 - whatever a constructor raises has to reach the parent as a sentence
        connection.send((READY, "error", *_explain(error, f"Loading {spec.target}")))
        sys.exit(1)
    connection.send((READY, "ok", None))
    while (message := inbox.receive()) is not None:
        call_id, method, args = message
        try:
            if method == "generate":
                result: object = _launch(engine, args[0], partial(inbox.is_cancelled, call_id), progress.tick)
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
        return _peak_memory()
    if method == "profile_step" and method not in dir(engine):
        return []  # an engine need not know its kernels
    if method.startswith("_") or method not in dir(engine):
        raise UsageError(f"{type(engine).__name__} has no public method {method!r}.")
    return getattr(engine, method)(*args)


def _launch(
    engine: Engine, requests: Sequence[Request], is_cancelled: Callable[[int], bool], tick: Callable[[], None]
) -> list[Part]:
    """Run one engine call; an exception becomes the rows' error, beside the tokens that had already come.

    A batch that fails before its first token is run again row by row, so that one request does not fail the others.
    """
    parts = _generate(engine, requests, is_cancelled, tick)
    if len(parts) > 1 and all(part.error is not None and not part.output_ids for part in parts):
        return [
            part
            for row, request in enumerate(requests)
            for part in _generate(engine, [request], lambda _, row=row: is_cancelled(row), tick)  # type: ignore[misc]
        ]
    return parts


def _generate(
    engine: Engine, requests: Sequence[Request], is_cancelled: Callable[[int], bool], tick: Callable[[], None]
) -> list[Part]:
    clock = _CLOCK
    admitted_ns = clock()
    rows = range(len(requests))
    output_ids: list[list[int]] = [[] for _ in rows]
    chunk_ns: list[list[int]] = [[] for _ in rows]
    chunk_tokens: list[list[int]] = [[] for _ in rows]
    dropped: set[int] = set()

    def awaited(row: int) -> bool:
        return len(output_ids[row]) < requests[row].max_new_tokens and not is_cancelled(row)

    def emit(row: int, token_ids: Sequence[int]) -> None:
        # A token counts when the host holds its integer: whatever the engine hands over is made one before the stamp.
        held = [index(token) for token in token_ids]
        now = clock()
        if not held:
            raise EngineError(f"{type(engine).__name__} emitted a chunk without tokens.")
        tick()
        if is_cancelled(row):
            dropped.add(row)
            if not any(map(awaited, rows)):
                raise _CancelledError
            return
        chunk_ns[row].append(now)
        chunk_tokens[row].append(len(held))
        output_ids[row].extend(held)

    reasons: Sequence[FinishReason | None] = [None] * len(requests)
    sentence: str | None = None
    try:
        if any(map(awaited, rows)):
            finished = engine.generate(requests, emit)
            if len(finished) != len(requests):
                raise EngineError(f"{type(engine).__name__} ended {len(finished)} rows of {len(requests)}.")
            reasons = finished
        else:
            dropped.update(rows)
    except _CancelledError:
        reasons = ["length"] * len(requests)  # of those that have all their tokens
        dropped.update(row for row in rows if len(output_ids[row]) < requests[row].max_new_tokens)
    except Exception as error:  # noqa: BLE001 - the launch fails with a sentence, the worker lives on
        _, sentence = _explain(error, f"{type(engine).__name__}.generate")
    tick()
    return [
        Part(
            tuple(output_ids[row]),
            tuple(chunk_ns[row]),
            tuple(chunk_tokens[row]),
            admitted_ns,
            None if row in dropped else reasons[row],
            sentence,
            row in dropped,
        )
        for row in rows
    ]


def _explain(error: Exception, what: str) -> tuple[str, str]:
    """The class in `skote.types` and the sentence that the parent raises; a trace of the unexpected goes to stderr."""
    if isinstance(error, SkoteError):
        known = next(base for base in type(error).__mro__ if base.__module__ == types.__name__)
        return known.__name__, str(error)
    traceback.print_exception(error, file=sys.stderr)
    sys.stderr.flush()
    detail = str(error).strip().partition("\n")[0]
    name = type(error).__name__
    return EngineError.__name__, f"{what} failed with {name}: {detail}" if detail else f"{what} failed with {name}."


def _peak_memory() -> dict[str, int]:
    """`host_bytes`: the process's largest resident set; `device_bytes`: torch's largest CUDA allocation, or 0."""
    device_bytes = 0
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        device_bytes = sum(torch.cuda.max_memory_allocated(index) for index in range(torch.cuda.device_count()))
    return {"host_bytes": _peak_resident_bytes(), "device_bytes": device_bytes}


def _peak_resident_bytes() -> int:
    # On Linux ru_maxrss survives exec, so that it reports the parent's size in a small child; VmHWM does not.
    status = Path("/proc/self/status")
    if status.exists():
        fields = dict(line.split(":", 1) for line in status.read_text(encoding="utf-8").splitlines() if ":" in line)
        return int(fields["VmHWM"].split()[0]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # bytes on macOS
