"""The threads of the runtime's own: daemons, so that none keeps a program from its end."""

from __future__ import annotations

import threading
from collections.abc import Callable

from skote.types import ReplicaError


def start_thread(name: str, target: Callable[[], None]) -> threading.Thread:
    """A started thread that runs `target`.

    Raises:
        ReplicaError: the system has no thread left.
    """
    thread = threading.Thread(target=target, name=name, daemon=True)
    try:
        thread.start()
    except RuntimeError as error:
        raise ReplicaError(f"The thread {name} cannot be started: {error}.") from error
    return thread
