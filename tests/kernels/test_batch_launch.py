"""The launchers of the multi-row step, with its own tiles and PDL on, in the order of a step."""

import pytest
import torch

pytest.importorskip("triton")

from skote.kernels.add_rms_norm_triton import add_rms_norm, add_rms_norm_reference
from skote.kernels.flash_decode_triton import flash_decode, flash_decode_reference
from skote.kernels.gate_up_gemm_triton import gate_up_gemm, gate_up_gemm_reference
from skote.kernels.greedy_token_triton import greedy_token
from skote.kernels.head_gemm_triton import head_gemm, head_gemm_reference
from skote.kernels.launch import MAX_ROWS
from skote.kernels.qkv_gemm_triton import qkv_gemm, qkv_gemm_reference
from skote.kernels.rope import inverse_frequencies, rope_table
from skote.kernels.split_gemm_triton import split_gemm, split_gemm_reference
from skote.kernels.tiles import batch_tiles

DEVICE, PDL = "cuda", True
TOLERANCE = {torch.float32: 1e-4, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}  # two roundings to the dtype in a row
EPS = 1e-5


def draw(*shape, dtype=torch.float32):
    return torch.randn(*shape, device=DEVICE).to(dtype)


def assert_near(result, expected, dtype):
    error = (result.float() - expected.float()).norm() / expected.float().norm()
    assert error < TOLERANCE[dtype], float(error)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    ("hidden", "intermediate", "heads", "kv_heads", "head_dim"), [(576, 1536, 9, 3, 64), (2048, 8192, 32, 8, 64)]
)
def test_a_step_of_one_layer_equals_the_references(dtype, hidden, intermediate, heads, kv_heads, head_dim):
    torch.manual_seed(7)
    tiles, vocab, pages = batch_tiles(hidden, intermediate, head_dim, dtype.itemsize), 1003, 3
    cut = tiles.attention
    rows = heads + 2 * kv_heads
    cos, sin = rope_table(pages * cut.page, inverse_frequencies(head_dim, 10000.0).to(DEVICE))
    sizes = ((rows * head_dim, hidden), (hidden, heads * head_dim), (2 * intermediate, hidden), (hidden, intermediate))
    qkv, o, gate_up, down, lm_head = (draw(*size, dtype=dtype) / size[1] ** 0.5 for size in (*sizes, (vocab, hidden)))
    norm, embed = draw(hidden, dtype=dtype), draw(vocab, hidden, dtype=dtype)
    position = torch.tensor([0, 127, 128, -1, 383 - 1, 200, 5, 64] * 2, dtype=torch.int32, device=DEVICE)
    table = torch.randperm(MAX_ROWS * pages, device=DEVICE).to(torch.int32).view(MAX_ROWS, pages)
    k, v = (draw(kv_heads, MAX_ROWS * pages * cut.page, head_dim, dtype=dtype) for _ in range(2))
    x, q = draw(MAX_ROWS, hidden), torch.zeros(MAX_ROWS, heads, head_dim, dtype=dtype, device=DEVICE)
    normed = torch.zeros(MAX_ROWS, hidden, dtype=dtype, device=DEVICE)
    o_parts, down_parts = (torch.zeros(each.splits, MAX_ROWS, hidden, device=DEVICE) for each in (tiles.o, tiles.down))
    attended, h = torch.zeros_like(q), torch.zeros(MAX_ROWS, intermediate, dtype=dtype, device=DEVICE)
    sums = torch.full((MAX_ROWS, pages, heads, head_dim), torch.nan, device=DEVICE)
    stats = torch.full((MAX_ROWS, pages, 2, heads), torch.nan, device=DEVICE)
    logits = torch.zeros(MAX_ROWS, vocab, device=DEVICE)
    best = torch.zeros(MAX_ROWS, -(-vocab // tiles.head.rows), device=DEVICE)
    first = torch.zeros_like(best, dtype=torch.int32)
    history = torch.full((MAX_ROWS, pages * cut.page + 1), -1, dtype=torch.int32, device=DEVICE)
    other_x, other_k, other_v, other_q, other_h = x.clone(), k.clone(), v.clone(), q.clone(), h.clone()
    other_logits, other_normed = logits.clone(), normed.clone()

    add_rms_norm(x, None, norm, normed, eps=EPS, pdl=PDL)
    qkv_gemm(normed, qkv, cos, sin, position, table, q, k, v, page=cut.page, tile=tiles.qkv, pdl=PDL)
    flash_decode(q, k, v, position, table, attended, sums, stats, positions=pages * cut.page, cut=cut, pdl=PDL)
    split_gemm(attended.flatten(1), o, o_parts, tile=tiles.o, pdl=PDL)
    add_rms_norm(x, o_parts, norm, normed, eps=EPS, pdl=PDL)
    gate_up_gemm(normed, gate_up, h, tile=tiles.gate_up, pdl=PDL)
    split_gemm(h, down, down_parts, tile=tiles.down, pdl=PDL)
    add_rms_norm(x, down_parts, norm, normed, eps=EPS, pdl=PDL)
    residual = x.clone()
    head_gemm(normed, lm_head, logits, best, first, tile=tiles.head, pdl=PDL)
    newest = position.clone()
    greedy_token(best, first, position, history, embed, x, pdl=PDL)

    def then(delta):
        add_rms_norm_reference(other_x, delta, norm, other_normed, eps=EPS)
        return other_normed

    qkv_gemm_reference(then(None), qkv, cos, sin, newest, table, other_q, other_k, other_v, page=cut.page)
    mixed = flash_decode_reference(other_q, other_k, other_v, newest, table, page=cut.page)
    gate_up_gemm_reference(then(split_gemm_reference(mixed.flatten(1), o)), gate_up, other_h)
    head_gemm_reference(then(split_gemm_reference(other_h, down)), lm_head, other_logits)

    live = newest >= 0
    for mine, reference in ((k, other_k), (v, other_v), (attended, mixed), (residual, other_x), (logits, other_logits)):
        rows_of = live if mine.shape[0] == MAX_ROWS else slice(None)
        assert_near(mine[rows_of], reference[rows_of], dtype)
    assert attended[~live].eq(0).all()
    tokens = logits.argmax(1)
    assert torch.equal(position, torch.where(live, newest + 1, newest))
    assert torch.equal(x, torch.where(live[:, None], embed[tokens].float(), residual))
    for row in range(MAX_ROWS):
        written = (history[row] >= 0).nonzero().flatten().tolist()
        assert written == ([int(newest[row]) + 1] if live[row] else [])
        assert all(history[row, place] == tokens[row] for place in written)
