"""Which requests share a batch, and what it does next: a part of their prompts, or a step of all its rows.

A request waits until a seat and pages for its whole length are free, in the order of arrival: none passes one that
waits for room, so that none starves. Its prompt is then prefilled piece by piece, between two steps no more than a
fixed number of tokens, so that the rows that run keep their pace. After its prompt it takes the next row. Rows in use
are always the first ones: where one is left, the last takes its place, and a step is as wide as the smallest of a few
sizes that covers them.

With a prefix cache, full pages of a prompt are entered into the list as they are prefilled, and a prompt that begins
with the same tokens takes them instead of computing its own: when it is admitted, and once more as its turn comes,
since requests that arrive together find nothing before. Work is queued in order, so that a page need not be computed
yet to be taken: not even in the same pack.

Seat, row and pages are free again as soon as nothing more is asked of the device for a request: what is asked later
runs later.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from skote.runtime.page_list import PageList, page_digests
from skote.types import CapacityError, Request

SIZES = (1, 2, 4, 8, 16, 32, 64, 128)
"""Rows that a step may have."""


def sizes_for(rows: int) -> tuple[int, ...]:
    """The sizes that a batch of up to `rows` rows takes."""
    return tuple(size for size in SIZES if size < 2 * rows)


@dataclass(slots=True, eq=False)
class Seat:
    """A request in the batch, or on its way there; `key` is the caller's name for it.

    Attributes:
        pages: of the cache, in the order of its positions.
        digests: of the pages of its prompt that others may share; none without a prefix cache.
        cached: tokens of its prompt on pages that were computed for others; None without a prefix cache.
        filled: tokens of its prompt that were computed for others, or that the device was asked to prefill.
        asked, heard: new tokens that the device was asked for, and that have come.
        row: where it runs; None before and after.
        over: nobody waits for another token of it.
    """

    key: int
    request: Request
    pages: tuple[int, ...] = ()
    digests: tuple[bytes, ...] = ()
    cached: int | None = None
    filled: int = 0
    asked: int = 0
    heard: int = 0
    row: int | None = None
    over: bool = False

    @property
    def positions(self) -> int:
        """Positions that it takes; the last token is returned and never fed back."""
        return len(self.request.input_ids) + self.request.max_new_tokens - 1

    @property
    def newest(self) -> int:
        """The position of its newest token that was asked for."""
        return len(self.request.input_ids) + self.asked - 1


class Piece(NamedTuple):
    """Tokens `start` to `stop` of a seat's prompt; `start` is the first position of a page."""

    seat: Seat
    start: int
    stop: int

    @property
    def ends(self) -> bool:
        """Whether the prompt ends there, and its first new token is asked for."""
        return self.stop == len(self.seat.request.input_ids)


class Pack(NamedTuple):
    """Pieces that are prefilled together; those of one prompt in its order."""

    pieces: tuple[Piece, ...]


class Step(NamedTuple):
    """A step of the first `size` rows, of which row i is that of seat i; those without a seat are idle."""

    size: int
    seats: tuple[Seat, ...]


class Join(NamedTuple):
    """`row` goes on where a piece of the last pack ended."""

    row: int
    piece: int


class Move(NamedTuple):
    """`row` goes on where `source` stands."""

    row: int
    source: int


class Idle(NamedTuple):
    """Rows `start` to `stop` stand still."""

    start: int
    stop: int


Change = Join | Move | Idle
"""Of the rows, between two launches."""


