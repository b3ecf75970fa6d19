"""A mixture of experts against one written from the formula, a token and an expert at a time."""

from __future__ import annotations

import pytest
import torch

from skote.kernels.experts import chosen_experts, many_rows_experts, one_row_experts


def drawn(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def by_loops(
    x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, chosen: torch.Tensor, share: torch.Tensor
) -> torch.Tensor:
    out = torch.zeros(x.shape, dtype=torch.float64)
    for b in range(x.shape[0]):
        for t in range(x.shape[1]):
            for expert, weight in zip(chosen[b, t].tolist(), share[b, t].tolist(), strict=True):
                gate, up = (gate_up[expert].double() @ x[b, t].double()).chunk(2)
                out[b, t] += weight * (down[expert].double() @ (gate * gate.sigmoid() * up))
    return out


@pytest.mark.parametrize("normalised", [True, False])
def test_shares_by_hand(normalised: bool) -> None:
    chosen, share = chosen_experts(torch.tensor([0.0, 2.0, 1.0]).exp().log()[None], 2, normalised=normalised)
    whole = 1 + torch.e**2 + torch.e
    kept = torch.e**2 + torch.e if normalised else whole

    assert chosen.tolist() == [[1, 2]]
    torch.testing.assert_close(share, torch.tensor([[torch.e**2 / kept, torch.e / kept]]))


@pytest.mark.parametrize(("batch", "tokens"), [(1, 1), (1, 7), (3, 4)])
def test_the_chosen_experts_of_each_row(batch: int, tokens: int) -> None:
    x, gate_up, down = drawn(batch, tokens, 6, seed=1), drawn(5, 8, 6, seed=2), drawn(5, 6, 4, seed=3)
    chosen, share = chosen_experts(drawn(batch, tokens, 5, seed=4), 2, normalised=False)
    expected = by_loops(x, gate_up, down, chosen, share)

    many = many_rows_experts(x, gate_up, down, chosen, share, "silu")

    torch.testing.assert_close(many.double(), expected, rtol=1e-5, atol=1e-5)
    if batch == tokens == 1:
        one = one_row_experts(x, gate_up, down, chosen, share, "silu")
        torch.testing.assert_close(one.double(), expected, rtol=1e-5, atol=1e-5)


def test_experts_that_nobody_chose_are_not_read() -> None:
    x, gate_up, down = drawn(1, 1, 6, seed=1), drawn(5, 8, 6, seed=2), drawn(5, 6, 4, seed=3)
    chosen, share = torch.tensor([[[3, 1]]]), torch.tensor([[[0.5, 0.5]]])
    before = [run(x, gate_up, down, chosen, share, "silu") for run in (one_row_experts, many_rows_experts)]
    for other in (0, 2, 4):
        gate_up[other] = down[other] = torch.nan

    after = [run(x, gate_up, down, chosen, share, "silu") for run in (one_row_experts, many_rows_experts)]
    assert all(one.equal(other) for one, other in zip(before, after, strict=True))
