"""From logits to the next token."""

from __future__ import annotations

import torch

from skote.types import Sampling

_COLDEST = torch.finfo(torch.float32).tiny  # a smaller divisor is 0 in fp32


def next_token(logits: torch.Tensor, sampling: Sampling, generator: torch.Generator | None) -> int:
    """The next token id from `logits` [vocab]; greedy ties go to the lowest id.

    Sampling divides by the temperature, keeps the smallest set of most likely tokens whose probability reaches `top_p`
    (Holtzman et al., arXiv 1904.09751), and draws from it with `generator`, which must be given then.
    """
    if sampling.greedy:
        return int(logits.argmax())
    wide = logits.float()
    # Counted from the largest, which then stays 0 however small the temperature is: inf - inf has no softmax.
    probabilities = ((wide - wide.max()) / max(sampling.temperature, _COLDEST)).softmax(-1)
    if sampling.top_p < 1.0:
        ordered, order = probabilities.sort(descending=True)
        before = ordered.cumsum(-1) - ordered
        ordered[before >= sampling.top_p] = 0.0  # the first token always stays: nothing comes before it
        probabilities = torch.zeros_like(probabilities).scatter_(0, order, ordered)
    return int(torch.multinomial(probabilities, 1, generator=generator))


def request_generator(sampling: Sampling, device: torch.device) -> torch.Generator | None:
    """A generator seeded for one request, or None where none is needed."""
    return None if sampling.greedy else torch.Generator(device=device).manual_seed(sampling.seed)
