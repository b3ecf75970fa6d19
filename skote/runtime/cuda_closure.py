"""The decode closure on CUDA: captured prefill, captured steps, tokens read one step behind."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from skote.kernels.flash_decode_triton import MIN_HEAD_DIM
from skote.kernels.launch import MAX_COLUMNS
from skote.model.decoder import Decoder
from skote.model.folding import folded
from skote.model.spec import DecoderSpec
from skote.runtime.closure import emit_row
from skote.runtime.cuda_graph import CudaStep
from skote.runtime.cuda_prefill import BUCKETS, SHORT, CudaPrefill
from skote.runtime.kernel_sets import SingleRow
from skote.runtime.paged_cache import PagedCache
from skote.runtime.profile import kernel_times
from skote.runtime.token_choice import Choice
from skote.runtime.turns import serve_in_turns
from skote.types import Desk, Emit, FinishReason, Request

_PROFILED_STEPS = 20


class CudaClosure:
    """Prompt ids to token ids on one CUDA device, tier 1, one request at a time; `batch_closure` is that of many.

    Args:
        capacity: positions that a request may take.
        warmup_buckets: prompt lengths whose prefill is captured; by default a ladder of them.
    """

    rows = 1

    def __init__(self, decoder: Decoder, *, capacity: int, warmup_buckets: Sequence[int] | None = None) -> None:
        decoder = folded(decoder)
        spec, weights = decoder.spec, decoder.weights
        self._decoder = decoder
        self._device = decoder.device
        started = time.monotonic()
        with torch.cuda.device(self._device):
            kernels = SingleRow(spec, weights, capacity)
            page = kernels.attention.page
            self._cache = PagedCache(
                spec, -(-capacity // page), capacity, page=page, dtype=weights.embed.dtype, device=self._device
            )
            self._step = CudaStep(decoder, self._cache, kernels)
            self._step.capture_steps()
            self._step.capture_choices()
            self._prefill = CudaPrefill(
                decoder,
                self._cache,
                self._step,
                buckets=BUCKETS if warmup_buckets is None else sorted(set(warmup_buckets)),
                short=SHORT if weights.embed.dtype != torch.float32 else 0,
            )
            self._prefill.warm_up()
            torch.cuda.synchronize()
        self._capture_s = time.monotonic() - started
        self._captures = self._step.captures
        self._allocations = allocations(self._device)

    @staticmethod
    def refusal(spec: DecoderSpec) -> str | None:
        """Why the kernels cannot run this model, or None."""
        if spec.head_dim & (spec.head_dim - 1) or spec.head_dim < MIN_HEAD_DIM:
            return f"head_dim {spec.head_dim} is not a power of two of at least {MIN_HEAD_DIM}"
        longest = max(spec.hidden, spec.intermediate, spec.heads * spec.head_dim)
        return f"rows of {longest} weights are longer than {MAX_COLUMNS}" if longest > MAX_COLUMNS else None

    def generate(self, requests: Sequence[Request], emit: Emit) -> list[FinishReason]:
        """As `Closure.generate`, one request after another."""
        with torch.cuda.device(self._device):
            return [
                emit_row(row, request, self._tokens(request), self._decoder.spec.eos_ids, emit)
                for row, request in enumerate(requests)
            ]

    def serve(self, desk: Desk, check: Callable[[Request], None]) -> None:
        """As `Closure.serve`, one request after another."""
        with torch.cuda.device(self._device):
            serve_in_turns(
                desk,
                self._tokens,
                rows=self.rows,
                capacity=self._cache.capacity,
                check=check,
                eos_ids=self._decoder.spec.eos_ids,
            )

    def score(self, request: Request, forced_ids: Sequence[int]) -> torch.Tensor:
        """As `Closure.score`: each forced token through the prefill and the steps that `generate` runs."""
        allocated = allocations(self._device)
        step = self._step
        with torch.cuda.device(self._device):
            self._prefill(request.input_ids)
            rows = [step.state.logits[0].clone()]
            for position, token in enumerate(forced_ids[:-1], len(request.input_ids)):
                step.state.feed(0, token, position)
                step.launch(position)
                rows.append(step.state.logits[0].clone())
            scored = torch.stack(rows)
        self._allocations += allocations(self._device) - allocated  # the rows are not a step's
        return scored

    def describe(self) -> dict[str, Any]:
        """As `Closure.describe`. Captures and allocations are those since the closure was built."""
        return {
            **described(self._decoder, "single-row", "prefill by captured graphs", self._cache),
            "compile_s": self._capture_s,
            "captures_after_warmup": self._step.captures - self._captures,
            "allocations_after_warmup": allocations(self._device) - self._allocations,
        }

    def profile_step(self) -> list[dict[str, Any]]:
        """As `Closure.profile_step`, for a greedy step of one row in the middle of the context."""
        step = self._step
        repeats = min(_PROFILED_STEPS, self._cache.capacity - 1)  # one more than this is run
        if repeats < 1:
            return []
        first = max((self._cache.capacity - repeats) // 2 - 1, 0)
        with torch.cuda.device(self._device):
            step.state.feed(0, 0, first)
            times = kernel_times(partial(step.launch, first + repeats), repeats=repeats)
            step.state.idle_all()
        return times

    def _tokens(self, request: Request, place: int = 0) -> Iterator[int]:
        """A request's tokens; there is but one `place`. While a token is read, the step after it already runs."""
        del place
        step, choice = self._step, Choice.of(request.sampling)
        if choice != Choice.GREEDY:
            step.state.choose_by([request.sampling])
        start = len(request.input_ids)
        last = start + request.max_new_tokens - 1
        mark = self._prefill(request.input_ids, choice)
        for position in range(start, last + 1):
            following = step.launch(position, choice) if position < last else mark
            yield step.token(mark, position)
            mark = following


def described(decoder: Decoder, kernel_set: str, prefill: str, cache: PagedCache) -> dict[str, Any]:
    """What the closures on CUDA say of themselves in the same words."""
    paths: dict[str, dict[str, int]] = {}
    for (op, path), count in sorted(decoder.paths.items()):
        paths.setdefault(op, {})[path] = count
    return {
        "tier": 1,
        "tier_reason": f"model_type {decoder.spec.family} has an adapter; "
        f"decode step captured ({kernel_set} kernels), {prefill}",
        "kernel_set": kernel_set,
        "kv_cache_bytes": cache.nbytes,
        "notes": [],
        "paths": paths,
    }


def allocations(device: torch.device) -> int:
    """Calls of cudaMalloc by torch's allocator on `device` so far."""
    return int(torch.cuda.memory_stats(device).get("num_device_alloc", 0))
