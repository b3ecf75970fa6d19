"""The pages of a cache: who holds them, which are free, and which may serve a prompt that begins as an earlier one.

A page that was entered under a digest (`page_digests`) may have several holders. Where nobody holds it any more it is
kept as it is, until its place is needed: it counts as free, and the page whose holders have been gone for longest is
taken first. The end of a prefix goes before its beginning, without which it could not be found.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import takewhile


def page_digests(ids: Sequence[int], size: int, salt: str) -> tuple[bytes, ...]:
    """A digest for each page of `size` tokens that a prompt's last token does not lie in: of all tokens to its end.

    The page of the last token is none that prompts could share: the first new token comes out of computing it. SHA-256,
    since two prompts of one digest would get each other's answers.

    Args:
        ids: below 2^63.
        salt: prompts of different salts share no digest.
    """
    digest, digests = hashlib.sha256(salt.encode()).digest(), []
    for start in range(0, (len(ids) - 1) // size * size, size):
        digest = hashlib.sha256(digest + array("q", ids[start : start + size]).tobytes()).digest()
        digests.append(digest)
    return tuple(digests)


class PageList:
    """Pages 0 to `total` - 1 of `size` positions each, all of them free at first."""

    def __init__(self, total: int, size: int) -> None:
        self.total = total
        self.size = size
        self._blank = list(range(total - 1, -1, -1))
        self._holders = [0] * total
        self._entered: dict[bytes, int] = {}
        self._digests: dict[int, bytes] = {}
        self._kept: OrderedDict[int, None] = OrderedDict()  # entered, and held by nobody; the oldest first

    @property
    def free(self) -> int:
        """How many nobody holds."""
        return len(self._blank) + len(self._kept)

    @property
    def entered(self) -> int:
        """How many can be found by a digest, held or not."""
        return len(self._entered)

    def needed(self, positions: int) -> int:
        """How many hold `positions` positions."""
        return -(-positions // self.size)

    def take(self, count: int) -> tuple[int, ...]:
        """`count` free pages, each of one holder; no more than are free. What they held is forgotten."""
        return tuple(self._take() for _ in range(count))

    def give(self, pages: Iterable[int]) -> None:
        """Take pages back from one holder, in the order of their positions."""
        for page in reversed(tuple(pages)):
            self._holders[page] -= 1
            if self._holders[page] == 0:
                if page in self._digests:
                    self._kept[page] = None
                else:
                    self._blank.append(page)

    def enter(self, page: int, digest: bytes) -> None:
        """Let a held page be found by `digest`, unless another one is."""
        if digest not in self._entered:
            self._entered[digest] = page
            self._digests[page] = digest

    def share(self, digests: Sequence[bytes]) -> tuple[int, ...]:
        """The pages of `digests`, up to the first that is not there; they have one more holder."""
        pages = tuple(self._entered[digest] for digest in takewhile(self._entered.__contains__, digests))
        for page in pages:
            self._holders[page] += 1
            self._kept.pop(page, None)
        return pages

    def _take(self) -> int:
        if self._blank:
            page = self._blank.pop()
        else:
            page, _ = self._kept.popitem(last=False)
            del self._entered[self._digests.pop(page)]
        self._holders[page] = 1
        return page
