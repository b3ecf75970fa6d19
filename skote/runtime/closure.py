"""What every decode closure offers: one model on one device, from prompt ids to token ids."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, Protocol

import torch

from skote.types import Desk, Emit, FinishReason, Request


class Closure(Protocol):
    """A loaded model with its cache. Requests were checked against its capacity before.

    Attributes:
        rows: requests that `serve` advances together.
    """

    rows: int

    def generate(self, requests: Sequence[Request], emit: Emit) -> list[FinishReason]:
        """As `Engine.generate`."""

    def serve(self, desk: Desk, check: Callable[[Request], None]) -> None:
        """As `BatchingEngine.serve`; `check` raises a `SkoteError` for a request that cannot be served."""

    def score(self, request: Request, forced_ids: Sequence[int]) -> torch.Tensor:
        """As `Engine.score`: `[len(forced_ids), vocab]`, fp32."""

    def describe(self) -> dict[str, Any]:
        """The closure's part of `Engine.describe`, as JSON values.

        tier, tier_reason, kernel_set, compile_s, kv_cache_bytes (each maybe null), notes, paths.
        """

    def profile_step(self) -> list[dict[str, Any]]:
        """The kernels of a decode step, as `skote.runtime.profile.kernel_times`; empty where there is none to tell."""


def ended(request: Request, token: int, generated: int, eos_ids: Collection[int]) -> FinishReason | None:
    """Why a row ends with `token`, its `generated`-th one; None where it goes on."""
    if token in eos_ids and not request.ignore_eos:
        return "stop"
    return "length" if generated == request.max_new_tokens else None


def emit_row(row: int, request: Request, tokens: Iterable[int], eos_ids: Collection[int], emit: Emit) -> FinishReason:
    """Emit a row's `tokens` one by one until the request has ended; why it did."""
    for generated, token in enumerate(tokens, 1):
        emit(row, (token,))
        reason = ended(request, token, generated, eos_ids)
        if reason is not None:
            return reason
    raise AssertionError("a request ends at its last token at the latest")
