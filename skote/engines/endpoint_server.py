"""A server that an arm starts itself: the command that `endpoint.command` names.

It runs in the process group of the replica that started it, which the run kills whole, however either of them ends.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
import weakref
from collections.abc import Sequence

from skote.types import EngineError, UsageError

_TERM_S = 4.0  # less than a replica has to end in


class ServerProcess:
    """Starts `command`, a list or a line that is split as a shell would; its output goes to the replica's log.

    Raises:
        UsageError: there is no such program, or no command in the line.
    """

    def __init__(self, command: str | Sequence[str]) -> None:
        try:
            arguments = shlex.split(command) if isinstance(command, str) else [str(each) for each in command]
        except ValueError as error:
            raise UsageError(f"endpoint.command={command!r} cannot be split into words: {error}.") from error
        if not arguments:
            raise UsageError("endpoint.command is empty: give the program that serves, or leave it null.")
        self._name = arguments[0]
        try:
            process = subprocess.Popen(arguments, stdin=subprocess.DEVNULL, stdout=sys.stderr.fileno())
        except OSError as error:
            raise UsageError(f"endpoint.command: {self._name} cannot be started ({error.strerror}).") from error
        self._process = process
        self.close = weakref.finalize(self, _end, process)

    def check(self) -> None:
        """Check that it still runs.

        Raises:
            EngineError: it has ended.
        """
        code = self._process.poll()
        if code is not None:
            raise EngineError(f"The server {self._name} ended with exit code {code}; the arm's log has what it said.")


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(_TERM_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
