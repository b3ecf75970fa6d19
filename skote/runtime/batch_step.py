"""The decode step of many rows on CUDA: captured for a few sizes, of which each is the first rows of one state.

The layers are captured for each size and range of positions, the choice of tokens for each size and way to choose: a
step is two graphs, one after the other. Graphs of up to 16 rows share a tile of products, and differ in what is done
row by row. Positions, tokens and the next rows of the residual stream stay on the device; tokens are copied to the
host behind the step, which may already queue the next one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from skote.kernels.launch import ROW_TILES
from skote.model.decoder import Decoder
from skote.runtime.captures import Captured, Captures, TokenRing
from skote.runtime.cuda_layers import cuda_layers
from skote.runtime.kernel_sets import MultiRow, coverage
from skote.runtime.paged_cache import PagedCache
from skote.runtime.step_state import StepState
from skote.runtime.token_choice import Choice, Launched, TokenChoice

_GROWTH = 4  # of the ranges of positions; a range costs a capture for each size, and idle programs next to nothing


def tile_of(size: int) -> int:
    """The rows of the kernels' tile that takes `size` rows."""
    return next(rows for rows in ROW_TILES if rows >= size)


class BatchStep:
    """token ids, positions -> next token ids, for the rows of `state` that are not idle.

    Args:
        kernels: by the rows of their tile, one for each tile of `sizes`; steps may share them.
        sizes: ascending; rows beyond the size of a launch must be idle.
    """

    def __init__(
        self,
        decoder: Decoder,
        cache: PagedCache,
        kernels: Mapping[int, MultiRow],
        sizes: Sequence[int],
        captures: Captures,
    ) -> None:
        rows = tile_of(sizes[-1])
        self.state = StepState(decoder, cache, rows, on_host=False)
        self._decoder = decoder
        self.layers = cuda_layers(decoder, cache, self.state)
        self._kernels = kernels
        self._sizes = sizes
        self._captures = captures
        self._covered = coverage(cache.capacity, _GROWTH)
        self._choose = TokenChoice(decoder, rows)
        self._newest = self.state.position.clone()
        self._ring = TokenRing(rows)
        self._layers: dict[tuple[int, int], Captured[Launched]] = {}
        self._choices: dict[tuple[int, Choice], Captured[Launched]] = {}

    def capture_layers(self) -> None:
        """Capture the layers and the head for each size and range of positions."""
        for size in self._sizes:
            for covered in self._covered:
                self._layers[size, covered] = self.captured(partial(self.run_layers, size, covered))

    def capture_choices(self) -> None:
        """Capture each choice for each size."""
        for size in self._sizes:
            for choice in Choice:
                self._choices[size, choice] = self.captured(partial(self._run_choice, size, choice))

    def captured(self, run: Callable[[], Launched]) -> Captured[Launched]:
        """`run` as a graph, while all rows stand at position 0; idle after that."""
        self.state.position.zero_()
        captured = self._captures(run)
        self.state.idle_all()
        return captured

    def launch(self, size: int, newest: int, choice: Choice) -> int:
        """Queue a step of the first `size` rows, none of which stands beyond `newest`; its mark."""
        self.launch_layers(size, newest)
        return self.launch_choice(size, choice)

    def launch_layers(self, size: int, newest: int) -> None:
        """Queue the first part of a step, up to the logits."""
        self._replay(self._layers[size, next(covered for covered in self._covered if newest < covered)])

    def launch_choice(self, size: int, choice: Choice) -> int:
        """Queue the second part, after which each row that is not idle stands one position further; its mark."""
        self._replay(self._choices[size, choice])
        return self.send()

    def send(self) -> int:
        """Queue the copy of the rows' newest tokens to the host; its mark."""
        return self._ring.send(self._newest)

    def tokens(self, mark: int) -> list[int]:
        """The tokens of a mark by row, waited for; of idle rows, anything. Negative where no logit was a number."""
        return self._ring.read(mark)

    def run_layers(self, size: int, positions: int, layer: int = 0) -> Launched:
        """Launch the layers from `layer` on, and the head, where at most `positions` positions are in use."""
        tile = tile_of(size)
        kernels, rows, live = self._kernels[tile], self.state.first(tile), self.state.first(size)
        weights = self._decoder.weights
        launched: Launched = Counter()
        for each in self.layers[layer:]:
            launched.update((op, "triton") for op in kernels.layer(rows, live, each, positions))
        launched.update((op, "triton") for op in kernels.head(rows, weights))
        return launched

    def _run_choice(self, size: int, choice: Choice) -> Launched:
        kernels, live = self._kernels[tile_of(size)], self.state.first(size)
        launched = self._choose(live, choice, kernels.best, kernels.first)
        place = live.position.clamp(min=0).long()[:, None]
        self._newest[:size].copy_(live.history.gather(1, place)[:, 0])
        return launched

    def _replay(self, captured: Captured[Launched]) -> None:
        captured.replay()
        self._decoder.paths.update(captured.launched)
