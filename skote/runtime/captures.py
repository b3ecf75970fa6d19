"""What a closure on CUDA queues and waits for: captured graphs, and tokens on their way to the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

import torch

_T = TypeVar("_T")

IN_FLIGHT = 4
"""Launches whose tokens can be waited for."""


class Captured(Generic[_T]):
    """A graph, and what `run` gave while it was captured."""

    def __init__(self, graph: torch.cuda.CUDAGraph, launched: _T) -> None:
        self.replay = graph.replay
        self.launched = launched


class Captures:
    """Captures graphs that share their memory: they run one after another and keep nothing. `count` counts them."""

    def __init__(self) -> None:
        self.count = 0
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, run: Callable[[], _T]) -> Captured[_T]:
        """`run` as a graph. It is run once before: a capture must not compile."""
        run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            launched = run()
        self.count += 1
        return Captured(graph, launched)


class TokenRing:
    """The tokens of the last few launches of up to `rows` rows, copied to the host behind each."""

    def __init__(self, rows: int) -> None:
        self._host = torch.zeros(IN_FLIGHT, rows, dtype=torch.int32, pin_memory=True)
        self._events = [torch.cuda.Event() for _ in range(IN_FLIGHT)]  # type: ignore[no-untyped-call]
        self._marks = 0

    def send(self, tokens: torch.Tensor) -> int:
        """Queue the copy of int32 `tokens` [rows or fewer]; the mark that `read` takes."""
        self._marks += 1
        place = self._marks % IN_FLIGHT
        self._host[place, : len(tokens)].copy_(tokens, non_blocking=True)
        self._events[place].record()
        return self._marks

    def read(self, mark: int) -> list[int]:
        """The tokens sent at `mark`, waited for; of rows beyond them, anything."""
        assert self._marks - mark < IN_FLIGHT, "the mark's event serves a later launch by now"
        self._events[mark % IN_FLIGHT].synchronize()
        tokens: list[int] = self._host[mark % IN_FLIGHT].tolist()
        return tokens
