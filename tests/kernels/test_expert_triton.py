"""The kernels of a mixture of experts: on CUDA, or in the interpreter (see test_interpreter.py)."""

import pytest
import torch
import triton

from skote.kernels.expert_gemm_triton import block_rows, expert_gemm_kernel, expert_gemm_reference, grouped
from skote.kernels.expert_gemv_triton import (
    expert_down_gemv_kernel,
    expert_down_gemv_reference,
    expert_up_gemv_kernel,
    expert_up_gemv_reference,
)
from skote.kernels.experts import chosen_experts, many_rows_experts

INTERPRETED = triton.knobs.runtime.interpret
pytestmark = [] if INTERPRETED else [pytest.mark.gpu]
DEVICE = "cpu" if INTERPRETED else "cuda"
DTYPES = [torch.float32, torch.float16] if INTERPRETED else [torch.float32, torch.float16, torch.bfloat16]
TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}
HIDDEN, INTERMEDIATE, EPS = 24, 12, 1e-5


def draw(*shape, dtype=torch.float32):
    return torch.randn(*shape, device=DEVICE).to(dtype)


def unset(*shape, dtype=torch.float32):
    return torch.full(shape, torch.nan, dtype=dtype, device=DEVICE)


def assert_near(result, expected, dtype):
    error = (result.float() - expected.float()).norm() / expected.float().norm()
    assert error < TOLERANCE[dtype], float(error)


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(7)


