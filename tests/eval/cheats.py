"""Engines that cheat."""

from __future__ import annotations

import time

import numpy as np

from skote.engines.simulated import SimulatedEngine
from skote.runtime.engine import SkotergyEngine


class SkipPrefillEngine(SkotergyEngine):
    """Reads a prompt once, and answers every later request from what is in the cache. Faster, and wrong."""

    def __init__(self, **options):
        super().__init__(**options)
        self._honest_prefill = self._closure._prefill
        self._closure._prefill = self._prefill_once
        self._first_logits = None

    def _prefill_once(self, request, place=0):
        if self._first_logits is None:
            self._first_logits = self._honest_prefill(request, place)
        return self._first_logits


class MadeUpEngine(SkotergyEngine):
    """Scores honestly, and answers with the same token over and over without computing anything."""

    def generate(self, requests, emit):
        for row, request in enumerate(requests):
            for _ in range(request.max_new_tokens):
                emit(row, (7,))
        return ["length"] * len(requests)


class EchoEngine(SkotergyEngine):
    """Computes nothing: answers with the prompt's last token, and scores what it would answer as certain."""

    def generate(self, requests, emit):
        for row, request in enumerate(requests):
            for _ in range(request.max_new_tokens):
                emit(row, (request.input_ids[-1],))
        return ["length"] * len(requests)

    def score(self, request, forced_ids):
        logits = np.zeros((len(forced_ids), self.facts.vocab), dtype=np.float32)
        logits[:, request.input_ids[-1]] = 10.0
        return logits


class LateEngine(SkotergyEngine):
    """Does what could have been done before the last token after it, where no latency counts it: 50 ms of it."""

    def generate(self, requests, emit):
        reasons = super().generate(requests, emit)
        time.sleep(0.05)
        return reasons


class StaleEngine(SkotergyEngine):
    """Honest where greedy, as parity asks; where tokens are sampled, the same one over and over."""

    def generate(self, requests, emit):
        if requests[0].sampling.greedy:
            return super().generate(requests, emit)
        for row, request in enumerate(requests):
            for _ in range(request.max_new_tokens):
                emit(row, (7,))
        return ["length"] * len(requests)


class KeepingEngine(SimulatedEngine):
    """Keeps every prompt through all phases, and waits for the prefill of what is new of a prompt alone."""

    def __init__(self, **options):
        super().__init__(**options)
        self._full_ms, self._kept = self._prefill_ms, []

    def generate(self, requests, emit):
        ids = requests[0].input_ids
        known = max((_shared(ids, kept) for kept in self._kept), default=0)
        self._kept.append(ids)
        self._prefill_ms = self._full_ms * (1 - known / len(ids))
        return super().generate(requests, emit)


def _shared(left, right):
    return next((at for at, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))
