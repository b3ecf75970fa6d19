"""The engine: chooses the tier that a model runs in, loads it, and hands requests to its closure."""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from skote.flags import TORCH_DTYPES, flags_record
from skote.model.decoder import Decoder
from skote.model.facts import ModelFacts, ModuleFacts, load_facts, load_module_facts, module_facts
from skote.model.fingerprint import fingerprint
from skote.model.spec import DecoderSpec
from skote.model.weights import load_weights
from skote.runtime.capacity import check_context, check_request, context_length, longest_context
from skote.runtime.closure import Closure
from skote.runtime.plain_closure import PlainClosure
from skote.runtime.scheduler import SIZES
from skote.runtime.self_check import SelfCheck, Verdict
from skote.runtime.tier_choice import tier_1_refusal
from skote.types import Desk, Emit, FinishReason, Request, UsageError

PREFILL_CHUNK = 512
"""Tokens of prompts between two steps, by default."""


class SkotergyEngine:
    """One model on one device, in the lowest tier that runs it; `describe` says which and why.

    Tier 1, for the families with an adapter: the lean decoder and a static cache, captured on CUDA, on framework ops
    elsewhere, once its logits were those of Transformers for a short text (`SelfCheck`). Tier 2 and 3: the Transformers
    module, captured over our attention and cache, or eager.

    Args:
        local_dir: the checkpoint directory; with `random_seed` only its config.json is read.
        device: a torch device, such as "cpu" or "cuda:0".
        dtype: fp32, tf32, bf16 or fp16.
        threads: kept for the engines' common signature; the process's flags set the threads.
        random_seed: draw the weights instead of reading them.
        layers: use the model's first layers alone.
        pad_id: the tokenizer's padding id; the embedding grows where it lies beyond it.
        max_model_len: positions that a request may take; by default the model's own, at most 8192; "auto" for as many
            as free memory holds.
        max_batch: requests that are advanced together, joining and leaving between two steps, 1 to 128. Captured steps
            of tier 1 have as many rows, 1 takes the matrix-vector kernels; elsewhere rows take their steps in turn.
        prefill_chunk: tokens of prompts that a batch of captured rows prefills between two steps.
        prefix_cache: let a batch of captured rows keep full pages of prompts, and serve requests of the same
            `cache_salt` that begin with the same tokens from them; tokens are the same bits either way.
        warmup_buckets: prompt lengths whose prefill is captured at load; None for the built-in ones.
        compile: compile the decode step (CPU), or capture prefill and step (CUDA).

    Raises:
        CheckpointError: the directory does not hold a model that can be run.
        CapacityError: `max_model_len` is beyond the model's positions, or memory has no room for a cache.
        UsageError: an option of the wrong kind.
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
        max_model_len: int | str | None = None,
        max_batch: int = 1,
        prefill_chunk: int = PREFILL_CHUNK,
        prefix_cache: bool = False,
        warmup_buckets: Sequence[int] | None = None,
        compile: bool = True,
    ) -> None:
        del threads
        _check_options(max_batch, prefill_chunk, warmup_buckets)
        _check_switches(compile=compile, prefix_cache=prefix_cache)
        gc.collect()  # an engine that is gone has graphs, and one that is destroyed during a capture breaks it
        facts = load_facts(Path(local_dir), layers)
        check_context(max_model_len, facts)
        self._device = torch.device(device)
        self._dtype: torch.dtype = getattr(torch, TORCH_DTYPES[dtype])
        self._max_model_len, self._max_batch, self._prefill_chunk = max_model_len, max_batch, prefill_chunk
        self._prefix_cache = prefix_cache
        self._warmup_buckets, self._compile = warmup_buckets, compile
        self.facts: ModelFacts
        self._closure: Closure
        self._bucketed = self._packed = False
        self._check: Verdict | None = None
        if isinstance(facts, DecoderSpec):
            spec = facts.within(longest_context(max_model_len, facts))
            spec = spec if pad_id is None else spec.with_token(pad_id)
            refusal = self._load_decoder(Path(local_dir), spec, random_seed, layers)
            if refusal is None:
                return
            gc.collect()  # what tier 1 held of the device is free now
            facts = load_module_facts(Path(local_dir), layers, refusal)
        self._load_module(Path(local_dir), facts, random_seed, layers, pad_id)

    @torch.no_grad()
    def generate(self, requests: Sequence[Request], emit: Emit) -> list[FinishReason]:
        """As `Engine.generate`.

        Raises:
            CapacityError: a request does not fit the context, or names a token beyond the vocabulary.
        """
        for request in requests:
            check_request(request, capacity=self._capacity, vocab=self.facts.vocab)
        return self._closure.generate(requests, emit)

    @property
    def rows(self) -> int:
        """As `BatchingEngine.rows`."""
        return self._closure.rows

    @torch.no_grad()
    def serve(self, desk: Desk) -> None:
        """As `BatchingEngine.serve`."""
        self._closure.serve(desk, partial(check_request, capacity=self._capacity, vocab=self.facts.vocab))

    @torch.no_grad()
    def score(self, request: Request, forced_ids: Sequence[int]) -> NDArray[np.float32]:
        """As `Engine.score`: prefill, then the decode step for each forced token.

        Raises:
            CapacityError: prompt and forced tokens do not fit the context, or a token is beyond the vocabulary.
            RequestError: no forced tokens.
        """
        for asked in (
            replace(request, max_new_tokens=len(forced_ids)),
            replace(request, input_ids=tuple(forced_ids), max_new_tokens=1),
        ):
            check_request(asked, capacity=self._capacity, vocab=self.facts.vocab)
        return self._closure.score(request, forced_ids).cpu().numpy()

    @torch.no_grad()
    def describe(self) -> dict[str, Any]:
        """As `Engine.describe`."""
        described = self._closure.describe()
        return {
            "weights_fingerprint": self._fingerprint,
            "parameters": self.facts.parameters,
            "bytes_per_token": self.facts.bytes_per_token(self._dtype.itemsize),
            "max_model_len": self._capacity,
            "max_batch": self.rows,
            "load_s": self._load_s,
            "flags": flags_record(),
            "self_check": None if self._check is None else asdict(self._check),
            **described,
            "notes": [*self._without_effect(), *described["notes"]],
        }

    @torch.no_grad()
    def profile_step(self) -> list[dict[str, Any]]:
        """The kernels of a decode step, as `Closure.profile_step`."""
        return self._closure.profile_step()

    def _load_decoder(
        self, local_dir: Path, spec: DecoderSpec, random_seed: int | None, layers: int | None
    ) -> str | None:
        """Set up tier 1; why it cannot be, or None."""
        captured = self._compile and self._device.type == "cuda"
        refusal = tier_1_refusal(spec, longest_context(self._max_model_len, spec), captured=captured)
        if refusal is not None:
            return refusal
        started = time.monotonic()
        weights = load_weights(local_dir, spec, dtype=self._dtype, device=self._device, random_seed=random_seed)
        self._load_s = time.monotonic() - started
        self._fingerprint = weights.fingerprint(spec)
        self.facts = spec
        self._capacity = self._context_length(self._max_batch)
        decoder = Decoder(spec, weights, self._capacity)
        check = SelfCheck(decoder, local_dir, layers)
        closure = self._captured_closure(decoder) if captured else self._plain_closure(decoder)
        self._check = check(closure.score)
        if self._check.difference is None:
            self._closure = closure
        return self._check.difference

    def _plain_closure(self, decoder: Decoder) -> Closure:
        compiled = self._compile and self._device.type == "cpu"
        return PlainClosure(decoder, capacity=self._capacity, compiled=compiled, rows=self._max_batch)

    def _captured_closure(self, decoder: Decoder) -> Closure:
        rows = self._max_batch
        self._bucketed, self._packed = rows == 1, rows > 1
        if rows == 1:
            from skote.runtime.cuda_closure import CudaClosure

            return CudaClosure(decoder, capacity=self._capacity, warmup_buckets=self._warmup_buckets)
        from skote.runtime.batch_closure import BatchClosure

        return BatchClosure(
            decoder,
            capacity=self._capacity,
            max_batch=rows,
            prefill_chunk=self._prefill_chunk,
            prefix_cache=self._prefix_cache,
        )

    def _load_module(
        self, local_dir: Path, facts: ModuleFacts, random_seed: int | None, layers: int | None, pad_id: int | None
    ) -> None:
        from skote.model.causal_lm import add_token, load_module
        from skote.runtime.module_closure import ModuleClosure

        self._bucketed = self._packed = False
        started = time.monotonic()
        module = load_module(local_dir, dtype=self._dtype, device=self._device, random_seed=random_seed, layers=layers)
        if pad_id is not None and add_token(module, pad_id):
            facts = module_facts(module, local_dir, facts.refusal)
        self._load_s = time.monotonic() - started
        self._fingerprint = fingerprint(module.named_parameters())
        self.facts = facts
        self._capacity = self._context_length(self._max_batch)
        refusal = None if self._compile else "engine.compile is false"
        if self._device.type != "cuda":
            refusal = "tier 2 needs a CUDA device"
        self._closure = ModuleClosure(module, facts, capacity=self._capacity, refusal=refusal, rows=self._max_batch)

    def _context_length(self, rows: int) -> int:
        return context_length(
            self._max_model_len, self.facts, rows=rows, element_size=self._dtype.itemsize, device=self._device
        )

    def _without_effect(self) -> list[str]:
        """A sentence for each option that this model, tier or device makes nothing of."""
        notes = []
        if self.rows < self._max_batch:
            notes.append(f"engine.max_batch={self._max_batch} has no effect: the captured step of tier 2 has one row.")
        elif self.rows > 1 and not self._packed:
            notes.append(f"The {self.rows} rows of engine.max_batch take their steps in turn: they share no product.")
        if self._prefill_chunk != PREFILL_CHUNK and not self._packed:
            notes.append("engine.prefill_chunk has no effect: only captured steps of several rows cut prompts.")
        if self._prefix_cache and not self._packed:
            notes.append("engine.prefix_cache has no effect: only captured steps of several rows have pages to share.")
        if self._warmup_buckets is not None and not self._bucketed:
            notes.append("engine.warmup_buckets has no effect: only the single-row kernels prefill by buckets.")
        return notes


def _check_switches(**switches: bool) -> None:
    for name, value in switches.items():
        if not isinstance(value, bool):
            raise UsageError(f"engine.{name}={value} must be true or false.")


def _check_options(max_batch: int, prefill_chunk: int, warmup_buckets: Sequence[int] | None) -> None:
    if not isinstance(max_batch, int) or not 1 <= max_batch <= SIZES[-1]:
        raise UsageError(f"engine.max_batch={max_batch} must lie between 1 and {SIZES[-1]}.")
    if not isinstance(prefill_chunk, int) or prefill_chunk < 1:
        raise UsageError(f"engine.prefill_chunk={prefill_chunk} must be a whole number of at least 1.")
    if isinstance(warmup_buckets, str) or not isinstance(warmup_buckets, Sequence | None):
        raise UsageError(
            f"engine.warmup_buckets={warmup_buckets} must be a list of prompt lengths, such as [128,1024]."
        )
    for bucket in warmup_buckets or ():
        if not isinstance(bucket, int) or bucket < 1:
            raise UsageError(f"engine.warmup_buckets holds {bucket}: prompt lengths are whole numbers of at least 1.")
