"""Engines without a model that cheat: each waits as long as a prefill and a token take, where it does not cheat."""

from __future__ import annotations

import time

from skote.engines.delays import Delay
from skote.engines.simulated import SimulatedEngine
from skote.runtime import launch_rows


class KeepingEngine(SimulatedEngine):
    """Keeps every prompt through all phases, and waits for the prefill of what is new of a prompt alone."""

    def __init__(self, *, prefill_ms, **options):
        super().__init__(**options)
        self._full_ms, self._kept = prefill_ms, []

    def generate(self, requests, emit):
        ids = requests[0].input_ids
        known = max((_shared(ids, kept) for kept in self._kept), default=0)
        self._kept.append(ids)
        self._prefill = Delay("fixed", self._full_ms * (1 - known / len(ids)))
        return super().generate(requests, emit)


class HastyEngine(SimulatedEngine):
    """Leaves the first half of every fourth prompt out: its answer is that to the other half."""

    def __init__(self, **options):
        super().__init__(**options)
        self._count = 0

    def output_ids(self, input_ids, n_tokens):
        self._count += 1
        return super().output_ids(input_ids[len(input_ids) // 2 if self._count % 4 == 0 else 0 :], n_tokens)


class TurncoatEngine(SimulatedEngine):
    """Honest while it is warmed up and its outputs are compared, and then answers with the same token at once."""

    def __init__(self, *, honest, **options):
        super().__init__(**options)
        self._honest = honest

    def generate(self, requests, emit):
        self._honest -= 1
        if self._honest < 0:
            self._prefill = self._token = Delay("fixed", 0.0)
        return super().generate(requests, emit)

    def output_ids(self, input_ids, n_tokens):
        return super().output_ids(input_ids, n_tokens) if self._honest >= 0 else [7] * n_tokens


class ShortEngine(SimulatedEngine):
    """Leaves the last token out, and says that it has given as many as were asked for."""

    def output_ids(self, input_ids, n_tokens):
        return super().output_ids(input_ids, n_tokens)[: n_tokens - 1]


class BackdatingEngine(SimulatedEngine):
    """Has the stamps of its tokens taken by a clock that goes at half the speed while it generates."""

    def generate(self, requests, emit):
        start = time.monotonic_ns()
        launch_rows.CLOCK = lambda: (start + time.monotonic_ns()) // 2
        return super().generate(requests, emit)


class EarlyEngine(SimulatedEngine):
    """Has the first token's stamp taken before it waits for the prefill; the others are true."""

    def generate(self, requests, emit):
        start = time.monotonic_ns()
        launch_rows.CLOCK = lambda: start

        def emit_early(row, ids):
            emit(row, ids)
            launch_rows.CLOCK = time.monotonic_ns

        return super().generate(requests, emit_early)


def _shared(left, right):
    return next((at for at, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))
