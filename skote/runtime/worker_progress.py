"""What a worker has done, in memory that it shares with its parent: to be read without a message, and after its end."""

from __future__ import annotations

import mmap

PROGRESS_BYTES = 24
"""Three unsigned numbers, as the machine stores them."""


class WorkerProgress:
    """The numbers in the file `fd`, which has `PROGRESS_BYTES` bytes; one process writes, the other one reads."""

    def __init__(self, fd: int) -> None:
        self._memory = mmap.mmap(fd, PROGRESS_BYTES)
        self._numbers = memoryview(self._memory).cast("Q")

    @property
    def ticks(self) -> int:
        """Grows with each token and each answer, so that a busy engine can be told from one that hangs."""
        return self._numbers[0]

    @property
    def begun(self) -> int:
        """The newest launch, by its call's id, of which the engine has begun a request; newer ones wait. 0 before."""
        return self._numbers[1]

    @property
    def kept_tokens(self) -> int:
        """Tokens of prompts that the engine has in store for requests that begin with them."""
        return self._numbers[2]

    def tick(self) -> None:
        """Note a token or an answer."""
        self._numbers[0] += 1

    def begin(self, call_id: int) -> None:
        """Note that the engine begins a request of a launch, before it does so."""
        self._numbers[1] = max(self._numbers[1], call_id)

    def keep(self, tokens: int) -> None:
        """Note how many tokens of prompts the engine has in store."""
        self._numbers[2] = tokens

    def close(self) -> None:
        """Give the memory back; nothing can be read after."""
        self._numbers.release()
        self._memory.close()
