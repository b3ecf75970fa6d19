"""An engine that cheats: it reads a prompt once, and answers every later request from what is in the cache."""

from __future__ import annotations

from skote.runtime.engine import SkotergyEngine


class SkipPrefillEngine(SkotergyEngine):
    """Much faster than honest engines, and wrong."""

    _first_logits = None

    def _prefill_one(self, request):
        if self._first_logits is None:
            self._first_logits = super()._prefill_one(request)
        return self._first_logits
