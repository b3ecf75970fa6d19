"""A batch on CUDA: packs of prompts and steps of rows, queued one behind the other."""

from __future__ import annotations

from collections.abc import Sequence

from skote.runtime.batch_step import BatchStep
from skote.runtime.packed_prefill import PackedPrefill
from skote.runtime.scheduler import Piece, Seat
from skote.runtime.token_choice import Choice

Mark = tuple[BatchStep, int]
"""A step, and its own mark."""


class CudaBatch:
    """As `skote.runtime.serving.BatchDevice`."""

    ahead = 1

    def __init__(self, step: BatchStep, prefill: PackedPrefill) -> None:
        self._step = step
        self._prefill = prefill

    def begin(self) -> None:
        """As `BatchDevice.begin`."""
        self._step.state.idle_all()

    def prefill(self, pieces: Sequence[Piece]) -> Mark:
        """As `BatchDevice.prefill`."""
        return self._prefill.ends, self._prefill(pieces)

    def step(self, size: int, seats: Sequence[Seat]) -> Mark:
        """As `BatchDevice.step`."""
        newest = max(seat.newest for seat in seats)
        choice = max(Choice.of(seat.request.sampling) for seat in seats)
        return self._step, self._step.launch(size, newest, choice)

    def join(self, row: int, piece: int) -> None:
        """As `BatchDevice.join`."""
        self._step.state.take(row, self._prefill.ends.state, piece)

    def move(self, row: int, source: int) -> None:
        """As `BatchDevice.move`."""
        self._step.state.take(row, self._step.state, source)

    def idle(self, start: int, stop: int) -> None:
        """As `BatchDevice.idle`."""
        self._step.state.idle(start, stop)

    def tokens(self, mark: Mark) -> list[int]:
        """As `BatchDevice.tokens`."""
        step, own = mark
        return step.tokens(own)
