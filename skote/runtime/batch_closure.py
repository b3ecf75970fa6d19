"""The closure on CUDA of requests that are advanced together, and join and leave between two steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from skote.kernels.tiles import batch_tiles
from skote.model.decoder import Decoder
from skote.model.folding import folded
from skote.runtime.batch_step import BatchStep, tile_of
from skote.runtime.capacity import cache_positions
from skote.runtime.captures import Captures
from skote.runtime.cuda_batch import CudaBatch
from skote.runtime.cuda_closure import allocations, described
from skote.runtime.kernel_sets import MultiRow, StepAttention
from skote.runtime.packed_prefill import PIECES, PackedPrefill, end_rows
from skote.runtime.page_list import PageList
from skote.runtime.paged_cache import PagedCache
from skote.runtime.profile import kernel_times
from skote.runtime.scheduler import Pack, Scheduler, sizes_for
from skote.runtime.serving import ListDesk, Serving
from skote.runtime.token_choice import Choice
from skote.types import Desk, Emit, FinishReason, Request

_PROFILED_STEPS = 20


class BatchClosure:
    """Prompt ids to token ids on one CUDA device, tier 1, in the multi-row set of kernels.

    Args:
        capacity: positions that a request may take.
        max_batch: rows of a step, at most.
        prefill_chunk: tokens of prompts between two steps, rounded up to whole packs.
        prefix_cache: keep full pages of prompts for requests that begin with the same tokens.
    """

    def __init__(
        self, decoder: Decoder, *, capacity: int, max_batch: int, prefill_chunk: int, prefix_cache: bool = False
    ) -> None:
        decoder = folded(decoder)
        spec, weights = decoder.spec, decoder.weights
        self.rows = max_batch
        self._decoder = decoder
        self._device = decoder.device
        self._chunk = prefill_chunk
        self._prefix_cache = prefix_cache
        itemsize = weights.embed.itemsize
        started = time.monotonic()
        with torch.cuda.device(self._device):
            cut = batch_tiles(spec.hidden, spec.intermediate, spec.head_dim, itemsize).attention
            span = -(-capacity // cut.page) * cut.page
            positions = cache_positions(spec, span, rows=max_batch, element_size=itemsize, device=self._device)
            self._pages = positions // cut.page
            self._pieces = min(PIECES, -(-prefill_chunk // cut.page))
            self._cache = PagedCache(
                spec,
                max(self._pages + 1, self._pieces),  # one for the padding of packs, which need not be longer
                capacity,
                page=cut.page,
                dtype=weights.embed.dtype,
                device=self._device,
            )
            self._captures = Captures()
            sizes, ends = sizes_for(max_batch), end_rows(self._pieces)
            tiles = sorted({tile_of(size) for size in (*sizes, ends)})
            attend = StepAttention(spec, weights, tiles[-1], capacity, cut)
            kernels = {rows: MultiRow(spec, weights, rows, attend=attend) for rows in tiles}
            self._step = BatchStep(decoder, self._cache, kernels, sizes, self._captures)
            self._step.capture_layers()
            self._step.capture_choices()
            end = BatchStep(decoder, self._cache, kernels, (ends,), self._captures)
            end.capture_choices()
            self._prefill = PackedPrefill(decoder, self._cache, end, pieces=self._pieces, spare=self._pages)
            self._prefill.warm_up()
            torch.cuda.synchronize()
        self._batch = CudaBatch(self._step, self._prefill)
        self._list = PageList(self._pages, self._cache.page)
        self._capture_s = time.monotonic() - started
        self._captured = self._captures.count
        self._allocations = allocations(self._device)

    def generate(self, requests: Sequence[Request], emit: Emit) -> list[FinishReason]:
        """As `Closure.generate`; those beyond the rows wait until one is free."""
        desk = ListDesk(requests, emit)
        self.serve(desk, lambda _: None)
        return desk.reasons

    def serve(self, desk: Desk, check: Callable[[Request], None]) -> None:
        """As `Closure.serve`."""
        with torch.cuda.device(self._device):
            eos_ids = self._decoder.spec.eos_ids
            Serving(desk, self._scheduler(), self._batch, check=check, eos_ids=eos_ids).run()

    def score(self, request: Request, forced_ids: Sequence[int]) -> torch.Tensor:
        """As `Closure.score`: each forced token through the packs and the steps that `generate` runs."""
        allocated = allocations(self._device)
        state = self._step.state
        scheduler = self._scheduler()
        scheduler.offer(0, replace(request, max_new_tokens=len(forced_ids)))
        scheduler.admit()
        with torch.cuda.device(self._device):
            self._batch.begin()
            ended = 0
            while isinstance(pack := scheduler.next(), Pack):
                self._prefill(pack.pieces)
                ended = len(pack.pieces) - 1
                scheduler.launched(pack)
            rows = [self._prefill.ends.state.logits[ended].clone()]
            self._batch.join(0, ended)
            for position, token in enumerate(forced_ids[:-1], len(request.input_ids)):
                state.feed(0, token, position)
                self._step.launch(1, position, Choice.GREEDY)
                rows.append(state.logits[0].clone())
            scored = torch.stack(rows)
        scheduler.leave(scheduler.seats)
        self._allocations += allocations(self._device) - allocated  # the rows are not a step's
        return scored

    def describe(self) -> dict[str, Any]:
        """As `Closure.describe`. Captures and allocations are those since the closure was built."""
        prefill = f"prefill by packs of {self._pieces} x {self._cache.page} tokens"
        if self._prefix_cache:
            prefill += ", shared prefixes once"
        return {
            **described(self._decoder, "multi-row", prefill, self._cache),
            "compile_s": self._capture_s,
            "cache_positions": self._pages * self._cache.page,
            "captures_after_warmup": self._captures.count - self._captured,
            "allocations_after_warmup": allocations(self._device) - self._allocations,
        }

    def profile_step(self) -> list[dict[str, Any]]:
        """As `Closure.profile_step`, for a greedy step of one row in the middle of the context."""
        capacity, state = self._cache.capacity, self._step.state
        repeats = min(_PROFILED_STEPS, capacity - 1)  # one more than this is run
        if repeats < 1:
            return []
        first = max((capacity - repeats) // 2 - 1, 0)
        with torch.cuda.device(self._device):
            self._batch.begin()
            self._list = PageList(self._pages, self._cache.page)  # these steps write into any page
            state.table[0].copy_(torch.arange(self._cache.pages_per_row))
            state.feed(0, 0, first)
            run = partial(self._step.launch, 1, first + repeats, Choice.GREEDY)
            times = kernel_times(run, repeats=repeats)
            self._batch.begin()
        return times

    def _scheduler(self) -> Scheduler:
        if not self._prefix_cache or self._list.free < self._list.total:  # a run that held them was broken off
            self._list = PageList(self._pages, self._cache.page)
        return Scheduler(
            rows=self.rows,
            pages=self._list,
            pieces=self._pieces,
            chunk=self._chunk,
            prefix_cache=self._prefix_cache,
        )
