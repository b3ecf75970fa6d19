"""An engine that stops in the middle of a run, and says so: synchronises a test with what another process does."""

from __future__ import annotations

from pathlib import Path

from skote.engines.simulated import SimulatedEngine


class StalledEngine(SimulatedEngine):
    """Once request `stall_on` comes, opens the named pipe `pipe` for writing, and waits for ever."""

    def __init__(self, *, stall_on, pipe, **options):
        super().__init__(**options)
        self._stall_on, self._pipe = stall_on, Path(pipe)

    def generate(self, requests, emit):
        if any(request.request_id == self._stall_on for request in requests):
            self._pipe.write_text("stalled", encoding="utf-8")
            self._pipe.read_text(encoding="utf-8")
        return super().generate(requests, emit)
