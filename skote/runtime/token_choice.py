"""The end of a step on CUDA: from logits to tokens, by the greedy choice or by a draw, fed back as the next rows."""

from __future__ import annotations

import enum
from collections import Counter

import torch

from skote.kernels.greedy_token_triton import greedy_token
from skote.kernels.gumbel_best_triton import BLOCK, gumbel_best
from skote.model.decoder import Decoder
from skote.runtime.cutoff import cutoff
from skote.runtime.step_state import StepState
from skote.types import Sampling

Launched = Counter[tuple[str, str]]
"""How often each (op, path) ran."""


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


class TokenChoice:
    """Launches the choice of up to `rows` rows; has the room that draws need."""

    def __init__(self, decoder: Decoder, rows: int) -> None:
        programs = -(-decoder.spec.vocab // BLOCK)
        self._embed, self._scale = decoder.weights.embed, decoder.spec.embedding_scale
        self._best = torch.zeros(rows, programs, device=decoder.device)
        self._first = torch.zeros(rows, programs, dtype=torch.int32, device=decoder.device)
        self._no_cutoff = torch.full((rows,), -torch.inf, device=decoder.device)

    def __call__(self, state: StepState, choice: Choice, best: torch.Tensor, first: torch.Tensor) -> Launched:
        """Choose for the rows of `state`: from its logits, or greedily from their first stage, `best` and `first`
        [rows or more, programs]."""
        launched: Launched = Counter()
        rows = state.rows
        best, first, kept = best[:rows], first[:rows], self._no_cutoff[:rows]
        if choice == Choice.LIMITED:
            kept = cutoff(state.logits, state.temperature, state.top_k, state.top_p)
            launched["cutoff", "aten"] += 1
        if choice != Choice.GREEDY:
            best, first = self._best[:rows], self._first[:rows]
            gumbel_best(state.logits, kept, state.temperature, state.seed, state.position, best, first, pdl=True)
            launched["gumbel_best", "triton"] += 1
        greedy_token(best, first, state.position, state.history, self._embed, state.x, pdl=True, scale=self._scale)
        launched["greedy_token", "triton"] += 1
        return launched
