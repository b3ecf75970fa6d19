"""Engines that cheat."""

from __future__ import annotations

import time

import numpy as np

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
