"""A worker's process as its parent holds it: a fresh interpreter in a group of its own, a pipe, and its progress.

It is started by subprocess, not by multiprocessing, so that the user's `__main__` is never imported again.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

from skote.runtime.worker_progress import PROGRESS_BYTES, WorkerProgress
from skote.types import RecordError, ReplicaError

# The worker talks over a duplicate and never closes the original: the parent's end of file is the process's very end,
# not some moment of the interpreter's shutdown, and a compiler that the worker starts does not hold it open.
_BOOT = """
import os, sys
from multiprocessing.connection import Connection
fd, memory = map(int, sys.argv[1:])
os.set_inheritable(fd, False)
os.set_inheritable(memory, False)
connection = Connection(os.dup(fd))
sys.path[:] = connection.recv()
from skote.runtime.worker import main
main(connection, memory)
"""
_TAIL_BYTES = 4096


class WorkerProcess:
    """Starts the process; `connection` speaks to it, `progress` says what it has done. `name` begins its sentences.

    It writes its stdout and stderr to the end of `log`, or to this process's stderr where `log` is None. `first` is the
    first message, pickled.

    Raises:
        ReplicaError: it cannot be started.
        RecordError: `log` cannot be written.
    """

    def __init__(self, name: str, log: Path | None, first: bytes) -> None:
        self._name = name
        self._log = log
        self._log_start = 0
        self._lock = threading.Lock()
        self._reaped = False
        try:
            self.connection, theirs = Pipe()
            with theirs, tempfile.TemporaryFile() as file:
                file.write(bytes(PROGRESS_BYTES))  # written, not a hole: a full disk shows here
                file.flush()
                self.progress = WorkerProgress(file.fileno())
                try:
                    self._process = self._start(theirs.fileno(), file.fileno())
                except BaseException:
                    self._close()
                    raise
        except OSError as error:
            raise ReplicaError(f"{self._name} cannot be started: {error}.") from error
        with contextlib.suppress(OSError):  # it died already, and the reader of the connection meets its end
            self.connection.send(sys.path)
            self.connection.send_bytes(first)

    @property
    def pid(self) -> int:
        """The process's id."""
        return self._process.pid

    def limit_writes(self, seconds: float) -> None:
        """Let a write to `connection` raise `BlockingIOError` once the process has read nothing for so long.

        Without a limit it waits as long as the process reads nothing.
        """
        whole = int(seconds)
        limit = struct.pack("ll", whole, max(1, int((seconds - whole) * 1e6)))  # zero and zero would be no limit
        with socket.socket(fileno=os.dup(self.connection.fileno())) as end:
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)

    def signal(self, number: signal.Signals) -> None:
        """Signal the process's group, unless the process was reaped: then its number may be another's."""
        with self._lock:
            if not self._reaped:
                with contextlib.suppress(ProcessLookupError, PermissionError):  # a group of zombies, on macOS
                    os.killpg(self._process.pid, number)

    def reap(self) -> str:
        """Kill what is left of the group, wait for the process, close the connection; how it ended, in a sentence."""
        self.signal(signal.SIGKILL)
        with self._lock:
            code = self._process.wait()
            self._reaped = True
        self._close()
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        last = self._last_log_line()
        return f"{self._name} {how}" + (f"; its log {self._log} ends with: {last}" if last else ".")

    def _close(self) -> None:
        self.connection.close()
        self.progress.close()

    def _start(self, pipe: int, memory: int) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-P", "-c", _BOOT, str(pipe), str(memory)]
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
                    pass_fds=(pipe, memory),
                    start_new_session=True,
                )
            except OSError as error:
                raise ReplicaError(f"{self._name} cannot be started: {error}.") from error

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
