"""A batch's device in plain Python, whose tokens depend on all that its pages hold, and a desk that counts."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

from skote.runtime.scheduler import SIZES, Piece, Seat
from skote.types import FinishReason, Request, SkoteError

VOCAB = 50


def next_token(text: Sequence[int]) -> int:
    """The token after `text`."""
    return hashlib.sha256(bytes(text)).digest()[0] % VOCAB


def alone(request: Request) -> list[int]:
    """The tokens of a request by itself."""
    text = list(request.input_ids)
    for _ in range(request.max_new_tokens):
        text.append(next_token(text))
    return text[len(request.input_ids) :]


class FakeDevice:
    """Keeps tokens in pages. `lazy` runs what is queued as late as may be, else all runs at once.

    Attributes:
        launches: "prefill" and the number of its pieces, or "step" and its size.
    """

    def __init__(self, *, rows: int, page: int, ahead: int, lazy: bool) -> None:
        self.ahead = ahead
        self.launches: list[tuple[str, int]] = []
        self._page = page
        self._lazy = lazy
        self._memory: dict[int, int] = {}
        self._rows: list[tuple[tuple[int, ...], int, int] | None] = [None] * rows  # pages, position, token there
        self._ends: dict[int, tuple[tuple[int, ...], int, int]] = {}
        self._queue: list[Callable[[], None]] = []
        self._tokens: dict[int, list[int]] = {}
        self._marks = 0

    def begin(self) -> None:
        self._do(lambda: self._clear(0, len(self._rows)))

    def prefill(self, pieces: Sequence[Piece]) -> int:
        self.launches.append(("prefill", len(pieces)))
        frozen = [(piece, piece.seat.pages) for piece in pieces]
        mark = self._mark()
        self._do(lambda: self._prefill(frozen, mark))
        return mark

    def step(self, size: int, seats: Sequence[Seat]) -> int:
        assert size in SIZES
        assert size >= len(seats) > 0
        self.launches.append(("step", size))
        count, mark = len(seats), self._mark()
        self._do(lambda: self._step(count, mark))
        return mark

    def join(self, row: int, piece: int) -> None:
        self._do(lambda: self._rows.__setitem__(row, self._ends[piece]))

    def move(self, row: int, source: int) -> None:
        self._do(lambda: self._rows.__setitem__(row, self._rows[source]))

    def idle(self, start: int, stop: int) -> None:
        self._do(lambda: self._clear(start, stop))

    def tokens(self, mark: int) -> list[int]:
        while mark not in self._tokens:
            self._queue.pop(0)()
        return self._tokens.pop(mark)

    def _mark(self) -> int:
        self._marks += 1
        return self._marks

    def _do(self, act: Callable[[], None]) -> None:
        if self._lazy:
            self._queue.append(act)
        else:
            act()

    def _clear(self, start: int, stop: int) -> None:
        for row in range(start, stop):
            self._rows[row] = None

    def _slot(self, pages: tuple[int, ...], position: int) -> int:
        return pages[position // self._page] * self._page + position % self._page

    def _text(self, pages: tuple[int, ...], length: int) -> list[int]:
        return [self._memory[self._slot(pages, position)] for position in range(length)]

    def _prefill(self, pieces: list[tuple[Piece, tuple[int, ...]]], mark: int) -> None:
        tokens = []
        self._ends = {}
        for index, (piece, pages) in enumerate(pieces):
            ids = piece.seat.request.input_ids
            assert piece.start % self._page == 0
            for position in range(piece.start, piece.stop):
                self._memory[self._slot(pages, position)] = ids[position]
            tokens.append(next_token(self._text(pages, len(ids))) if piece.ends else -5)
            self._ends[index] = pages, len(ids), tokens[-1]
        self._tokens[mark] = tokens

    def _step(self, count: int, mark: int) -> None:
        tokens = []
        assert all(row is None for row in self._rows[count:])
        for index in range(count):
            row = self._rows[index]
            assert row is not None
            pages, position, token = row
            self._memory[self._slot(pages, position)] = token
            tokens.append(next_token(self._text(pages, position + 1)))
            self._rows[index] = pages, position + 1, tokens[-1]
        self._tokens[mark] = tokens


class FakeDesk:
    """Requests arrive, and are cancelled, at given calls of `arrivals`: one call a turn of the loop.

    Attributes:
        turn: calls so far.
        admitted: keys in the order of admission.
        kept_tokens: what the engine said last of what it has in store; None where it said nothing.
        tokens, cached_tokens, ends: by key; an end is a reason, None for a cancelled one, or the sentence of a failure.
    """

    def __init__(self, arrivals: dict[int, list[tuple[int, Request]]], cancels: dict[int, list[int]]) -> None:
        self.turn = 0
        self.admitted: list[int] = []
        self.tokens: dict[int, list[int]] = {}
        self.cached_tokens: dict[int, int] = {}
        self.kept_tokens: int | None = None
        self.ends: dict[int, FinishReason | str | None] = {}
        self.arrived_at: dict[int, int] = {}
        self.cancelled_at: dict[int, int] = {}
        self.ended_at: dict[int, int] = {}
        self._arrivals = arrivals
        self._cancels = cancels

    def arrivals(self) -> list[tuple[int, Request]]:
        self.turn += 1
        for key in self._cancels.get(self.turn, ()):
            self.cancelled_at[key] = self.turn
        taken = self._arrivals.pop(self.turn, [])
        self.tokens.update({key: [] for key, _ in taken})
        self.arrived_at.update({key: self.turn for key, _ in taken})
        return taken

    def is_cancelled(self, key: int) -> bool:
        return key in self.cancelled_at

    def admit(self, key: int) -> None:
        assert key not in self.admitted
        self.admitted.append(key)

    def keeps(self, tokens: int) -> None:
        self.kept_tokens = tokens

    def cached(self, key: int, tokens: int) -> None:
        assert key in self.admitted
        assert key not in self.cached_tokens
        assert not self.tokens[key]
        self.cached_tokens[key] = tokens

    def emit(self, key: int, token_ids: Sequence[int]) -> None:
        assert key in self.admitted
        assert key not in self.ends
        self.tokens[key].extend(token_ids)

    def end(self, key: int, reason: FinishReason | None) -> None:
        self._close(key, reason)

    def fail(self, key: int, error: SkoteError) -> None:
        self._close(key, str(error))

    def _close(self, key: int, end: FinishReason | str | None) -> None:
        assert key not in self.ends
        self.ends[key] = end
        self.ended_at[key] = self.turn
