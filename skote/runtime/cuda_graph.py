"""The decode step of one row on CUDA: from one token's embedding to the next token's, captured in one CUDA graph.

Position, token and the next row of the residual stream stay on the device; the host queues steps and reads the tokens
from pinned memory, one step behind. A step of L layers is 6 L + 2 kernels, or 5 L + 2 where one split of the attention
holds all positions. Each is launched by programmatic dependent launch, loads its weights while its predecessor still
runs, and waits for it before its first dependent read and its first write.

What may be read before the wait: weights, rope tables, the page table, position, and the cache's older slots. All of
them are constant within a step but the position, which the step's last kernel advances after its own wait, and the next
replay starts when the graph has ended.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TypeVar

import torch
import triton

from skote.kernels.flash_decode_triton import flash_decode
from skote.kernels.gate_up_gemv_triton import gate_up_gemv
from skote.kernels.greedy_token_triton import greedy_token
from skote.kernels.head_gemv_triton import head_gemv
from skote.kernels.qkv_gemv_triton import qkv_gemv
from skote.kernels.residual_gemv_triton import residual_gemv
from skote.kernels.tiles import StepTiles, step_tiles
from skote.model.decoder import Decoder
from skote.runtime.cache import StaticCache

_SHORTEST = 256  # positions that the first graph covers, each further one twice as many: idle programs cost time

Argument = TypeVar("Argument")


class CudaStep:
    """token id, position -> next token id and logits, for a cache of one row on a CUDA device.

    `feed` sets a token and its position; each `launch` then computes one step and feeds its greedy token back; `token`
    waits for one. `logits` [vocab], fp32, are those of the last step launched.
    """

    def __init__(
        self, decoder: Decoder, cache: StaticCache, *, tiles: StepTiles | None = None, pdl: bool = True
    ) -> None:
        spec, device, dtype = decoder.spec, decoder.device, decoder.weights.norm.dtype
        self._decoder = decoder
        self._cache = cache
        self._pdl = pdl
        self.tiles = tiles or step_tiles(spec.hidden, spec.intermediate)
        cut = self.tiles.attention
        splits = max(triton.cdiv(covered, cut.split(covered)) for covered in _coverage(cache.capacity))
        programs = triton.cdiv(spec.vocab, self.tiles.head.rows)
        self.position = torch.zeros(1, dtype=torch.int32, device=device)
        self.x = torch.zeros(spec.hidden, device=device)
        self.logits = torch.zeros(spec.vocab, device=device)
        self.cos, self.sin = (
            table[0, 0].contiguous() for table in decoder.rope(torch.arange(cache.capacity, device=device)[None])
        )
        self.table = torch.arange(triton.cdiv(cache.capacity, cut.page), dtype=torch.int32, device=device)
        self._q = torch.zeros(spec.heads, spec.head_dim, dtype=dtype, device=device)
        self._attended = torch.zeros_like(self._q)
        self._h = torch.zeros(spec.intermediate, dtype=dtype, device=device)
        self._sums = torch.zeros(splits, spec.heads, spec.head_dim, device=device)
        self._stats = torch.zeros(splits, 2, spec.heads, device=device)
        self._best = torch.zeros(programs, device=device)
        self._first = torch.zeros(programs, dtype=torch.int32, device=device)
        self._history = torch.zeros(cache.capacity + 1, dtype=torch.int32, pin_memory=True)
        self._tokens = self._history.numpy()
        self._events: dict[int, torch.cuda.Event] = {}
        self._graphs: list[tuple[int, torch.cuda.CUDAGraph, Counter[tuple[str, str]]]] = []
        for covered in _coverage(cache.capacity):
            self.position.zero_()  # the run before a capture is a step like any other
            self._graphs.append((covered, *captured(self._run, covered)))

    def feed(self, token: int, position: int) -> None:
        """Let the next step start from `token` at `position`."""
        self.position.fill_(position)
        self.x.copy_(self._decoder.weights.embed[token])

    def launch(self, position: int) -> None:
        """Queue the step of `position`, which must be where `feed` or the step before left off."""
        _, graph, launched = next(entry for entry in self._graphs if position < entry[0])
        graph.replay()
        self.mark(position + 1)
        self._decoder.paths.update(launched)

    def mark(self, position: int) -> None:
        """Remember that what was queued until now writes the token of `position`."""
        event = self._events.setdefault(position % 4, torch.cuda.Event())  # type: ignore[no-untyped-call]
        event.record()

    def token(self, position: int) -> int:
        """The token of `position`, waited for; at most 3 launches may follow the one that writes it."""
        self._events[position % 4].synchronize()
        return int(self._tokens[position])

    def finish(self, paths: Counter[tuple[str, str]]) -> None:
        """Launch the end of a step: logits of `x`, the greedy token, its embedding; counts the ops in `paths`."""
        weights = self._decoder.weights
        head_gemv(
            self.x,
            weights.norm,
            weights.lm_head,
            self.logits,
            self._best,
            self._first,
            eps=self._decoder.spec.norm_eps,
            tile=self.tiles.head,
            pdl=self._pdl,
        )
        greedy_token(self._best, self._first, self.position, self._history, weights.embed, self.x, pdl=self._pdl)
        paths.update((("head_gemv", "triton"), ("greedy_token", "triton")))

    def _run(self, positions: int) -> Counter[tuple[str, str]]:
        """Launch a step's kernels, with at most the first `positions` positions in use; how often each op was."""
        spec, tiles, pdl = self._decoder.spec, self.tiles, self._pdl
        paths: Counter[tuple[str, str]] = Counter()
        for weights, (keys, values) in zip(self._decoder.weights.layers, self._cache.layers, strict=True):
            qkv_gemv(
                self.x,
                weights.attn_norm,
                weights.qkv,
                self.cos,
                self.sin,
                self.position,
                self.table,
                self._q,
                keys[0],
                values[0],
                eps=spec.norm_eps,
                page=tiles.attention.page,
                tile=tiles.qkv,
                pdl=pdl,
            )
            flash_decode(
                self._q,
                keys[0],
                values[0],
                self.position,
                self.table,
                self._attended,
                self._sums,
                self._stats,
                positions=positions,
                cut=tiles.attention,
                pdl=pdl,
            )
            residual_gemv(self.x, self._attended, weights.o, tile=tiles.o, pdl=pdl)
            gate_up_gemv(
                self.x, weights.mlp_norm, weights.gate_up, self._h, eps=spec.norm_eps, tile=tiles.gate_up, pdl=pdl
            )
            residual_gemv(self.x, self._h, weights.down, tile=tiles.down, pdl=pdl)
            ops = ("qkv_gemv", "flash_decode", "residual_gemv", "gate_up_gemv", "residual_gemv")
            paths.update((op, "triton") for op in ops)
        self.finish(paths)
        return paths


def captured(
    run: Callable[[Argument], Counter[tuple[str, str]]], argument: Argument
) -> tuple[torch.cuda.CUDAGraph, Counter[tuple[str, str]]]:
    """`run(argument)` as a graph, and what it returned; it is run once before, since capture must not compile."""
    run(argument)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launched = run(argument)
    return graph, launched


def _coverage(capacity: int) -> list[int]:
    """How many positions each graph covers, the last one all of them."""
    covered = [_SHORTEST]
    while covered[-1] < capacity:
        covered.append(covered[-1] * 2)
    return [min(each, capacity) for each in covered]
