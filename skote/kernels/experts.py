"""A mixture of experts: the chosen feed-forwards of each token, weighted and added (Shazeer et al., arXiv 1701.06538).

Each expert is a feed-forward of its own, gate and up in one matrix `[2 * intermediate, hidden]`, down in another.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from skote.kernels.activation import activated


def chosen_experts(logits: torch.Tensor, count: int, *, normalised: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The `count` likeliest experts of each row of `logits` [..., experts], and their shares: `[..., count]` each.

    A share is the softmax over all experts in fp32; `normalised` shares are divided by their sum.
    """
    share, chosen = logits.float().softmax(-1).topk(count, dim=-1)
    return chosen, share / share.sum(-1, keepdim=True) if normalised else share


def one_row_experts(
    x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, chosen: torch.Tensor, share: torch.Tensor, name: str
) -> torch.Tensor:
    """`x` [1, 1, hidden] through the experts `chosen`, `[1, 1, count]` like `share`; fp32. To be compiled.

    Written as reductions, like `linear.matvec`: a compiler reads the chosen experts' weights once and no others.
    """
    picked = chosen.view(-1)
    up = (gate_up[picked].float() * x.view(-1).float()).sum(-1)
    fed = (down[picked].float() * activated(up, name, gated=True)[:, None]).sum(-1)
    return (fed * share.view(-1, 1)).sum(0).view(1, 1, -1)


def many_rows_experts(
    x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, chosen: torch.Tensor, share: torch.Tensor, name: str
) -> torch.Tensor:
    """`x` [batch, tokens, hidden] through the experts `chosen` [batch, tokens, count]; fp32, one expert after another.

    Rows are rounded to the weights' dtype before each product.
    """
    rows, picked = x.flatten(0, 1).to(gate_up.dtype), chosen.flatten(0, 1)
    out = torch.zeros(rows.shape, device=x.device)
    for expert in torch.unique(picked).tolist():
        row, place = torch.where(picked == expert)
        up = F.linear(rows[row], gate_up[expert]).float()
        fed = F.linear(activated(up, name, gated=True).to(down.dtype), down[expert]).float()
        out.index_add_(0, row, fed * share.flatten(0, 1)[row, place, None])
    return out.view(x.shape)
