"""Whose turn it is on this machine, where several jobs of a sweep have landed on it."""

from __future__ import annotations

import fcntl
import getpass
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def machine_turn(directory: Path | None = None) -> Iterator[None]:
    """Wait until no other process of this user on this machine is within, which a file in `directory` tells.

    By default in the system's folder for temporary files, which machines do not share.
    """
    place = Path(tempfile.gettempdir()) if directory is None else directory
    with (place / f"skotergy-{getpass.getuser()}.lock").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # released with the file, however the process ends
        yield
