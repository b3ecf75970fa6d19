"""What a decode step on CUDA reads and advances, row by row; all of it stays on the device but the tokens."""

from __future__ import annotations

import torch

from skote.model.decoder import Decoder
from skote.runtime.paged_cache import PagedCache
from skote.types import Sampling


class StepState:
    """The rows of a step: where each stands, what it comes from, and how its next token is chosen.

    Attributes:
        position: int32 `[rows]`, the newest position of each row; negative: the row is idle.
        x: fp32 `[rows, hidden]`, the embedding of the token at `position`, and the residual stream within a step.
        logits: fp32 `[rows, vocab]`, of the last step.
        table: int32 `[rows, pages]`, where each row's positions lie in the cache.
        cos, sin: fp32 `[positions, head_dim]`.
        history: int32 `[rows, positions + 1]`, pinned on the host: each position's token, as the device writes it.
        temperature, top_p: fp32 `[rows]`; top_k, seed: int64 `[rows]`. Temperature 0 is greedy.
    """

    def __init__(self, decoder: Decoder, cache: PagedCache, rows: int) -> None:
        spec, device = decoder.spec, decoder.device
        self._embed = decoder.weights.embed
        self.rows = rows
        self.position = torch.full((rows,), -1, dtype=torch.int32, device=device)
        self.x = torch.zeros(rows, spec.hidden, device=device)
        self.logits = torch.zeros(rows, spec.vocab, device=device)
        self.table = torch.zeros(rows, cache.table.shape[1], dtype=torch.int32, device=device)
        self.table[: min(rows, cache.rows)] = cache.table[:rows]
        # Padding of a prefill chunk lies beyond the capacity: rotated by nothing, it is never attended to.
        beyond = (0, 0, 0, cache.span - cache.capacity)
        self.cos, self.sin = (
            torch.nn.functional.pad(table[0, 0], beyond)
            for table in decoder.rope(torch.arange(cache.capacity, device=device)[None])
        )
        self.history = torch.zeros(rows, cache.span + 1, dtype=torch.int32, pin_memory=True)
        self.temperature = torch.zeros(rows, device=device)
        self.top_k = torch.zeros(rows, dtype=torch.int64, device=device)
        self.top_p = torch.ones(rows, device=device)
        self.seed = torch.zeros(rows, dtype=torch.int64, device=device)

    def feed(self, row: int, token: int, position: int) -> None:
        """Let the row's next step start from `token` at `position`."""
        self.position[row].fill_(position)
        self.x[row].copy_(self._embed[token])

    def choose_by(self, row: int, sampling: Sampling) -> None:
        """Choose the row's tokens as `sampling` says, from its next step on."""
        self.temperature[row].fill_(min(sampling.temperature, torch.finfo(torch.float32).max))
        self.top_k[row].fill_(sampling.top_k)
        self.top_p[row].fill_(sampling.top_p)
        self.seed[row].fill_((sampling.seed + 2**63) % 2**64 - 2**63)  # its 64 bits, as int64 holds them

    def take(self, row: int, other: StepState) -> None:
        """Go on in `row` where the first row of `other` stands."""
        for mine, theirs in (
            (self.position, other.position),
            (self.x, other.x),
            (self.temperature, other.temperature),
            (self.top_k, other.top_k),
            (self.top_p, other.top_p),
            (self.seed, other.seed),
        ):
            mine[row].copy_(theirs[0])

    def idle_all(self) -> None:
        """Leave every row out, until it is fed or taken."""
        self.position.fill_(-1)

    def idle(self, row: int) -> None:
        """Leave the row out of the steps to come."""
        self.position[row].fill_(-1)
