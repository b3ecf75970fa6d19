"""Tier 1 without own kernels: the lean decoder on framework ops, its step compiled where that pays (CPU)."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from skote.model.decoder import Decoder
from skote.runtime.cache import StaticCache
from skote.runtime.closure import emit_row, ended
from skote.runtime.graph import DecodeStep
from skote.runtime.sampling import next_token, request_generator
from skote.runtime.turns import serve_in_turns
from skote.types import Desk, Emit, FinishReason, Request


class PlainClosure:
    """Requests that come together are left-padded into one batch; alone, a request takes the decode step.

    Args:
        decoder: its rope tables reach `capacity`.
        capacity: positions of a row.
        compiled: compile the decode step.
        rows: requests that `serve` advances in turn, each in a cache of its own.
    """

    def __init__(self, decoder: Decoder, *, capacity: int, compiled: bool, rows: int = 1) -> None:
        self.rows = rows
        self._decoder = decoder
        self._capacity = capacity
        self._caches = [self._new_cache(1, capacity) for _ in range(rows)]
        self._cache = self._caches[0]
        self._batch_cache: StaticCache | None = None
        self._step = DecodeStep(decoder, self._cache, compiled=compiled)

    def generate(self, requests: Sequence[Request], emit: Emit) -> list[FinishReason]:
        """As `Engine.generate`."""
        if len(requests) > 1:
            return self._generate_batch(requests, emit)
        return [emit_row(0, requests[0], self._tokens(requests[0]), self._decoder.spec.eos_ids, emit)]

    def serve(self, desk: Desk, check: Callable[[Request], None]) -> None:
        """As `Closure.serve`."""
        serve_in_turns(
            desk,
            self._tokens,
            rows=self.rows,
            capacity=self._capacity,
            check=check,
            eos_ids=self._decoder.spec.eos_ids,
        )

    def score(self, request: Request, forced_ids: Sequence[int]) -> torch.Tensor:
        """As `Engine.score`: prefill, then the decode step for each forced token."""
        rows = [self._prefill(request)]
        start = len(request.input_ids)
        rows.extend(self._step(token, start + index)[0] for index, token in enumerate(forced_ids[:-1]))
        return torch.stack(rows).float()

    def describe(self) -> dict[str, Any]:
        """As `Closure.describe`."""
        step = "compiled" if self._step.compiled else "plain"
        paths: dict[str, dict[str, int]] = {}
        for (op, path), count in sorted(self._decoder.paths.items()):
            paths.setdefault(op, {})[path] = count
        return {
            "tier": 1,
            "tier_reason": f"model_type {self._decoder.spec.family} has an adapter; "
            f"decode step {step}, prefill by {self._decoder.gemm}",
            "kernel_set": "framework ops",
            "compile_s": self._step.compile_s,
            "kv_cache_bytes": sum(
                tensor.nbytes for cache in self._caches for layer in cache.layers for tensor in layer
            ),
            "notes": self._step.notes,
            "paths": paths,
        }

    def profile_step(self) -> list[dict[str, Any]]:
        """Empty: the step's time is its matrices' bytes, and no kernel of it is ours."""
        return []

    def _new_cache(self, batch: int, capacity: int) -> StaticCache:
        decoder = self._decoder
        return StaticCache(decoder.spec, batch, capacity, dtype=decoder.weights.norm.dtype, device=decoder.device)

    def _prefill(self, request: Request, place: int = 0) -> torch.Tensor:
        device = self._decoder.device
        ids = torch.tensor([request.input_ids], device=device)
        no_padding = torch.zeros(1, ids.shape[1], device=device)
        positions = torch.arange(ids.shape[1], device=device)[None]
        return self._decoder.forward(ids, self._caches[place].layers, no_padding, positions)[0]

    def _tokens(self, request: Request, place: int = 0) -> Iterator[int]:
        generator = request_generator(request.sampling, self._decoder.device)
        logits = self._prefill(request, place)
        for position in itertools.count(len(request.input_ids)):
            token = next_token(logits, request.sampling, generator)
            yield token
            logits = self._step(token, position, self._caches[place])[0]

    def _generate_batch(self, requests: Sequence[Request], emit: Emit) -> list[FinishReason]:
        """A left-padded batch: column c of every row is written at the same place, its position is c - padding."""
        decoder = self._decoder
        tensor = partial(torch.tensor, device=decoder.device)
        width = max(len(request.input_ids) for request in requests)
        padding = tensor([width - len(request.input_ids) for request in requests])
        columns = torch.arange(width + max(request.max_new_tokens for request in requests), device=decoder.device)
        key_mask = torch.zeros(len(requests), len(columns), device=decoder.device)
        key_mask.masked_fill_(columns[None] < padding[:, None], -torch.inf)
        # A row that has ended is carried on, maybe beyond the context; nobody reads it there.
        positions = (columns[None] - padding[:, None]).clamp(0, self._capacity - 1)
        ids = tensor([[0] * (width - len(request.input_ids)) + list(request.input_ids) for request in requests])
        cache = self._cache_for(len(requests), len(columns))
        generators = [request_generator(request.sampling, decoder.device) for request in requests]
        generated = [0] * len(requests)
        reasons: list[FinishReason | None] = [None] * len(requests)
        length = width
        while True:
            start = length - ids.shape[1]
            logits = decoder.forward(ids, cache.layers, key_mask[:, :length], positions[:, start:length])
            tokens = [next_token(logits[row], requests[row].sampling, generators[row]) for row in range(len(requests))]
            for row, token in enumerate(tokens):
                if reasons[row] is None:
                    emit(row, (token,))
                    generated[row] += 1
                    reasons[row] = ended(requests[row], token, generated[row], decoder.spec.eos_ids)
            finished = [reason for reason in reasons if reason is not None]
            if len(finished) == len(requests):
                return finished
            ids = tensor(tokens)[:, None]
            length += 1

    def _cache_for(self, batch: int, capacity: int) -> StaticCache:
        cache = self._batch_cache
        if cache is None or cache.batch != batch or cache.capacity < capacity:
            self._batch_cache = cache = self._new_cache(batch, capacity)
        return cache
