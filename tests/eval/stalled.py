"""An engine that stops in the middle of a run, and says so: synchronises a test with what another process does."""

from __future__ import annotations

from pathlib import Path

from skote.engines.simulated import SimulatedEngine


class StalledEngine(SimulatedEngine):
    """Opens the named pipe `pipe` for writing once `stall_after` requests have come, and waits for ever."""

    def __init__(self, *, stall_after, pipe, **options):
        super().__init__(**options)
        self._left, self._pipe = stall_after, Path(pipe)

    def generate(self, requests, emit):
        self._left -= len(requests)
        if self._left == -1:
            self._pipe.write_text("stalled", encoding="utf-8")
            self._pipe.read_text(encoding="utf-8")
        return super().generate(requests, emit)
