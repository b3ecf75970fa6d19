"""A server that an arm starts itself: the command that `endpoint.command` names.

It runs in the process group of the replica that started it, which the run kills whole, however either of them ends.
"""

from __future__ import annotations

import shlex
import socket
import subprocess
import sys
import weakref
from collections.abc import Mapping, Sequence
from urllib.parse import urlsplit, urlunsplit

from skote.flags import TORCH_DTYPES
from skote.types import EngineError, UsageError

_TERM_S = 4.0  # less than a replica has to end in


def with_port(url: str, *, has_command: bool) -> str:
    """`url`, with a port that is free just now in the place of port 0, which a command then takes.

    Raises:
        UsageError: its port is no number of a port, there is no command to take one, or the address is none of this
            machine's.
    """
    parts = urlsplit(url)
    try:
        port, host = parts.port, parts.hostname or ""
    except ValueError:
        raise UsageError(f"endpoint.url={url} has a port that is none: 0 to 65535 are.") from None
    if port != 0:
        return url
    if not has_command:
        raise UsageError(f"endpoint.url={url}: port 0 is a free one, for a server that endpoint.command starts.")
    try:
        with socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET) as free:
            port = free.getsockname()[1]
    except OSError as error:
        raise UsageError(f"endpoint.url={url} has no free port: {error.strerror or error}.") from error
    return urlunsplit(parts._replace(netloc=f"{parts.netloc.rpartition(':')[0]}:{port}"))


def command_names(url: str, local_dir: str | None, device: str, dtype: str) -> dict[str, str]:
    """What a command may name of the run: `python`, `port` (of `url`), `device`, `dtype` (PyTorch's name) and `model`.

    There is no `model` where the arms have no directory to read it from.
    """
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    names = {"python": sys.executable, "port": str(port), "device": device, "dtype": TORCH_DTYPES[dtype]}
    return names if local_dir is None else names | {"model": local_dir}


class ServerProcess:
    """Starts `command`, a list or a line that is split as a shell would; its output goes to the replica's log.

    In its words "{NAME}" stands for what `names` has for it.

    Raises:
        UsageError: there is no such program, or no command in the line.
    """

    def __init__(self, command: str | Sequence[str], names: Mapping[str, str]) -> None:
        try:
            arguments = shlex.split(command) if isinstance(command, str) else [str(each) for each in command]
        except ValueError as error:
            raise UsageError(f"endpoint.command={command!r} cannot be split into words: {error}.") from error
        if not arguments:
            raise UsageError("endpoint.command is empty: give the program that serves, or leave it null.")
        for name, value in names.items():
            arguments = [each.replace(f"{{{name}}}", value) for each in arguments]
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
