"""An engine that batches in flight without a model: the real loop, scheduler and pages over a fake device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from fake_device import FakeDevice, alone

from skote.runtime.page_list import PageList
from skote.runtime.scheduler import Piece, Scheduler, Seat
from skote.runtime.serving import ListDesk, Serving
from skote.types import Desk, Emit, FinishReason, Request

PAGE = 4
EOS = 7


def whole(request: Request) -> list[int]:
    """The tokens of a request that nobody cancels."""
    tokens = alone(request)
    return tokens if request.ignore_eos or EOS not in tokens else tokens[: tokens.index(EOS) + 1]


class Idle:
    """Nobody who wants to know of an engine's progress."""

    def tick(self) -> None: ...

    def begin(self, call_id: int) -> None: ...

    def keep(self, tokens: int) -> None: ...


class DeviceLostError(Exception):
    """What a fake device raises at a launch."""


class FailingDevice(FakeDevice):
    """Fails where `fails` says so, and has forgotten all that it was asked then."""

    def __init__(self, fails: Callable[[], bool], **options: Any) -> None:
        super().__init__(**options)
        self._fails = fails

    def prefill(self, pieces: Sequence[Piece]) -> int:
        self._check()
        return super().prefill(pieces)

    def step(self, size: int, seats: Sequence[Seat]) -> int:
        self._check()
        return super().step(size, seats)

    def _check(self) -> None:
        if self._fails():
            self._queue.clear()
            raise DeviceLostError


class FakeBatching:
    """As `skote.types.BatchingEngine`; pages of prompts are kept and shared, and there are too few for all rows."""

    def __init__(self, *, rows: int = 8, pages: int = 100, fails: Callable[[], bool] = lambda: False) -> None:
        self.rows = rows
        self._device = FailingDevice(fails, rows=rows, page=PAGE, ahead=1, lazy=True)
        self._pages = PageList(pages, PAGE)

    def generate(self, requests: Sequence[Request], emit: Emit) -> list[FinishReason]:
        desk = ListDesk(requests, emit)
        self.serve(desk)
        return desk.reasons

    def serve(self, desk: Desk) -> None:
        scheduler = Scheduler(rows=self.rows, pages=self._pages, pieces=2, chunk=8, prefix_cache=True)
        try:
            Serving(desk, scheduler, self._device, check=lambda _: None, eos_ids=(EOS,)).run()
        except DeviceLostError:
            self._pages = PageList(self._pages.total, PAGE)
            raise
        assert self._pages.free == self._pages.total, "pages were lost"

    def score(self, request: Request, forced_ids: Sequence[int]) -> Any:
        raise NotImplementedError

    def describe(self) -> dict[str, Any]:
        return {}
