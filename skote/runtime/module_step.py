"""A Transformers module as prefill and decode step of one row: as Transformers runs it, and over our static cache."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from transformers import DynamicCache

from skote.runtime.module_attention import NAME, use_attention
from skote.runtime.module_cache import ModuleCache


class ModuleStep(Protocol):
    """A row of a module. Logits are fp32 `[vocab]`, and may be overwritten by the next call."""

    def prefill(self, input_ids: Sequence[int]) -> torch.Tensor:
        """Start over with a prompt; the logits after it."""

    def feed(self, token: int) -> torch.Tensor:
        """Add one token; the logits after it."""


class EagerStep:
    """Tier 3: the module's own forward pass, attention and dynamic cache, as in `generate`."""

    def __init__(self, module: Any) -> None:  # noqa: ANN401 (Transformers' models are untyped)
        self._module = module
        self._options = _options(module)
        parameters = inspect.signature(module.forward).parameters
        self._cache_name = "cache" if "cache" in parameters else "past_key_values"
        self._cache = DynamicCache(config=module.config)

    def prefill(self, input_ids: Sequence[int]) -> torch.Tensor:
        """As `ModuleStep.prefill`."""
        self._cache = DynamicCache(config=self._module.config)
        return self._run(input_ids)

    def feed(self, token: int) -> torch.Tensor:
        """As `ModuleStep.feed`."""
        return self._run([token])

    def _run(self, ids: Sequence[int]) -> torch.Tensor:
        options = self._options | {self._cache_name: self._cache, "use_cache": True}
        return _logits(self._module, torch.tensor([ids], device=self._module.device), options)


class StaticStep:
    """Tier 2: the module over a `ModuleCache`; its step reads and writes fixed tensors, so that it can be captured.

    Token and position are fed back on the device.
    """

    def __init__(self, module: Any, cache: ModuleCache) -> None:  # noqa: ANN401
        use_attention(module, NAME)
        self._module = module
        self._cache = cache
        self._device: torch.device = module.device
        self._options = _options(module) | {"skotergy_cache": cache, "use_cache": False}
        self._token = torch.zeros(1, 1, dtype=torch.int64, device=self._device)
        self._logits = torch.zeros(module.get_output_embeddings().weight.shape[0], device=self._device)
        self._graph: torch.cuda.CUDAGraph | None = None

    def prefill(self, input_ids: Sequence[int]) -> torch.Tensor:
        """As `ModuleStep.prefill`."""
        ids = torch.tensor([input_ids], device=self._device)
        self._cache.begin()
        with self._on_device():
            self._finish(ids, torch.arange(ids.shape[1], device=self._device)[None])
            self._cache.decode(ids.shape[1])
        return self._logits

    def feed(self, token: int) -> torch.Tensor:
        """As `ModuleStep.feed`."""
        self._token.fill_(token)
        self.run()
        return self._logits

    def run(self) -> None:
        """Queue one step, from the token that the last call left or was fed."""
        with self._on_device():
            if self._graph is not None:
                self._graph.replay()
            else:
                self._step()

    def capture(self) -> None:
        """Capture the step of a CUDA device; a prompt must have been fed before.

        Raises:
            RuntimeError: the module waits for the device, or does something else that a graph cannot hold.
        """
        with self._on_device():
            self._step()  # capture must neither compile nor initialise a library
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self._step()
            self._graph = graph

    def greedy(self, input_ids: Sequence[int], count: int) -> Iterator[int]:
        """The `count` likeliest tokens after a prompt, on CUDA. While one is read, the step after it already runs."""
        host = torch.zeros(2, dtype=torch.int64, pin_memory=True)
        with self._on_device():
            events = [torch.cuda.Event() for _ in host]  # type: ignore[no-untyped-call]
        self.prefill(input_ids)
        self._send(host[0], events[0])
        for index in range(count):
            if index + 1 < count:
                self.run()
                self._send(host[(index + 1) % 2], events[(index + 1) % 2])
            events[index % 2].synchronize()
            yield int(host[index % 2])

    def _send(self, place: torch.Tensor, event: torch.cuda.Event) -> None:
        with self._on_device():
            place.copy_(self._token[0, 0], non_blocking=True)
            event.record()

    def _step(self) -> None:
        self._finish(self._token, self._cache.position[None])
        self._cache.position.add_(1)

    def _finish(self, ids: torch.Tensor, position_ids: torch.Tensor) -> None:
        self._logits.copy_(_logits(self._module, ids, self._options | {"position_ids": position_ids}))
        self._token.copy_(self._logits.argmax().view(1, 1))

    def _on_device(self) -> AbstractContextManager[object]:
        return torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext()


def forced_logits(step: ModuleStep, input_ids: Sequence[int], forced_ids: Sequence[int]) -> torch.Tensor:
    """Logits `[len(forced_ids), vocab]` that each forced token is chosen from, after the prompt and those before it."""
    rows = [step.prefill(input_ids).clone()]
    rows.extend(step.feed(token).clone() for token in forced_ids[:-1])
    return torch.stack(rows)


def _options(module: Any) -> dict[str, Any]:  # noqa: ANN401
    """The argument that keeps a prompt's logits to its last position, for the models that have it."""
    return {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(module.forward).parameters else {}


def _logits(module: Any, ids: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:  # noqa: ANN401
    logits: torch.Tensor = module(input_ids=ids, **options).logits[0, -1]
    return logits.float()
