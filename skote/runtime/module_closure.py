"""Tiers 2 and 3: any causal language model of Transformers, captured over our attention and cache, or eager."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import transformers

from skote.model.facts import ModuleFacts
from skote.runtime.closure import emit_row
from skote.runtime.module_attention import module_refusal, use_attention
from skote.runtime.module_cache import ModuleCache, flash_attention
from skote.runtime.module_check import apart, check_ids
from skote.runtime.module_step import EagerStep, ModuleStep, StaticStep, forced_logits
from skote.runtime.profile import kernel_times
from skote.runtime.sampling import next_token, request_generator
from skote.runtime.turns import serve_in_turns
from skote.types import Desk, Emit, EngineError, FinishReason, Request

_PROFILED_STEPS = 20
_TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}


class ModuleClosure:
    """The module in a CUDA graph where that gives the module's own logits (tier 2), else as Transformers runs it.

    Args:
        module: ready for inference, with an attention of Transformers' own.
        facts: of the module.
        capacity: positions of a row.
        refusal: why tier 2 is not to be tried; None to try it.
        rows: requests that `serve` advances in turn in tier 3; tier 2 has one captured step, and one row.
    """

    def __init__(
        self,
        module: Any,  # noqa: ANN401
        facts: ModuleFacts,
        *,
        capacity: int,
        refusal: str | None,
        rows: int = 1,
    ) -> None:
        self._module = module
        self._capacity = capacity
        self._facts = facts
        self._capture_s: float | None = None
        self._cache: ModuleCache | None = None
        self._captured: StaticStep | None = None
        self._batched = False
        self._refusal = refusal or self._try_capture(capacity)
        self.rows = rows if self._captured is None else 1
        self._steps: list[ModuleStep] = [self._captured or EagerStep(module) for _ in range(self.rows)]

    def generate(self, requests: Sequence[Request], emit: Emit) -> list[FinishReason]:
        """As `Engine.generate`; one request after another."""
        self._batched |= len(requests) > 1
        return [
            emit_row(row, request, self._tokens(request), self._facts.eos_ids, emit)
            for row, request in enumerate(requests)
        ]

    def serve(self, desk: Desk, check: Callable[[Request], None]) -> None:
        """As `Closure.serve`."""
        serve_in_turns(
            desk, self._tokens, rows=self.rows, capacity=self._capacity, check=check, eos_ids=self._facts.eos_ids
        )

    def score(self, request: Request, forced_ids: Sequence[int]) -> torch.Tensor:
        """As `Engine.score`."""
        return forced_logits(self._steps[0], request.input_ids, forced_ids)

    def describe(self) -> dict[str, Any]:
        """As `Closure.describe`."""
        name = f"{type(self._module).__name__} of Transformers {transformers.__version__}"
        runs = (
            f"{name} in a CUDA graph, with our attention and cache"
            if self._captured is not None
            else f"{name}, eager, {self._module.config._attn_implementation} attention, dynamic cache, because "
            f"{self._refusal}"
        )
        return {
            "tier": 3 if self._captured is None else 2,
            "tier_reason": f"{runs}; no tier 1, because {self._facts.refusal}",
            "kernel_set": "Transformers",
            "compile_s": self._capture_s,
            "kv_cache_bytes": None if self._cache is None else self._cache.nbytes,
            "notes": ["Requests of a batch ran one after another: this tier has no batched step."]
            if self._batched
            else [],
            "paths": {},
        }

    def profile_step(self) -> list[dict[str, Any]]:
        """As `Closure.profile_step`, for the first steps of a context."""
        step = self._captured
        if step is None:
            return []
        step.prefill([0])
        return kernel_times(step.run, repeats=_PROFILED_STEPS)

    def _tokens(self, request: Request, place: int = 0) -> Iterator[int]:
        if self._captured is not None and request.sampling.greedy:
            yield from self._captured.greedy(request.input_ids, request.max_new_tokens)
            return
        generator = request_generator(request.sampling, self._module.device)
        step = self._steps[place]
        logits = step.prefill(request.input_ids)
        while True:
            token = next_token(logits, request.sampling, generator)
            yield token
            logits = step.feed(token)

    def _try_capture(self, capacity: int) -> str | None:
        """Set up tier 2; why it cannot be, or None."""
        reason = module_refusal(self._module, capacity)
        if reason is not None:
            return reason
        started = time.monotonic()
        own = self._module.config._attn_implementation
        prompt, forced = check_ids(self._facts.vocab, capacity)
        expected = forced_logits(EagerStep(self._module), prompt, forced)
        cache = ModuleCache(capacity, device=self._module.device, decode_attention=flash_attention(capacity))
        try:
            step = StaticStep(self._module, cache)
            step.prefill(prompt)
            step.capture()
            reason = difference(self._module, cache, expected, forced_logits(step, prompt, forced))
        except (ArithmeticError, AssertionError, AttributeError, EngineError, LookupError, RuntimeError, TypeError,
                ValueError) as error:  # fmt: skip
            # What a foreign module does in a capture, or makes of an attention that it does not know, is one of these.
            reason = str(error).strip().partition("\n")[0]
        if reason is not None:
            use_attention(self._module, own)
            return reason
        self._captured, self._cache = step, cache
        self._capture_s = time.monotonic() - started
        return None


def difference(
    module: Any,  # noqa: ANN401
    cache: ModuleCache,
    expected: torch.Tensor,
    found: torch.Tensor,
) -> str | None:
    """Why logits `found` through `cache` are not the module's own, `expected`, both [rows, vocab]; or None.

    Every layer must have used the cache, and in no row may the distance exceed 1e-4 of the norm in fp32, 1e-2 in fp16
    and in tf32, 5e-2 in bf16.
    """
    layers = module.config.get_text_config().num_hidden_layers
    if len(cache.layers) != layers:
        return f"{len(cache.layers)} of its {layers} layers use the attention function"
    exact = torch.get_float32_matmul_precision() == "highest"
    dtype = torch.float16 if module.dtype == torch.float32 and not exact else module.dtype
    distance = apart(found, expected)
    if distance <= _TOLERANCE[dtype]:
        return None
    return (
        f"its logits came out {distance:.1e} of their norm away from the eager ones, {_TOLERANCE[dtype]:.0e} is allowed"
    )
