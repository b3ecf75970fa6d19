"""What a decode step on CUDA reads and advances, row by row; all of it stays on the device but the tokens."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch

from skote.model.decoder import Decoder
from skote.runtime.paged_cache import PagedCache
from skote.types import Sampling

_CARRIED = ("position", "x", "table", "temperature", "top_k", "top_p", "seed")
"""What a row takes along when it goes on elsewhere."""


class StepState:
    """The rows of a step: where each stands, what it comes from, and how its next token is chosen.

    Attributes:
        position: int32 `[rows]`, the newest position of each row; negative: the row is idle.
        x: fp32 `[rows, hidden]`, the embedding of the token at `position`, and the residual stream within a step.
        logits: fp32 `[rows, vocab]`, of the last step.
        table: int32 `[rows, pages]`, where each row's positions lie in the cache.
        ropes: of each layer, cos and sin: fp32 `[positions, head_dim]`.
        history: int32 `[rows, positions + 1]`: each position's token, as the device writes it; in pinned memory of the
            host, or where `on_host` is false on the device.
        temperature, top_p: fp32 `[rows]`; top_k, seed: int64 `[rows]`. Temperature 0 is greedy.
    """

    def __init__(self, decoder: Decoder, cache: PagedCache, rows: int, *, on_host: bool = True) -> None:
        spec, device = decoder.spec, decoder.device
        self._embed, self._scale = decoder.weights.embed, spec.embedding_scale
        self.rows = rows
        self.position = torch.full((rows,), -1, dtype=torch.int32, device=device)
        self.x = torch.zeros(rows, spec.hidden, device=device)
        self.logits = torch.zeros(rows, spec.vocab, device=device)
        self.table = torch.zeros(rows, cache.pages_per_row, dtype=torch.int32, device=device)
        # Padding of a prefilled piece lies beyond the capacity: rotated by nothing, it is never attended to.
        places = torch.arange(cache.capacity, device=device)[None]
        beyond = (0, 0, 0, cache.span - cache.capacity)
        tables = dict(zip(spec.layer_ropes, decoder.rotations(places), strict=True))
        padded = {
            rope: (torch.nn.functional.pad(cos[0, 0], beyond), torch.nn.functional.pad(sin[0, 0], beyond))
            for rope, (cos, sin) in tables.items()
        }
        self.ropes = [padded[rope] for rope in spec.layer_ropes]
        self.history = torch.zeros(
            rows, cache.span + 1, dtype=torch.int32, device="cpu" if on_host else device, pin_memory=on_host
        )
        self.temperature = torch.zeros(rows, device=device)
        self.top_k = torch.zeros(rows, dtype=torch.int64, device=device)
        self.top_p = torch.ones(rows, device=device)
        self.seed = torch.zeros(rows, dtype=torch.int64, device=device)

    def feed(self, row: int, token: int, position: int) -> None:
        """Let the row's next step start from `token` at `position`."""
        self.position[row].fill_(position)
        self.x[row].copy_(self._embed[token]).mul_(self._scale)

    def embedded(self, ids: torch.Tensor) -> torch.Tensor:
        """The residual stream before the first layer, of the tokens `ids` [n]: fp32 `[n, hidden]`."""
        x = self._embed[ids].float()
        return x if self._scale == 1.0 else x * self._scale

    def choose_by(self, samplings: Sequence[Sampling]) -> None:
        """Choose the tokens of the first rows as `samplings` say, one a row, from their next step on."""
        columns: dict[str, list[float] | list[int]] = {
            "temperature": [min(each.temperature, torch.finfo(torch.float32).max) for each in samplings],
            "top_k": [each.top_k for each in samplings],
            "top_p": [each.top_p for each in samplings],
            "seed": [(each.seed + 2**63) % 2**64 - 2**63 for each in samplings],  # its 64 bits, as int64 holds them
        }
        for name, values in columns.items():
            column = getattr(self, name)[: len(samplings)]
            column.copy_(pinned(values, column), non_blocking=True)

    def first(self, rows: int) -> StepState:
        """The first `rows` rows, in the same memory."""
        part = copy.copy(self)
        part.rows = rows
        for name in (*_CARRIED, "logits", "history"):
            setattr(part, name, getattr(self, name)[:rows])
        return part

    def take(self, row: int, other: StepState, source: int) -> None:
        """Go on in `row` where the row `source` of `other` stands."""
        for name in _CARRIED:
            getattr(self, name)[row].copy_(getattr(other, name)[source])

    def idle_all(self) -> None:
        """Leave every row out, until it is fed or taken."""
        self.position.fill_(-1)

    def idle(self, start: int, stop: int) -> None:
        """Leave the rows from `start` to `stop` out of the steps to come."""
        self.position[start:stop].fill_(-1)


def pinned(values: Sequence[object], like: torch.Tensor) -> torch.Tensor:
    """`values` on the host, of the dtype of `like` and ready to be copied there without waiting for what is queued."""
    return torch.tensor(values, dtype=like.dtype, pin_memory=like.is_cuda)