class Scheduler:
    """See the file's head.

    Args:
        rows: the most requests that hold a seat at one time.
        pages: all of the cache, held by nobody.
        pieces: how many pages of prompts one pack may hold.
        chunk: tokens of prompts between two steps, rounded up to packs.
        prefix_cache: enter full pages of prompts into `pages`, and take those that are there.
    """

    def __init__(self, *, rows: int, pages: PageList, pieces: int, chunk: int, prefix_cache: bool = False) -> None:
        self._rows = rows
        self._pages = pages
        self._pieces = pieces
        self._chunk = chunk
        self._prefix_cache = prefix_cache
        self._sizes = sizes_for(rows)
        self._waiting: deque[Seat] = deque()
        self._filling: list[Seat] = []
        self._running: list[Seat] = []
        self._filled = 0  # tokens of packs since the last step

    @property
    def kept_tokens(self) -> int | None:
        """Tokens of prompts that a request may begin with instead of computing them; None without a prefix cache."""
        return self._pages.entered * self._pages.size if self._prefix_cache else None

    @property
    def seats(self) -> list[Seat]:
        """All that wait, are prefilled or run."""
        return [*self._waiting, *self._filling, *self._running]

    def offer(self, key: int, request: Request) -> None:
        """Let a request wait.

        Raises:
            CapacityError: the whole cache has no room for it.
        """
        seat = Seat(key, request)
        needed = self._pages.needed(seat.positions)
        if needed > self._pages.total:
            raise CapacityError(
                f"Request {request.request_id!r} needs {needed} pages of {self._pages.size} positions, the cache has "
                f"{self._pages.total}: shorten the prompt, ask for fewer tokens, or lower engine.max_model_len."
            )
        if self._prefix_cache:
            seat.digests = page_digests(request.input_ids, self._pages.size, request.cache_salt)
            seat.cached = 0
        self._waiting.append(seat)

    def admit(self) -> list[Seat]:
        """Give seats to those that wait, while there is room; who got one."""
        admitted = []
        while self._waiting and len(self._filling) + len(self._running) < self._rows:
            seat = self._waiting[0]
            shared = self._pages.share(seat.digests)
            own = self._pages.needed(seat.positions) - len(shared)
            if own > self._pages.free:
                self._pages.give(shared)
                break
            seat.pages = shared + self._pages.take(own)
            self._skip(seat, len(shared))
            admitted.append(self._waiting.popleft())
            self._filling.append(seat)
        return admitted

    def next(self) -> Pack | Step | None:
        """What the device is asked next; None where no seat is taken. `launched` has to follow."""
        if self._filling and not (self._running and self._filled >= self._chunk):
            return Pack(tuple(self._next_pieces()))
        if self._running:
            size = next(size for size in self._sizes if size >= len(self._running))
            return Step(size, tuple(self._running))
        return None

    def launched(self, work: Pack | Step) -> list[Change]:
        """Note that the device was asked; how its rows change after that."""
        if isinstance(work, Step):
            self._filled = 0
            for seat in work.seats:
                seat.asked += 1
            return self._release(seat for seat in work.seats if seat.asked == seat.request.max_new_tokens)
        changes: list[Change] = []
        self._filled += self._pieces * self._pages.size
        for index, (seat, _, stop) in enumerate(work.pieces):
            seat.filled = stop
            if not work.pieces[index].ends:
                continue
            seat.asked = 1
            if seat.request.max_new_tokens > 1:
                self._filling.remove(seat)
                seat.row = len(self._running)
                self._running.append(seat)
                changes.append(Join(seat.row, index))
            else:
                self._release([seat])
        return changes

    def leave(self, seats: Iterable[Seat]) -> list[Change]:
        """Ask nothing more for `seats`; how the rows change before the next launch."""
        gone = list(seats)
        for seat in gone:
            seat.over = True
        return self._release(gone)

    def _next_pieces(self) -> list[Piece]:
        pieces: list[Piece] = []
        size = self._pages.size
        for seat in self._filling:
            self._swap(seat)
            length = len(seat.request.input_ids)
            for start in range(seat.filled, length, size):
                if len(pieces) == self._pieces:
                    return pieces
                pieces.append(Piece(seat, start, min(start + size, length)))
                page = start // size
                if page < len(seat.digests):
                    self._pages.enter(seat.pages[page], seat.digests[page])
        return pieces

    def _swap(self, seat: Seat) -> None:
        """Take the pages that were entered since the seat got its own, and give those back."""
        first = seat.filled // self._pages.size
        shared = self._pages.share(seat.digests[first:])
        if shared:
            last = first + len(shared)
            self._pages.give(seat.pages[first:last])
            seat.pages = seat.pages[:first] + shared + seat.pages[last:]
            self._skip(seat, len(shared))

    def _skip(self, seat: Seat, pages: int) -> None:
        """Leave out `pages` pages of the seat's prompt that were computed for others."""
        if seat.cached is not None:
            seat.cached += pages * self._pages.size
            seat.filled += pages * self._pages.size

    def _release(self, seats: Iterable[Seat]) -> list[Change]:
        """Take back what the seats hold; one that holds nothing is passed over."""
        changes: list[Change] = []
        before = len(self._running)
        for seat in sorted(seats, key=lambda seat: -1 if seat.row is None else seat.row, reverse=True):
            if seat.row is not None:
                last = self._running.pop()
                if last is not seat:
                    changes.append(Move(seat.row, len(self._running)))
                    self._running[seat.row] = last
                    last.row = seat.row
                seat.row = None
            elif seat in self._filling:
                self._filling.remove(seat)
            elif seat in self._waiting:
                self._waiting.remove(seat)
            self._pages.give(seat.pages)
            seat.pages = ()
        if len(self._running) < before:
            changes.append(Idle(len(self._running), before))
        return changes
