"""An engine that is slow: what a limit on latency has to find."""

from __future__ import annotations

import time

from skote.runtime.engine import SkotergyEngine


class SlowedEngine(SkotergyEngine):
    """Takes ten times as long for each token: what it took, and nine times that in waiting."""

    def generate(self, requests, emit):
        since = time.monotonic()

        def emit_late(row, ids):
            nonlocal since
            time.sleep(9 * (time.monotonic() - since))
            emit(row, ids)
            since = time.monotonic()

        return super().generate(requests, emit_late)
