"""A batch without a batched step: each row has a cache of its own, and takes its step in turn."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence

from skote.runtime.page_list import PageList
from skote.runtime.scheduler import Piece, Scheduler, Seat
from skote.runtime.serving import Serving
from skote.types import Desk, Request

Tokens = Callable[[Request, int], Iterator[int]]
"""A request and the number of a free cache, 0 or more, to its tokens; each is computed when it is asked for."""


class Turns:
    """As `BatchDevice`; a row is an iterator of tokens, a seat's only page the number of its cache."""

    ahead = 0

    def __init__(self, tokens: Tokens) -> None:
        self._tokens = tokens
        self._ends: list[Iterator[int]] = []
        self._rows: dict[int, Iterator[int]] = {}

    def begin(self) -> None:
        """As `BatchDevice.begin`."""
        self._rows.clear()

    def prefill(self, pieces: Sequence[Piece]) -> list[int]:
        """As `BatchDevice.prefill`; a piece is a whole prompt. The mark is the tokens."""
        self._ends = [self._tokens(piece.seat.request, piece.seat.pages[0]) for piece in pieces]
        return [next(row) for row in self._ends]

    def step(self, size: int, seats: Sequence[Seat]) -> list[int]:
        """As `BatchDevice.step`."""
        del size
        return [next(self._rows[row]) for row in range(len(seats))]

    def join(self, row: int, piece: int) -> None:
        """As `BatchDevice.join`."""
        self._rows[row] = self._ends[piece]

    def move(self, row: int, source: int) -> None:
        """As `BatchDevice.move`."""
        self._rows[row] = self._rows[source]

    def idle(self, start: int, stop: int) -> None:
        """As `BatchDevice.idle`."""
        for row in range(start, stop):
            del self._rows[row]

    def tokens(self, mark: list[int]) -> list[int]:
        """As `BatchDevice.tokens`."""
        return mark


def serve_in_turns(
    desk: Desk,
    tokens: Tokens,
    *,
    rows: int,
    capacity: int,
    check: Callable[[Request], None],
    eos_ids: Collection[int],
) -> None:
    """Serve `desk` with `rows` caches of `capacity` positions; between two steps of all rows one prompt is run."""
    scheduler = Scheduler(rows=rows, pages=PageList(rows, capacity), pieces=1, chunk=1)
    Serving(desk, scheduler, Turns(tokens), check=check, eos_ids=eos_ids).run()
