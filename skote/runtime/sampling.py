"""From logits to the next token."""

from __future__ import annotations

import torch

from skote.runtime.cutoff import COLDEST, cutoff
from skote.types import Sampling


def next_token(logits: torch.Tensor, sampling: Sampling, generator: torch.Generator | None) -> int:
    """The next token id from `logits` [vocab]; greedy ties go to the lowest id.

    Sampling drops what lies below `cutoff`, divides by the temperature, and draws from what is left with `generator`,
    which must be given then.
    """
    if sampling.greedy:
        return int(logits.argmax())
    wide = logits.float()
    # Counted from the largest, which then stays 0 however small the temperature is: inf - inf has no softmax.
    scaled = (wide - wide.max()) / max(sampling.temperature, COLDEST)
    if sampling.top_k or sampling.top_p < 1.0:
        scaled = scaled.masked_fill(wide < cutoff(wide[None], *_row(sampling, wide.device)), -torch.inf)
    return int(torch.multinomial(scaled.softmax(-1), 1, generator=generator))


def request_generator(sampling: Sampling, device: torch.device) -> torch.Generator | None:
    """A generator seeded for one request, or None where none is needed."""
    return None if sampling.greedy else torch.Generator(device=device).manual_seed(sampling.seed)


def _row(sampling: Sampling, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Temperature, top-k and top-p as `cutoff` takes them, one row each."""
    return (
        torch.tensor([sampling.temperature], dtype=torch.float32, device=device),
        torch.tensor([sampling.top_k], device=device),
        torch.tensor([sampling.top_p], dtype=torch.float32, device=device),
    )