def up(x, norm, weight, logits, count, *, normalised, activation="silu"):
    h = unset(count, INTERMEDIATE, dtype=weight.dtype)
    chosen, share = torch.full((count,), -1, dtype=torch.int32, device=DEVICE), unset(count)
    experts = len(weight)
    expert_up_gemv_kernel[(INTERMEDIATE // 2, count)](
        x, norm, weight, logits, h, chosen, share, EPS, HIDDEN=HIDDEN, INTERMEDIATE=INTERMEDIATE, EXPERTS=experts,
        ALL=triton.next_power_of_2(experts), CHOSEN=count, NORMALISED=normalised, ACTIVATION=activation, CHUNK=16,
        ROWS=2, MMA=False, PDL=False,
    )  # fmt: skip
    return h, chosen, share


@pytest.mark.parametrize(("experts", "count"), [(5, 2), (8, 8), (13, 3), (4, 1)])
@pytest.mark.parametrize("normalised", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_one_row_goes_through_the_experts_that_its_logits_choose(dtype, normalised, experts, count):
    x, norm, logits = draw(HIDDEN), draw(HIDDEN, dtype=dtype), 2 * draw(experts)
    weight = draw(experts, 2 * INTERMEDIATE, HIDDEN, dtype=dtype)
    wanted_h, wanted_share = unset(count, INTERMEDIATE, dtype=dtype), unset(count)
    wanted = torch.zeros(count, dtype=torch.int32, device=DEVICE)
    expert_up_gemv_reference(x, norm, weight, logits, wanted_h, wanted, wanted_share, eps=EPS, normalised=normalised)
    h, chosen, share = up(x, norm, weight, logits, count, normalised=normalised)
    assert chosen.tolist() == wanted.tolist() == logits.argsort(descending=True)[:count].tolist()
    assert_near(share, wanted_share, torch.float32)
    assert not normalised or abs(float(share.sum()) - 1) < 1e-6
    assert_near(h, wanted_h, dtype)

    down = draw(experts, HIDDEN, INTERMEDIATE, dtype=dtype)
    others = [expert for expert in range(experts) if expert not in chosen.tolist()]
    down[others] = torch.nan  # nothing of them is read
    before = draw(HIDDEN)
    after, expected = before.clone(), before.clone()
    expert_down_gemv_reference(expected, h, down, chosen, share)
    expert_down_gemv_kernel[(HIDDEN // 2,)](
        after, h, down, chosen, share, HIDDEN, COLUMNS=INTERMEDIATE, CHOSEN=count,
        SLOTS=triton.next_power_of_2(count), CHUNK=8, ROWS=2, PDL=False,
    )  # fmt: skip
    assert_near(after, expected, torch.float32)


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_of_equal_logits_the_first_experts_are_chosen_and_numbers_that_are_none_stay_inside():
    x, norm, weight = draw(HIDDEN), draw(HIDDEN), draw(6, 2 * INTERMEDIATE, HIDDEN)
    logits = torch.tensor([1.0, 3.0, 3.0, 0.0, 3.0, 2.0], device=DEVICE)
    _, chosen, share = up(x, norm, weight, logits, 3, normalised=True)
    assert chosen.tolist() == [1, 2, 4]
    torch.testing.assert_close(share, torch.full((3,), 1 / 3, device=DEVICE))
    _, chosen, share = up(x, norm, weight, torch.full((6,), torch.nan, device=DEVICE), 3, normalised=True)
    assert all(0 <= each < 6 for each in chosen.tolist())
    assert share.isnan().all()


@pytest.mark.parametrize(
    ("tokens", "experts", "count", "rows"), [(1, 5, 2, 16), (40, 5, 2, 16), (7, 60, 4, 16), (9, 3, 3, 4)]
)
def test_groups_hold_each_pair_once_with_pairs_of_its_expert(tokens, experts, count, rows):
    chosen = torch.rand(tokens, experts, device=DEVICE).topk(count).indices
    groups = grouped(chosen, experts, rows)
    flat, seen = chosen.flatten(), []
    for expert, first, end in zip(groups.expert.tolist(), groups.first.tolist(), groups.end.tolist(), strict=True):
        pairs = groups.order[first : min(end, first + rows)].tolist() if expert >= 0 else []
        assert all(int(flat[pair]) == expert for pair in pairs)
        seen += pairs
    assert sorted(seen) == list(range(tokens * count))


def test_blocks_grow_with_the_pairs_of_an_expert():
    sizes = [block_rows(pairs, 8, torch.bfloat16) for pairs in (1, 255, 256, 1023, 1024, 4096)]
    assert sizes == [16, 16, 64, 64, 128, 128]
    assert block_rows(4096, 8, torch.float32) == 16


def gemm(x, weight, groups, *, out_dtype, activation=""):
    outputs = weight.shape[1] // (2 if activation else 1)
    pairs = len(groups.order)
    out = unset(pairs, outputs, dtype=out_dtype)
    expert_gemm_kernel[(len(groups.expert), triton.cdiv(outputs, 16))](
        x, weight, out, *groups[:4], outputs, SHARED=pairs // len(x), COLUMNS=x.shape[1], ROWS=groups.rows, TILE=16,
        BLOCK=16, STAGES=1, ACTIVATION=activation,
    )  # fmt: skip
    return out


@pytest.mark.parametrize(("tokens", "experts", "count"), [(1, 5, 2), (37, 5, 2), (16, 40, 3)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_many_rows_go_through_their_experts(dtype, tokens, experts, count):
    x, logits = draw(tokens, HIDDEN, dtype=dtype), draw(tokens, experts)
    gate_up = draw(experts, 2 * INTERMEDIATE, HIDDEN, dtype=dtype)
    down = draw(experts, HIDDEN, INTERMEDIATE, dtype=dtype)
    chosen, share = chosen_experts(logits, count, normalised=True)
    groups = grouped(chosen, experts, 16)
    h = gemm(x, gate_up, groups, out_dtype=dtype, activation="silu")
    assert_near(h, expert_gemm_reference(x, gate_up, chosen, activation="silu"), dtype)
    fed = gemm(h, down, groups, out_dtype=torch.float32)
    assert_near(fed, expert_gemm_reference(h, down, chosen), torch.float32)
    mixed = (fed.view(tokens, count, HIDDEN) * share[..., None]).sum(1)
    whole = many_rows_experts(x[None], gate_up, down, chosen[None], share[None], "silu")[0]
    assert_near(mixed, whole, dtype)


def test_a_rows_bits_do_not_depend_on_who_shares_its_expert():
    x, logits, gate_up = draw(50, HIDDEN), draw(50, 4), draw(4, 2 * INTERMEDIATE, HIDDEN)
    chosen, _ = chosen_experts(logits, 2, normalised=True)
    options = {"out_dtype": torch.float32, "activation": "silu"}
    together = gemm(x, gate_up, grouped(chosen, 4, 16), **options).view(50, 2, -1)
    for row in (0, 17, 49):
        own = slice(row, row + 1)
        alone = gemm(x[own], gate_up, grouped(chosen[own], 4, 16), **options)
        assert torch.equal(alone, together[row]) or INTERPRETED  # whose products are numpy's
        assert_near(alone, together[row], torch.float32)
