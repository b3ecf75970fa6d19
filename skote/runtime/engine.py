"""The decode closure: one model on one device, from prompt ids to the last token id; nothing in between leaves it."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from skote.flags import TORCH_DTYPES, flags_record
from skote.model.decoder import Decoder
from skote.model.llama import load_spec
from skote.model.weights import load_weights
from skote.runtime.cache import StaticCache
from skote.runtime.graph import DecodeStep
from skote.runtime.sampling import next_token, request_generator
from skote.types import CapacityError, Emit, FinishReason, Request

if TYPE_CHECKING:
    from skote.runtime.cuda_closure import CudaClosure

DEFAULT_MAX_MODEL_LEN = 8192


class SkotergyEngine:
    """Tier 1: the lean decoder, a static KV cache, and a decode step that streams every weight once.

    Requests that come together are left-padded into one batch; alone, a request takes the compiled step.

    Args:
        local_dir: the checkpoint directory; with `random_seed` only its config.json is read.
        device: a torch device, such as "cpu" or "cuda:0".
        dtype: fp32, tf32, bf16 or fp16.
        threads: kept for the engines' common signature; the process's flags set the threads.
        random_seed: draw the weights instead of reading them.
        layers: use the model's first layers alone.
        pad_id: the tokenizer's padding id; the embedding grows where it lies beyond it.
        max_model_len: positions that a request may take; by default the model's own, at most 8192.
        compile: compile the decode step (CPU), or capture prefill and step on own kernels (CUDA).

    Raises:
        CheckpointError: the directory does not hold a model that this engine runs.
        CapacityError: `max_model_len` is beyond the model's positions.
    """

    @torch.no_grad()
    def __init__(
        self,
        *,
        local_dir: str,
        device: str,
        dtype: str,
        threads: int | None = None,
        random_seed: int | None = None,
        layers: int | None = None,
        pad_id: int | None = None,
        max_model_len: int | None = None,
        compile: bool = True,
    ) -> None:
        del threads
        spec = load_spec(Path(local_dir), layers)
        if max_model_len is not None and not 1 <= max_model_len <= spec.max_positions:
            raise CapacityError(
                f"engine.options.max_model_len={max_model_len} must lie between 1 and the model's {spec.max_positions}."
            )
        self.spec = spec if pad_id is None else spec.with_token(pad_id)
        self._device = torch.device(device)
        self._dtype: torch.dtype = getattr(torch, TORCH_DTYPES[dtype])
        capacity = max_model_len or min(spec.max_positions, DEFAULT_MAX_MODEL_LEN)

        started = time.monotonic()
        weights = load_weights(
            Path(local_dir), self.spec, dtype=self._dtype, device=self._device, random_seed=random_seed
        )
        self._load_s = time.monotonic() - started
        self._fingerprint = weights.fingerprint(self.spec)
        self._decoder = Decoder(self.spec, weights, capacity)
        self._cache = self._new_cache(1, capacity)
        self._batch_cache: StaticCache | None = None
        self._step = DecodeStep(self._decoder, self._cache, compiled=compile and self._device.type == "cpu")
        self._closure = self._capture() if compile and self._device.type == "cuda" else None

    @torch.no_grad()
    def generate(self, requests: Sequence[Request], emit: Emit) -> list[FinishReason]:
        """As `Engine.generate`.

        Raises:
            CapacityError: a request does not fit the context, or names a token beyond the vocabulary.
        """
        self._check(requests)
        if len(requests) == 1:
            return [self._generate_one(requests[0], emit)]
        return self._generate_batch(requests, emit)

    @torch.no_grad()
    def score(self, request: Request, forced_ids: Sequence[int]) -> NDArray[np.float32]:
        """As `Engine.score`: prefill, then the decode step for each forced token.

        Raises:
            CapacityError: prompt and forced tokens do not fit the context, or a prompt token is beyond the vocabulary.
            RequestError: no forced tokens.
        """
        self._check([replace(request, max_new_tokens=len(forced_ids))])
        if self._closure is not None:
            return self._closure.score(request, forced_ids).cpu().numpy()
        rows = [self._prefill_one(request)]
        start = len(request.input_ids)
        rows.extend(self._step(token, start + index)[0] for index, token in enumerate(forced_ids[:-1]))
        return torch.stack(rows).float().cpu().numpy()

    @torch.no_grad()
    def describe(self) -> dict[str, Any]:
        """As `Engine.describe`."""
        plain = ("compiled" if self._step.compiled else "plain", self._decoder.gemm)
        step, prefill = plain if self._closure is None else ("captured", "captured graphs")
        paths: dict[str, dict[str, int]] = {}
        for (op, path), count in sorted(self._decoder.paths.items()):
            paths.setdefault(op, {})[path] = count
        return {
            "tier": 1,
            "tier_reason": f"model_type llama has an adapter; decode step {step}, prefill by {prefill}",
            "weights_fingerprint": self._fingerprint,
            "parameters": self.spec.parameters,
            "bytes_per_token": self.spec.bytes_per_token(self._dtype.itemsize),
            "max_model_len": self._cache.capacity,
            "kv_cache_bytes": self.spec.kv_bytes_per_token(self._dtype.itemsize) * (self._cache.capacity + 1),
            "load_s": self._load_s,
            "compile_s": self._step.compile_s if self._closure is None else self._closure.capture_s,
            "notes": self._step.notes,
            "paths": paths,
            "flags": flags_record(),
        }

    def _check(self, requests: Sequence[Request]) -> None:
        for request in requests:
            self._cache.check_fits(request.request_id, len(request.input_ids), request.max_new_tokens)
            if not 0 <= min(request.input_ids) <= max(request.input_ids) < self.spec.vocab:
                raise CapacityError(
                    f"Request {request.request_id!r} has a token id outside the vocabulary of {self.spec.vocab}."
                )

    def _new_cache(self, batch: int, capacity: int) -> StaticCache:
        return StaticCache(self.spec, batch, capacity, dtype=self._dtype, device=self._device)

    def _ended(self, request: Request, generated: int, token: int) -> FinishReason | None:
        if token in self.spec.eos_ids and not request.ignore_eos:
            return "stop"
        return "length" if generated == request.max_new_tokens else None

    def _capture(self) -> CudaClosure | None:
        from skote.runtime.cuda_closure import CudaClosure

        reason = CudaClosure.refusal(self.spec)
        if reason is not None:
            self._step.notes.append(f"Prefill and decode step run on plain ops: {reason}.")
            return None
        return CudaClosure(self._decoder, self._cache)

    def _prefill_one(self, request: Request) -> torch.Tensor:
        ids = torch.tensor([request.input_ids], device=self._device)
        no_padding = torch.zeros(1, ids.shape[1], device=self._device)
        positions = torch.arange(ids.shape[1], device=self._device)[None]
        return self._decoder.forward(ids, self._cache.layers, no_padding, positions)[0]

    def _generate_one(self, request: Request, emit: Emit) -> FinishReason:
        tokens = self._plain_tokens(request) if self._closure is None else self._closure.tokens(request)
        for generated, token in enumerate(tokens, 1):
            emit(0, (token,))
            reason = self._ended(request, generated, token)
            if reason is not None:
                return reason
        raise AssertionError("a request ends at its last token at the latest")

    def _plain_tokens(self, request: Request) -> Iterator[int]:
        generator = request_generator(request.sampling, self._device)
        logits = self._prefill_one(request)
        for position in itertools.count(len(request.input_ids)):
            token = next_token(logits, request.sampling, generator)
            yield token
            logits = self._step(token, position)[0]

    def _generate_batch(self, requests: Sequence[Request], emit: Emit) -> list[FinishReason]:
        """A left-padded batch: column c of every row is written at the same place, its position is c - padding."""
        width = max(len(request.input_ids) for request in requests)
        padding = torch.tensor([width - len(request.input_ids) for request in requests], device=self._device)
        columns = torch.arange(width + max(request.max_new_tokens for request in requests), device=self._device)
        key_mask = torch.zeros(len(requests), len(columns), device=self._device)
        key_mask.masked_fill_(columns[None] < padding[:, None], -torch.inf)
        # A row that has ended is carried on, maybe beyond the context; nobody reads it there.
        positions = (columns[None] - padding[:, None]).clamp(0, self._cache.capacity - 1)
        ids = torch.tensor(
            [[0] * (width - len(request.input_ids)) + list(request.input_ids) for request in requests],
            device=self._device,
        )
        cache = self._cache_for(len(requests), len(columns))
        generators = [request_generator(request.sampling, self._device) for request in requests]
        generated = [0] * len(requests)
        reasons: list[FinishReason | None] = [None] * len(requests)
        length = width
        while True:
            start = length - ids.shape[1]
            logits = self._decoder.forward(ids, cache.layers, key_mask[:, :length], positions[:, start:length])
            tokens = [next_token(logits[row], requests[row].sampling, generators[row]) for row in range(len(requests))]
            for row, token in enumerate(tokens):
                if reasons[row] is None:
                    emit(row, (token,))
                    generated[row] += 1
                    reasons[row] = self._ended(requests[row], generated[row], token)
            ended = [reason for reason in reasons if reason is not None]
            if len(ended) == len(requests):
                return ended
            ids = torch.tensor(tokens, device=self._device)[:, None]
            length += 1

    def _cache_for(self, batch: int, capacity: int) -> StaticCache:
        cache = self._batch_cache
        if cache is None or cache.batch != batch or cache.capacity < capacity:
            self._batch_cache = cache = self._new_cache(batch, capacity)
        return cache
