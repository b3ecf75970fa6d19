"""The pages of a cache that are free: requests take as many as their own length needs, and give them back."""

from __future__ import annotations

from collections.abc import Iterable


class PageList:
    """Pages 0 to `total` - 1 of `size` positions each, all of them free at first."""

    def __init__(self, total: int, size: int) -> None:
        self.total = total
        self.size = size
        self._free = list(range(total - 1, -1, -1))

    @property
    def free(self) -> int:
        """How many are free."""
        return len(self._free)

    def needed(self, positions: int) -> int:
        """How many hold `positions` positions."""
        return -(-positions // self.size)

    def take(self, count: int) -> tuple[int, ...]:
        """`count` free pages; no more than are free."""
        return tuple(self._free.pop() for _ in range(count))

    def give(self, pages: Iterable[int]) -> None:
        """Take pages back."""
        self._free.extend(pages)
