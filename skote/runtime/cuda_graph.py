"""The decode step of one row on CUDA: from a token to the next one, captured in one CUDA graph.

Position, token and the next row of the residual stream stay on the device; the host queues steps and reads the tokens
from pinned memory, one step behind. A greedy step of L layers is 6 L + 2 kernels (5 L + 2 where one split of the
attention holds all positions); one that draws has its draw beside them. `batch_step` is the step of many rows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial

import torch

from skote.model.decoder import Decoder
from skote.runtime.captures import IN_FLIGHT, Captured, Captures
from skote.runtime.cuda_layers import cuda_layers
from skote.runtime.kernel_sets import SingleRow, coverage
from skote.runtime.paged_cache import PagedCache
from skote.runtime.serving import not_numbers
from skote.runtime.step_state import StepState
from skote.runtime.token_choice import Choice, Launched, TokenChoice


class CudaStep:
    """token id, position -> next token id and logits, for one row in the first pages of the cache.

    After `capture_steps` each `launch` computes one step and feeds its token back; `token` waits for one. `captures`
    counts the graphs.
    """

    def __init__(self, decoder: Decoder, cache: PagedCache, kernels: SingleRow) -> None:
        self.kernels = kernels
        self.state = StepState(decoder, cache, kernels.rows)
        self.state.table[0].copy_(torch.arange(cache.pages_per_row))
        self._captures = Captures()
        self._decoder = decoder
        self.layers = cuda_layers(decoder, cache, self.state)
        self._covered = coverage(cache.capacity)
        self._choose = TokenChoice(decoder, kernels.rows)
        self._tokens = self.state.history.numpy()
        self._events = [torch.cuda.Event() for _ in range(IN_FLIGHT)]  # type: ignore[no-untyped-call]
        self._marks = 0
        self._graphs: dict[tuple[int, Choice], Captured[Launched]] = {}
        self._choices: dict[Choice, Captured[Launched]] = {}

    @property
    def captures(self) -> int:
        """Graphs so far."""
        return self._captures.count

    def capture_steps(self) -> None:
        """Capture the step for each range of positions and each choice."""
        for covered in self._covered:
            for choice in Choice:
                self._graphs[covered, choice] = self.captured(partial(self._run, covered, choice))

    def capture_choices(self) -> None:
        """Capture the choices other than the greedy one by themselves, which `choose_again` takes."""
        for choice in (Choice.DRAWN, Choice.LIMITED):
            self._choices[choice] = self.captured(partial(self._run_choice, choice))

    def captured(self, run: Callable[[], Launched]) -> Captured[Launched]:
        """`run` as a graph, while the row stands at position 0; idle after that."""
        self.state.position.zero_()
        captured = self._captures(run)
        self.state.idle_all()
        return captured

    def launch(self, position: int, choice: Choice = Choice.GREEDY) -> int:
        """Queue a step of the row, which stands at `position` or before; the mark that `token` takes."""
        graph = self._graphs[self.covering(position), choice]
        graph.replay()
        self._decoder.paths.update(graph.launched)
        return self.mark()

    def choose_again(self, position: int, choice: Choice) -> int:
        """Queue a choice from the logits of `position`, in place of the greedy one; its mark."""
        self.state.position.fill_(position)
        self._choices[choice].replay()
        return self.mark()

    def mark(self) -> int:
        """Remember what was queued until now."""
        self._marks += 1
        self._events[self._marks % IN_FLIGHT].record()
        return self._marks

    def token(self, mark: int, position: int) -> int:
        """The token of `position`, written by what was queued at `mark`, waited for.

        Raises:
            EngineError: no logit was a number.
        """
        assert self._marks - mark < IN_FLIGHT, "the mark's event serves a later launch by now"
        self._events[mark % IN_FLIGHT].synchronize()
        token = int(self._tokens[0, position])
        if token < 0:
            raise not_numbers(position - 1)
        return token

    def covering(self, position: int) -> int:
        """The positions that the graph of a row at `position` covers."""
        return next(covered for covered in self._covered if position < covered)

    def end(self, layer: int, positions: int) -> Launched:
        """Launch a greedy step's end: the layers from `layer` on, the head, the choice."""
        return self._logits(layer, positions) + self._run_choice(Choice.GREEDY)

    def _run(self, positions: int, choice: Choice) -> Launched:
        return self._logits(0, positions) + self._run_choice(choice)

    def _logits(self, layer: int, positions: int) -> Launched:
        launched: Launched = Counter()
        for each in self.layers[layer:]:
            launched.update((op, "triton") for op in self.kernels.layer(self.state, each, positions))
        launched.update((op, "triton") for op in self.kernels.head(self.state, self._decoder.weights))
        return launched

    def _run_choice(self, choice: Choice) -> Launched:
        return self._choose(self.state, choice, self.kernels.best, self.kernels.first)
