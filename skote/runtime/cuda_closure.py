"""The decode closure on CUDA: captured prefill, captured steps, tokens read one step behind."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from skote.kernels.flash_decode_triton import MIN_HEAD_DIM
from skote.kernels.launch import MAX_COLUMNS
from skote.model.decoder import Decoder
from skote.model.spec import DecoderSpec
from skote.runtime.closure import ended
from skote.runtime.cuda_graph import Choice, CudaStep
from skote.runtime.cuda_prefill import BUCKETS, CHUNK, SHORT, CudaPrefill
from skote.runtime.kernel_sets import KernelSet, MultiRow, SingleRow
from skote.runtime.paged_cache import PagedCache
from skote.runtime.profile import kernel_times
from skote.types import Emit, FinishReason, Request

_PROFILED_STEPS = 20


@dataclass(slots=True)
class _Seat:
    """A request in a row of a batch. Its next step is that of `position`; `last` is its last token's position."""

    index: int
    row: int
    request: Request
    position: int
    last: int
    tokens: int = 1


class CudaClosure:
    """Prompt ids to token ids on one CUDA device, tier 1.

    Args:
        capacity: positions that a request may take.
        max_batch: rows of a step: 1 takes the single-row kernels, 2 to 16 the multi-row ones.
        warmup_buckets: prompt lengths whose prefill is captured; by default a ladder of them.
    """

    def __init__(
        self, decoder: Decoder, *, capacity: int, max_batch: int = 1, warmup_buckets: Sequence[int] | None = None
    ) -> None:
        spec, weights = decoder.spec, decoder.weights
        self._decoder = decoder
        self._device = decoder.device
        started = time.monotonic()
        with torch.cuda.device(self._device):
            kernels: KernelSet = (
                SingleRow(spec, weights, capacity) if max_batch == 1 else MultiRow(spec, weights, capacity)
            )
            page = kernels.attention.page
            self._cache = PagedCache(
                spec,
                max_batch,
                capacity,
                page=page,
                granule=page if max_batch == 1 else CHUNK,
                dtype=weights.norm.dtype,
                device=self._device,
            )
            self._step = CudaStep(decoder, self._cache, kernels)
            self._step.capture_steps()
            self._first = self._step
            if max_batch > 1:  # a prefill ends in a state of its own, while the other rows go on
                alone = SingleRow(spec, weights, capacity, attention=kernels.attention)
                self._first = CudaStep(decoder, self._cache, alone)
            self._first.capture_choices()
            buckets = BUCKETS if warmup_buckets is None else sorted(set(warmup_buckets))
            self._prefill = CudaPrefill(
                decoder,
                self._cache,
                self._first,
                buckets=buckets,
                chunk=None if max_batch == 1 else CHUNK,
                short=SHORT if max_batch == 1 and weights.norm.dtype != torch.float32 else 0,
            )
            self._prefill.warm_up()
            torch.cuda.synchronize()
        self._capture_s = time.monotonic() - started
        self._captures = self._count_captures()
        self._allocations = self._count_allocations()

    @staticmethod
    def refusal(spec: DecoderSpec) -> str | None:
        """Why the kernels cannot run this model, or None."""
        if spec.head_dim & (spec.head_dim - 1) or spec.head_dim < MIN_HEAD_DIM:
            return f"head_dim {spec.head_dim} is not a power of two of at least {MIN_HEAD_DIM}"
        longest = max(spec.hidden, spec.intermediate, spec.heads * spec.head_dim)
        return f"rows of {longest} weights are longer than {MAX_COLUMNS}" if longest > MAX_COLUMNS else None

    def generate(self, requests: Sequence[Request], emit: Emit) -> list[FinishReason]:
        """As `Closure.generate`; more requests than rows are run in groups, in their order."""
        reasons: dict[int, FinishReason] = {}
        with torch.cuda.device(self._device):
            for start in range(0, len(requests), self._cache.rows):
                group = list(enumerate(requests))[start : start + self._cache.rows]
                if self._step is self._first:
                    for index, request in group:
                        reasons[index] = self._alone(index, request, emit)
                else:
                    self._together(group, emit, reasons)
        return [reasons[index] for index in range(len(requests))]

    def score(self, request: Request, forced_ids: Sequence[int]) -> torch.Tensor:
        """As `Closure.score`: each forced token through the prefill and the steps that `generate` runs."""
        allocated = self._count_allocations()
        step = self._step
        with torch.cuda.device(self._device):
            step.state.idle_all()
            self._prefill(0, request.input_ids)
            rows = [self._first.state.logits[0].clone()]
            for position, token in enumerate(forced_ids[:-1], len(request.input_ids)):
                step.state.feed(0, token, position)
                step.launch(position)
                rows.append(step.state.logits[0].clone())
            step.state.idle(0)
            scored = torch.stack(rows)
        self._allocations += self._count_allocations() - allocated  # the rows are not a step's
        return scored

    def describe(self) -> dict[str, Any]:
        """As `Closure.describe`. Captures and allocations are those since the closure was built."""
        paths: dict[str, dict[str, int]] = {}
        for (op, path), count in sorted(self._decoder.paths.items()):
            paths.setdefault(op, {})[path] = count
        return {
            "tier": 1,
            "tier_reason": "model_type llama has an adapter; decode step captured "
            f"({self._step.kernels.name} kernels), prefill by captured graphs",
            "kernel_set": self._step.kernels.name,
            "compile_s": self._capture_s,
            "kv_cache_bytes": self._cache.nbytes,
            "captures_after_warmup": self._count_captures() - self._captures,
            "allocations_after_warmup": self._count_allocations() - self._allocations,
            "notes": [],
            "paths": paths,
        }

    def profile_step(self) -> list[dict[str, Any]]:
        """As `Closure.profile_step`, for a greedy step of one row in the middle of the context."""
        step = self._step
        repeats = min(_PROFILED_STEPS, self._cache.capacity - 1)  # one more than this is run
        if repeats < 1:
            return []
        first = max((self._cache.capacity - repeats) // 2 - 1, 0)
        with torch.cuda.device(self._device):
            step.state.idle_all()
            step.state.feed(0, 0, first)
            times = kernel_times(partial(step.launch, first + repeats), repeats=repeats)
            step.state.idle_all()
        return times

    def _alone(self, index: int, request: Request, emit: Emit) -> FinishReason:
        """A request by itself. While a token is read, the step after it already runs."""
        step, choice = self._step, Choice.of(request.sampling)
        if choice != Choice.GREEDY:
            step.state.choose_by(0, request.sampling)
        start = len(request.input_ids)
        last = start + request.max_new_tokens - 1
        mark = self._prefill(0, request.input_ids, choice)
        for position in range(start, last + 1):
            following = step.launch(position, choice) if position < last else mark
            token = step.token(mark, 0, position)
            emit(index, (token,))
            reason = ended(request, token, position - start + 1, self._decoder.spec.eos_ids)
            if reason is not None:
                return reason
            mark = following
        raise AssertionError("a request ends at its last token at the latest")

    def _together(self, group: Sequence[tuple[int, Request]], emit: Emit, reasons: dict[int, FinishReason]) -> None:
        """Requests in rows of their own: their prompts one after another, then all rows step by step."""
        step, choice = self._step, max(Choice.of(request.sampling) for _, request in group)
        step.state.idle_all()  # a batch that was left early may have left rows where they stood
        seats = []
        for row, (index, request) in enumerate(group):
            start = len(request.input_ids)
            seat = _Seat(index, row, request, start, start + request.max_new_tokens - 1)
            self._first.state.choose_by(0, request.sampling)
            mark = self._prefill(row, request.input_ids, Choice.of(request.sampling))
            step.state.take(row, self._first.state)
            if self._heard(seat, self._first.token(mark, 0, start), emit, reasons):
                seats.append(seat)
            else:
                step.state.idle(row)
        pending: deque[tuple[int, list[tuple[_Seat, int]]]] = deque()
        while seats or pending:
            due = [seat for seat in seats if seat.position < seat.last]
            if due:
                mark = step.launch(max(seat.position for seat in due), choice)
                for seat in due:
                    seat.position += 1
                    if seat.position == seat.last:
                        step.state.idle(seat.row)
                pending.append((mark, [(seat, seat.position) for seat in due]))
            if len(pending) < 2 and due:
                continue  # one step is always queued before the last one's tokens are waited for
            mark, awaited = pending.popleft()
            for seat, position in awaited:
                if seat in seats and not self._heard(seat, step.token(mark, seat.row, position), emit, reasons):
                    seats.remove(seat)
                    step.state.idle(seat.row)

    def _heard(self, seat: _Seat, token: int, emit: Emit, reasons: dict[int, FinishReason]) -> bool:
        """Hand over a seat's next token; whether it goes on."""
        emit(seat.index, (token,))
        reason = ended(seat.request, token, seat.tokens, self._decoder.spec.eos_ids)
        seat.tokens += 1
        if reason is not None:
            reasons[seat.index] = reason
        return reason is None

    def _count_captures(self) -> int:
        return sum(step.captures for step in {self._step, self._first})

    def _count_allocations(self) -> int:
        """Calls of cudaMalloc by torch's allocator on this device so far."""
        return int(torch.cuda.memory_stats(self._device).get("num_device_alloc", 0))
