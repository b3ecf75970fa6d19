"""The decode step on CUDA: from each row's token to its next token, captured in one CUDA graph.

Positions, tokens and the next rows of the residual stream stay on the device; the host queues steps and reads the
tokens from pinned memory, one step behind. A greedy step of L layers is 6 L + 2 kernels of the single-row set (5 L + 2
where one split of the attention holds all positions), 9 L + 3 of the multi-row set; one that draws has its draw beside
them.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Callable
from functools import partial

import torch
import triton

from skote.kernels.greedy_token_triton import greedy_token
from skote.kernels.gumbel_best_triton import BLOCK, gumbel_best
from skote.model.decoder import Decoder
from skote.runtime.cutoff import cutoff
from skote.runtime.kernel_sets import KernelSet, coverage
from skote.runtime.paged_cache import PagedCache
from skote.runtime.step_state import StepState
from skote.types import EngineError, Sampling

Launched = Counter[tuple[str, str]]
"""How often each (op, path) ran."""

_IN_FLIGHT = 4  # launches whose tokens can be waited for


class Choice(enum.IntEnum):
    """How a step chooses its tokens; a later one also does what the earlier ones do, and costs more."""

    GREEDY = 0
    DRAWN = 1  # with a temperature
    LIMITED = 2  # and with top-k or top-p, which sort the vocabulary

    @staticmethod
    def of(sampling: Sampling) -> Choice:
        """The one that serves `sampling`."""
        if sampling.greedy:
            return Choice.GREEDY
        return Choice.LIMITED if sampling.top_k or sampling.top_p < 1.0 else Choice.DRAWN


class CudaStep:
    """token ids, positions -> next token ids and logits, for all rows of a state at once.

    After `capture_steps` each `launch` computes one step of every row that is not idle and feeds its token back;
    `token` waits for one. `captures` counts the graphs.
    """

    def __init__(self, decoder: Decoder, cache: PagedCache, kernels: KernelSet) -> None:
        self.kernels = kernels
        self.state = StepState(decoder, cache, kernels.rows)
        self.captures = 0
        self._decoder = decoder
        self._cache = cache
        self._covered = coverage(cache.capacity)
        self._pool = torch.cuda.graph_pool_handle()  # of all graphs: they run one after another and keep nothing
        programs = triton.cdiv(decoder.spec.vocab, BLOCK)
        self._best = torch.zeros(kernels.rows, programs, device=decoder.device)
        self._first = torch.zeros(kernels.rows, programs, dtype=torch.int32, device=decoder.device)
        self._no_cutoff = torch.full((kernels.rows,), -torch.inf, device=decoder.device)
        self._tokens = self.state.history.numpy()
        self._events = [torch.cuda.Event() for _ in range(_IN_FLIGHT)]  # type: ignore[no-untyped-call]
        self._marks = 0
        self._graphs: dict[tuple[int, Choice], tuple[torch.cuda.CUDAGraph, Launched]] = {}
        self._choices: dict[Choice, torch.cuda.CUDAGraph] = {}

    def capture_steps(self) -> None:
        """Capture the step for each range of positions and each choice."""
        for covered in self._covered:
            for choice in Choice:
                self._graphs[covered, choice] = self.captured(partial(self._run, covered, choice))

    def capture_choices(self) -> None:
        """Capture the choices other than the greedy one by themselves, which `choose_again` takes."""
        for choice in (Choice.DRAWN, Choice.LIMITED):
            self._choices[choice], _ = self.captured(partial(self._choose, choice))

    def captured(self, run: Callable[[], Launched]) -> tuple[torch.cuda.CUDAGraph, Launched]:
        """`run` as a graph, and what it launches. It is run once before, at position 0: capture must not compile."""
        self.state.position.zero_()
        run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            launched = run()
        self.captures += 1
        self.state.position.fill_(-1)
        return graph, launched

    def launch(self, position: int, choice: Choice = Choice.GREEDY) -> int:
        """Queue a step of all rows, none of which stands beyond `position`; the mark that `token` takes."""
        graph, launched = self._graphs[self.covering(position), choice]
        graph.replay()
        self._decoder.paths.update(launched)
        return self.mark()

    def choose_again(self, position: int, choice: Choice) -> int:
        """Queue a choice from the logits of a single row's `position`, in place of the greedy one; its mark."""
        self.state.position.fill_(position)
        self._choices[choice].replay()
        return self.mark()

    def mark(self) -> int:
        """Remember what was queued until now."""
        self._marks += 1
        self._events[self._marks % _IN_FLIGHT].record()
        return self._marks

    def token(self, mark: int, row: int, position: int) -> int:
        """The token of a row's `position`, written by what was queued at `mark`, waited for.

        Raises:
            EngineError: no logit was a number.
        """
        assert self._marks - mark < _IN_FLIGHT, "the mark's event serves a later launch by now"
        self._events[mark % _IN_FLIGHT].synchronize()
        token = int(self._tokens[row, position])
        if token < 0:
            raise EngineError(
                f"The logits of position {position - 1} are not numbers: the weights are damaged, or too large for "
                "this dtype; try dtype=bf16 or fp32."
            )
        return token

    def covering(self, position: int) -> int:
        """The positions that the graph of a row at `position` covers."""
        return next(covered for covered in self._covered if position < covered)

    def end(self, layer: int, positions: int) -> Launched:
        """Launch a greedy step's end: the layers from `layer` on, the head, the choice."""
        return self._logits(layer, positions) + self._choose(Choice.GREEDY)

    def _run(self, positions: int, choice: Choice) -> Launched:
        return self._logits(0, positions) + self._choose(choice)

    def _logits(self, layer: int, positions: int) -> Launched:
        launched: Launched = Counter()
        layers = zip(self._decoder.weights.layers[layer:], self._cache.layers[layer:], strict=True)
        for weights, pool in layers:
            launched.update((op, "triton") for op in self.kernels.layer(self.state, weights, pool, positions))
        launched.update((op, "triton") for op in self.kernels.head(self.state, self._decoder.weights))
        return launched

    def _choose(self, choice: Choice) -> Launched:
        state, best, first = self.state, self.kernels.best, self.kernels.first
        launched: Launched = Counter()
        kept = self._no_cutoff
        if choice == Choice.LIMITED:
            kept = cutoff(state.logits, state.temperature, state.top_k, state.top_p)
            launched["cutoff", "aten"] += 1
        if choice != Choice.GREEDY:
            best, first = self._best, self._first
            gumbel_best(state.logits, kept, state.temperature, state.seed, state.position, best, first, pdl=True)
            launched["gumbel_best", "triton"] += 1
        greedy_token(best, first, state.position, state.history, self._decoder.weights.embed, state.x, pdl=True)
        launched["greedy_token", "triton"] += 1
        return launched
