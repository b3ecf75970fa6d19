"""Which tokens a draw may take: the smallest logit that top-k and top-p leave."""

from __future__ import annotations

import torch

COLDEST = torch.finfo(torch.float32).tiny
"""The lowest temperature that a logit is divided by; a smaller divisor is 0 in fp32."""

_UNIT = 2**40  # of a probability; its sums over any vocabulary fit into int64


def cutoff(logits: torch.Tensor, temperature: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """The smallest logit of each row that may be drawn: fp32 `[rows]`.

    As in Transformers and vLLM: logits / temperature, then the `top_k` largest, then the smallest set of those whose
    probability among them reaches `top_p` (Holtzman et al., arXiv 1904.09751). What ties with the last of either is
    kept too, so that one number says it all. A row with temperature 0 has no limit, nor have top_k 0 and top_p 1.

    No host synchronisation, so that a CUDA graph may capture it; a row does not depend on the others; and the same
    bits at every call: probabilities are summed as whole numbers, in which the order does not matter.

    Args:
        logits: fp32 `[rows, vocab]`.
        temperature, top_p: fp32 `[rows]`, at least 0 and in (0, 1].
        top_k: int64 `[rows]`, at least 0.
    """
    vocab = logits.shape[-1]
    ordered = logits.sort(-1, descending=True).values
    last = torch.where(top_k > 0, top_k.clamp(max=vocab), vocab) - 1
    among_k = ordered >= ordered.gather(-1, last[:, None])
    # Counted from the largest, which then stays 0 however small the temperature is: inf - inf has no softmax.
    scaled = (ordered - ordered[:, :1]) / temperature.clamp(min=COLDEST)[:, None]
    units = (scaled.masked_fill(~among_k, -torch.inf).softmax(-1) * _UNIT).long()
    before = units.cumsum(-1) - units
    wanted = (top_p.double() * _UNIT).long().clamp(min=1)  # so that the largest always stays: nothing is before it
    nucleus = before < wanted[:, None]
    kept = (among_k & (nucleus | (top_p >= 1.0)[:, None])) | (temperature == 0.0)[:, None]
    return ordered.masked_fill(~kept, torch.inf).amin(-1)
