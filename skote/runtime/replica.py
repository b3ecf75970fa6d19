"""A replica as its parent sees it: one engine in a process of its own, called through futures.

The process is a fresh interpreter (subprocess, not multiprocessing), so the user's `__main__` is never imported again.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, cast

from skote import types
from skote.runtime.worker import READY, Part
from skote.types import Chunk, Completion, EngineSpec, RecordError, ReplicaError, Request, SkoteError

# The worker talks over a duplicate and never closes the original: the parent's end of file is the process's very end,
# not some moment of the interpreter's shutdown, and a compiler that the worker starts does not hold it open.
_BOOT = """
import os, sys
from multiprocessing.connection import Connection
fd = int(sys.argv[1])
os.set_inheritable(fd, False)
connection = Connection(os.dup(fd))
sys.path[:] = connection.recv()
from skote.runtime.worker import main
main(connection)
"""
_TERM_S = 1.0  # from SIGTERM to SIGKILL
_TAIL_BYTES = 4096


class _Call:
    """A question to the worker whose answer, or error, goes to `future` as it is."""

    def __init__(self) -> None:
        self.future: Future[Any] = Future()
        self.future.set_running_or_notify_cancel()  # a cancelled future could not take the answer

    def resolve(self, result: object) -> None:
        self.future.set_result(result)

    def fail(self, error: SkoteError, status: Literal["error", "cancelled"] = "error") -> None:
        del status  # an exception says enough
        self.future.set_exception(error)


class _Launch(_Call):
    """A generate call, whose errors are completions too."""

    def __init__(self, requests: tuple[Request, ...], replica: int, device: str) -> None:
        super().__init__()
        self.requests = requests
        self._replica = replica
        self._device = device
        self._dispatched_ns = time.monotonic_ns()

    def resolve(self, result: object) -> None:
        end_ns = time.monotonic_ns()
        parts = cast("list[Part]", result)
        self.future.set_result(
            [
                Completion(
                    request_id=request.request_id,
                    input_tokens=len(request.input_ids),
                    output_ids=part.output_ids,
                    chunks=tuple(map(Chunk, part.chunk_ns, part.chunk_tokens)),
                    dispatched_ns=self._dispatched_ns,
                    admitted_ns=part.admitted_ns,
                    end_ns=end_ns,
                    status="ok" if part.error is None else "error",
                    finish_reason=part.finish_reason,
                    error=part.error,
                    replica=self._replica,
                    device=self._device,
                )
                for request, part in zip(self.requests, parts, strict=True)
            ]
        )

    def fail(self, error: SkoteError, status: Literal["error", "cancelled"] = "error") -> None:
        end_ns = time.monotonic_ns()
        self.future.set_result(
            [
                Completion(
                    request_id=request.request_id,
                    input_tokens=len(request.input_ids),
                    output_ids=(),
                    chunks=(),
                    dispatched_ns=self._dispatched_ns,
                    admitted_ns=None,
                    end_ns=end_ns,
                    status=status,
                    error=str(error),
                    replica=self._replica,
                    device=self._device,
                )
                for request in self.requests
            ]
        )


class Replica:
    """One engine in its own process, which ends with `close`, with this process, or by an accident of its own.

    `setup` (a module-level function, or a partial of one) runs in the process before the engine is built. The
    process writes its stdout and stderr to the end of `log`, or to this process's stderr where `log` is None.

    Raises:
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
    ) -> None:
        first = pickle.dumps((spec, setup))
        self.index = index
        self.device = device
        self._name = f"Replica {index} ({device})"
        self._log = log
        self._log_start = 0
        self._lock = threading.Lock()
        self._death: str | None = None
        self._closing = False
        self._reaped = False
        self._ready = _Call()
        self._calls: dict[int, _Call] = {READY: self._ready}
        self._next_id = READY + 1
        self._connection, theirs = Pipe()
        try:
            self._process = self._start(theirs)
        except BaseException:
            self._connection.close()
            raise
        finally:
            theirs.close()
        with contextlib.suppress(OSError):  # it died already, and the reader says so
            self._connection.send(sys.path)
            self._connection.send_bytes(first)
        self._reader = threading.Thread(target=self._read, name=f"replica-{index}", daemon=True)
        self._reader.start()

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
    def pid(self) -> int:
        """The process's id."""
        return self._process.pid

    @property
    def answering(self) -> bool:
        """Whether the calling thread is the one that reads this replica's answers, as in a future's callback."""
        return threading.current_thread() is self._reader

    def wait_ready(self, timeout: float | None = None) -> None:
        """Block until the engine is built, at most `timeout` seconds; a failure leaves the replica closed.

        Raises:
            SkoteError: what the engine's constructor raised, of the same class and with the same sentence.
            ReplicaError: the process ended first, or the time is over.
        """
        try:
            self._ready.future.result(timeout)
        except TimeoutError:
            self.close(grace_s=0.0)
            raise ReplicaError(f"{self._name} was not ready after {timeout:g} s.") from None
        except SkoteError:
            self.close()
            raise

    def generate(self, requests: Sequence[Request]) -> Future[list[Completion]]:
        """Hand over `requests` as one launch; launches queue in the process and are answered in order.

        The future never raises: failures are completions with status "error", or "cancelled" after `close`.
        """
        launch = _Launch(tuple(requests), self.index, self.device)
        self._send(launch, "generate", (launch.requests,))
        return launch.future

    def call(self, method: str, *args: object) -> Future[Any]:
        """Call a public method of the engine, or the worker's own `peak_memory` (a dict of bytes).

        The future raises the `SkoteError` that the engine raised, `EngineError` for any other exception, or
        `ReplicaError` where the process ended.
        """
        call = _Call()
        self._send(call, method, args)
        return call.future

    def close(self, grace_s: float = 5.0) -> None:
        """Ask the process to stop, terminate it after `grace_s` seconds, then kill it; returns when it is gone."""
        with self._lock:
            self._closing = True
            if not self._reaped:
                with contextlib.suppress(OSError):
                    self._connection.send(None)
        self._reader.join(grace_s)
        self._signal(signal.SIGTERM)
        self._reader.join(_TERM_S)
        self._signal(signal.SIGKILL)
        self._reader.join()

    def _start(self, theirs: Connection) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-P", "-c", _BOOT, str(theirs.fileno())]
        with contextlib.ExitStack() as stack:
            output: Any = 2  # stdout belongs to the user's own output
            if self._log is not None:
                try:
                    output = stack.enter_context(self._log.open("ab"))
                except OSError as error:
                    raise RecordError(f"The log {self._log} cannot be written ({error.strerror}).") from error
                self._log_start = output.tell()
            try:
                # A session of its own: Ctrl-C is the parent's to handle, and the group can be killed whole.
                return subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    pass_fds=(theirs.fileno(),),
                    start_new_session=True,
                )
            except OSError as error:
                raise ReplicaError(f"{self._name} cannot be started: {error}.") from error

    def _send(self, call: _Call, method: str, args: tuple[object, ...]) -> None:
        with self._lock:
            if self._death is None:
                message = pickle.dumps((self._next_id, method, args))
                self._calls[self._next_id] = call
                self._next_id += 1
                with contextlib.suppress(OSError):  # the reader meets the same end, and answers every call
                    self._connection.send_bytes(message)
                return
        self._fail(call, self._death)

    def _read(self) -> None:
        try:
            while True:
                call_id, outcome, *content = self._connection.recv()
                call = self._calls.pop(call_id)
                if outcome == "ok":
                    call.resolve(content[0])
                else:
                    name, sentence = content
                    call.fail(vars(types)[name](sentence))
        except (EOFError, OSError):
            pass
        finally:
            self._bury()

    def _bury(self) -> None:
        """End what is left of the process's group, note why it ended, and answer everything that still waits."""
        self._signal(signal.SIGKILL)
        with self._lock:
            code = self._process.wait()
            self._reaped = True
            self._connection.close()
            self._death = self._describe_end(code)
            calls = list(self._calls.values())
            self._calls.clear()
        for call in calls:
            self._fail(call, self._death)

    def _fail(self, call: _Call, sentence: str) -> None:
        call.fail(ReplicaError(sentence), "cancelled" if self._closing else "error")

    def _signal(self, number: signal.Signals) -> None:
        """Signal the process's group, unless the process was reaped: then its number may be another's."""
        with self._lock:
            if not self._reaped:
                with contextlib.suppress(ProcessLookupError, PermissionError):  # a group of zombies, on macOS
                    os.killpg(self._process.pid, number)

    def _describe_end(self, code: int) -> str:
        if self._closing:
            return f"{self._name} was closed."
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        last = self._last_log_line()
        return f"{self._name} {how}" + (f"; its log {self._log} ends with: {last}" if last else ".")

    def _last_log_line(self) -> str:
        if self._log is None:
            return ""
        try:
            with self._log.open("rb") as file:
                file.seek(max(self._log_start, self._log.stat().st_size - _TAIL_BYTES))
                lines = file.read().decode("utf-8", "replace").split("\n")
        except OSError:  # the sentence does without it
            return ""
        return next((line.strip() for line in reversed(lines) if line.strip()), "")
