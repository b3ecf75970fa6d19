"""The loop of a batch that requests join and leave between two steps: desk, scheduler and device put together."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol

from skote.runtime.closure import ended
from skote.runtime.scheduler import Change, Idle, Join, Move, Pack, Piece, Scheduler, Seat, Step
from skote.types import Desk, Emit, EngineError, FinishReason, Request, SkoteError


class BatchDevice(Protocol):
    """What runs a scheduler's decisions, in their order; a launch gives a mark that `tokens` takes.

    `ahead` launches may be queued while the tokens of an earlier one are waited for; 0 where a launch computes at once.
    """

    ahead: int

    def begin(self) -> None:
        """Forget what ran before: no row is in use."""

    def prefill(self, pieces: Sequence[Piece]) -> object:
        """Queue a pack; the seats' pages are those of the cache."""

    def step(self, size: int, seats: Sequence[Seat]) -> object:
        """Queue a step of `size` rows, the first of which are those of `seats`."""

    def join(self, row: int, piece: int) -> None:
        """As `Join`."""

    def move(self, row: int, source: int) -> None:
        """As `Move`."""

    def idle(self, start: int, stop: int) -> None:
        """As `Idle`."""

    def tokens(self, mark: Any) -> Sequence[int]:  # noqa: ANN401 - what `prefill` or `step` of the same device gave
        """The tokens of a launch, waited for: by piece, meaningless where none ends, or by row.

        Negative where no logit was a number.
        """


class Serving:
    """One run of the loop over an idle device.

    Args:
        check: raises a `SkoteError` for a request that cannot be served.
        eos_ids: tokens that end a request.
    """

    def __init__(
        self,
        desk: Desk,
        scheduler: Scheduler,
        device: BatchDevice,
        *,
        check: Callable[[Request], None],
        eos_ids: Collection[int],
    ) -> None:
        self._desk = desk
        self._scheduler = scheduler
        self._device = device
        self._check = check
        self._eos_ids = eos_ids
        self._pending: deque[tuple[object, list[tuple[int, Seat]]]] = deque()

    def run(self) -> None:
        """Serve until nothing runs, waits or arrives."""
        self._device.begin()
        while True:
            self._receive()
            work = self._scheduler.next()
            if work is not None:
                self._launch(work)
            elif not self._pending:
                return
            while len(self._pending) > (self._device.ahead if work is not None else 0):
                self._hear()

    def _receive(self) -> None:
        """Take what has come, drop what was cancelled, and give seats away."""
        for key, request in self._desk.arrivals():
            try:
                self._check(request)
                self._scheduler.offer(key, request)
            except SkoteError as error:
                self._desk.fail(key, error)
        dropped = [seat for seat in self._scheduler.seats if self._desk.is_cancelled(seat.key)]
        self._apply(self._scheduler.leave(dropped))
        for seat in dropped:
            self._desk.end(seat.key, None)
        for seat in self._scheduler.admit():
            self._desk.admit(seat.key)

    def _launch(self, work: Pack | Step) -> None:
        if isinstance(work, Pack):
            mark = self._device.prefill(work.pieces)
            awaited = [(index, piece.seat) for index, piece in enumerate(work.pieces) if piece.ends]
            for _, seat in awaited:
                if seat.cached is not None:
                    self._desk.cached(seat.key, seat.cached)
        else:
            mark = self._device.step(work.size, work.seats)
            awaited = list(enumerate(work.seats))
        self._pending.append((mark, awaited))
        self._apply(self._scheduler.launched(work))
        kept = self._scheduler.kept_tokens
        if kept is not None and isinstance(work, Pack):
            self._desk.keeps(kept)

    def _hear(self) -> None:
        """Wait for the oldest launch, hand its tokens over, and then answer those that have ended: no token waits."""
        mark, awaited = self._pending.popleft()
        tokens = self._device.tokens(mark)  # also where none is awaited: no more than `ahead` launches are queued
        gone: list[tuple[Seat, FinishReason | None]] = []
        for index, seat in awaited:
            if seat.over:  # it had ended when the launch was queued behind its last one
                continue
            token = tokens[index]
            if token < 0:
                gone.append((seat, None))
                continue
            self._desk.emit(seat.key, (token,))
            seat.heard += 1
            reason = ended(seat.request, token, seat.heard, self._eos_ids)
            if reason is not None:
                gone.append((seat, reason))
        self._apply(self._scheduler.leave(seat for seat, _ in gone))
        for seat, reason in gone:
            if reason is not None:
                self._desk.end(seat.key, reason)
            else:
                self._desk.fail(seat.key, not_numbers(len(seat.request.input_ids) + seat.heard - 1))

    def _apply(self, changes: Sequence[Change]) -> None:
        for change in changes:
            match change:
                case Join(row, piece):
                    self._device.join(row, piece)
                case Move(row, source):
                    self._device.move(row, source)
                case Idle(start, stop):
                    self._device.idle(start, stop)


class ListDesk:
    """A desk with all its requests there from the start, for an engine's `generate`; the key is the row."""

    def __init__(self, requests: Sequence[Request], emit: Emit) -> None:
        self._arrivals = list(enumerate(requests))
        self._emit = emit
        self._reasons: dict[int, FinishReason] = {}

    @property
    def reasons(self) -> list[FinishReason]:
        """Why each row ended, once all have."""
        return [reason for _, reason in sorted(self._reasons.items())]

    def arrivals(self) -> Sequence[tuple[int, Request]]:
        """As `Desk.arrivals`."""
        taken, self._arrivals = self._arrivals, []
        return taken

    def on_arrival(self, wake: Callable[[], None] | None) -> None:
        """Nothing comes."""

    def is_cancelled(self, key: int) -> bool:
        """Never."""
        del key
        return False

    def admit(self, key: int) -> None:
        """Nobody asks."""

    def cached(self, key: int, tokens: int) -> None:
        """Nobody asks."""

    def keeps(self, tokens: int) -> None:
        """Nobody asks."""

    def emit(self, key: int, token_ids: Sequence[int]) -> None:
        """As `Desk.emit`."""
        self._emit(key, token_ids)

    def end(self, key: int, reason: FinishReason | None) -> None:
        """As `Desk.end`."""
        assert reason is not None, "no row is cancelled"
        self._reasons[key] = reason

    def fail(self, key: int, error: SkoteError) -> None:
        """Raise `error`: a batch that was given as one fails as one."""
        del key
        raise error


def not_numbers(position: int) -> EngineError:
    """What is said where no logit of a `position` was a number."""
    return EngineError(
        f"The logits of position {position} are not numbers: the weights are damaged, or too large for this dtype; try "
        "dtype=bf16 or fp32."
    )
