"""An engine without a model: programmable delays and failures, to measure the harness itself and to test it."""

from __future__ import annotations

import array
import hashlib
import os
import random
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from skote.engines.delays import Delay, wait_until
from skote.types import Emit, EngineError, FinishReason, Request, UsageError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

DIE_CODE = 70
"""The exit code of a process that `die_on` ends."""


class SimulatedEngine:
    """Emits token ids that are a hash of the prompt, one a step, `token_ms` apart after `prefill_ms`.

    A delay begins when the last emit returned, so that what an emit costs shows in the gaps. With a `distribution` of
    `skote.engines.delays` delays are drawn: `prefill_ms` and `token_ms` are the means, `prefill_sd_ms` and
    `token_sd_ms` the standard deviations. They come from `delay_seed` and the prompt of a launch's first row: a prompt
    has the same delays whenever it comes, and arms of different seeds have independent ones. There is no
    end-of-sequence token: every row ends by its length. `fail_on` and `die_on` hold request ids: a launch that
    contains one raises `EngineError`, or ends the process, once each row has `fail_after` tokens, and before the
    launch's last token in any case. Of the keywords that all engines take only `device` and `dtype` are reported; no
    model is read, and nothing is computed.

    Raises:
        UsageError: a negative delay or `fail_after`, a vocabulary without tokens, or as `Delay`.
    """

    def __init__(
        self,
        *,
        local_dir: str | Path | None = None,
        device: str = "cpu",
        dtype: str = "fp32",
        threads: int | None = None,
        random_seed: int | None = None,
        layers: int | None = None,
        pad_id: int | None = None,
        max_model_len: int | None = None,
        prefill_ms: float = 0.0,
        token_ms: float = 0.0,
        vocab_size: int = 49152,
        fail_on: Collection[str] = (),
        die_on: Collection[str] = (),
        fail_after: int = 1,
        distribution: str = "fixed",
        prefill_sd_ms: float | None = None,
        token_sd_ms: float | None = None,
        delay_seed: int = 0,
    ) -> None:
        del local_dir, threads, random_seed, layers, pad_id, max_model_len
        if min(prefill_ms, token_ms, fail_after) < 0 or vocab_size < 1:
            raise UsageError(
                f"The simulated engine needs a vocabulary, and no delay or fail_after below 0, got "
                f"{prefill_ms=}, {token_ms=}, {fail_after=}, {vocab_size=}."
            )
        self._device = device
        self._dtype = dtype
        self._prefill = Delay(distribution, prefill_ms, prefill_sd_ms)
        self._token = Delay(distribution, token_ms, token_sd_ms)
        self._delay_seed = delay_seed
        self._vocab_size = vocab_size
        self._fail_on = frozenset(fail_on)
        self._die_on = frozenset(die_on)
        self._fail_after = fail_after

    def generate(self, requests: Sequence[Request], emit: Emit) -> list[FinishReason]:
        """Emit `max_new_tokens` tokens for each row, one a step; rows with a smaller limit drop out earlier.

        Raises:
            EngineError: a request's id is in `fail_on`.
        """
        outputs = [self.output_ids(request.input_ids, request.max_new_tokens) for request in requests]
        rng = random.Random(f"{self._delay_seed}/{requests[0].input_ids}")  # noqa: S311 - delays that repeat
        _wait(self._prefill.draw(rng))
        steps = max(map(len, outputs))
        for step in range(steps):
            if step == min(self._fail_after, steps - 1):
                self._break(requests)
            if step > 0:
                _wait(self._token.draw(rng))
            for row, ids in enumerate(outputs):
                if step < len(ids):
                    emit(row, ids[step : step + 1])
        return ["length"] * len(requests)

    def score(self, request: Request, forced_ids: Sequence[int]) -> NDArray[np.float32]:
        """Logits `[len(forced_ids), vocab_size]`: 1 at the token that `generate` emits there, 0 elsewhere."""
        import numpy as np

        logits = np.zeros((len(forced_ids), self._vocab_size), dtype=np.float32)
        logits[np.arange(len(forced_ids)), self.output_ids(request.input_ids, len(forced_ids))] = 1.0
        return logits

    def describe(self) -> dict[str, Any]:
        """The delays, and that no model runs."""
        return {
            "tier": None,
            "tier_reason": "programmed delays, no model",
            "parameters": 0,
            "compile_s": None,
            "notes": [],
            "paths": {},
            "device": self._device,
            "dtype": self._dtype,
            "prefill_ms": self._prefill.mean_ms,
            "token_ms": self._token.mean_ms,
            "distribution": self._token.distribution,
        }

    def output_ids(self, input_ids: Sequence[int], n_tokens: int) -> list[int]:
        """The first `n_tokens` tokens after `input_ids`: SHAKE-256 of the prompt, in words of 32 bits."""
        prompt = b"".join(token.to_bytes(4, "little") for token in input_ids)
        words = array.array("I", hashlib.shake_256(prompt).digest(4 * n_tokens))
        return [word % self._vocab_size for word in words]

    def _break(self, requests: Sequence[Request]) -> None:
        for request in requests:
            if request.request_id in self._die_on:
                os._exit(DIE_CODE)
            if request.request_id in self._fail_on:
                raise EngineError(f"The simulated engine was told to fail on request {request.request_id!r}.")


def _wait(delay_ms: float) -> None:
    wait_until(time.monotonic_ns() + round(delay_ms * 1e6))
