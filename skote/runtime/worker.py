"""The replica's process: builds one engine and answers calls over a pipe until told to stop.

Messages, pickled: `(call_id, method, args)` in, `None` to stop; `(call_id, "ok", result)` or
`(call_id, "error", class name in skote.types, sentence)` out. The first message in is `(spec, setup)`, and its answer
carries the id `READY`. The parent's side is `skote.runtime.replica`.
"""

from __future__ import annotations

import inspect
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


class Part(NamedTuple):
    """What the worker knows of one row of a launch; plain integers, since a pickled `Chunk` costs microseconds."""

    output_ids: tuple[int, ...]
    chunk_ns: tuple[int, ...]
    chunk_tokens: tuple[int, ...]
    admitted_ns: int
    finish_reason: FinishReason | None
    error: str | None


def main(connection: Connection) -> None:
    """Serve `connection` until a stop message; at its end of file (the parent died) kill the process group at once."""
    inbox: SimpleQueue[bytes] = SimpleQueue()
    threading.Thread(target=_read, args=(connection, inbox), name="worker-reader", daemon=True).start()
    spec, setup = _receive(inbox)
    try:
        engine = _build(spec, setup)
    except Exception as error:  # noqa: BLE001 - whatever a constructor raises has to reach the parent as a sentence
        connection.send((READY, "error", *_explain(error, f"Loading {spec.target}")))
        sys.exit(1)
    connection.send((READY, "ok", None))
    while (message := _receive(inbox)) is not None:
        call_id, method, args = message
        try:
            reply = pickle.dumps((call_id, "ok", _call(engine, method, args)))
        except Exception as error:  # noqa: BLE001 - one failed call must not end the process that serves the others
            reply = pickle.dumps((call_id, "error", *_explain(error, f"{type(engine).__name__}.{method}")))
        connection.send_bytes(reply)


def _read(connection: Connection, inbox: SimpleQueue[bytes]) -> None:
    """Pass messages on; a thread of its own, so that the parent's death is seen in the middle of a generation."""
    try:
        while True:
            inbox.put(connection.recv_bytes())
    except (EOFError, OSError):
        # The worker leads its own session, so this takes the compilers that it may have started along.
        os.killpg(os.getpgrp(), signal.SIGKILL)


def _receive(inbox: SimpleQueue[bytes]) -> Any:  # noqa: ANN401 - whatever the parent sent
    return pickle.loads(inbox.get())  # noqa: S301 - the parent's own pipe, which no other process holds


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
    if method == "generate":
        return _launch(engine, *args)
    if method == "peak_memory":
        return _peak_memory()
    if method == "ceilings":
        return _ceilings(*args)
    if method == "profile_step" and method not in dir(engine):
        return []  # an engine need not know its kernels
    if method.startswith("_") or method not in dir(engine):
        raise UsageError(f"{type(engine).__name__} has no public method {method!r}.")
    return getattr(engine, method)(*args)


def _launch(engine: Engine, requests: Sequence[Request]) -> list[Part]:
    """Run one engine call; an exception becomes the rows' error, beside the tokens that had already come.

    A batch that fails before its first token is run again row by row, so that one request does not fail the others.
    """
    parts = _generate(engine, requests)
    if len(parts) > 1 and all(part.error is not None and not part.output_ids for part in parts):
        return [part for request in requests for part in _generate(engine, [request])]
    return parts


def _generate(engine: Engine, requests: Sequence[Request]) -> list[Part]:
    clock = _CLOCK
    admitted_ns = clock()
    output_ids: list[list[int]] = [[] for _ in requests]
    chunk_ns: list[list[int]] = [[] for _ in requests]
    chunk_tokens: list[list[int]] = [[] for _ in requests]

    def emit(row: int, token_ids: Sequence[int]) -> None:
        # A token counts when the host holds its integer: whatever the engine hands over is made one before the stamp.
        held = [index(token) for token in token_ids]
        now = clock()
        if not held:
            raise EngineError(f"{type(engine).__name__} emitted a chunk without tokens.")
        chunk_ns[row].append(now)
        chunk_tokens[row].append(len(held))
        output_ids[row].extend(held)

    reasons: Sequence[FinishReason | None] = [None] * len(requests)
    sentence: str | None = None
    try:
        finished = engine.generate(requests, emit)
        if len(finished) != len(requests):
            raise EngineError(f"{type(engine).__name__} ended {len(finished)} rows of {len(requests)}.")
        reasons = finished
    except Exception as error:  # noqa: BLE001 - the launch fails with a sentence, the worker lives on
        _, sentence = _explain(error, f"{type(engine).__name__}.generate")
    return [
        Part(tuple(ids), tuple(stamps), tuple(counts), admitted_ns, reason, sentence)
        for ids, stamps, counts, reason in zip(output_ids, chunk_ns, chunk_tokens, reasons, strict=True)
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


def _ceilings(device: str, dtype: str) -> dict[str, float | None]:
    """What this process can read on `device` and multiply in `dtype` (torch's name); None for what cannot be measured.

    Bytes a second, bytes of the caches that may hold what is read again, and operations a second.
    """
    import torch

    from skote.kernels.cache_size import cache_size
    from skote.kernels.matmul_peak import matmul_peak
    from skote.kernels.read_bandwidth import read_bandwidth

    where = torch.device(device)
    return {
        "read_bandwidth_bytes_per_s": read_bandwidth(where),
        "cache_bytes": cache_size(where),
        "matmul_peak_flops_per_s": matmul_peak(where, getattr(torch, dtype)),
    }
