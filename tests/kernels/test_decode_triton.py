"""The decode kernels against their references: on CUDA, or raw through Triton's interpreter (see test_interpreter.py).

The interpreter knows neither bf16 nor PDL's instructions, so that it runs fp32 and fp16 with PDL off.
"""

import math

import pytest
import torch
import triton

from skote.kernels.flash_decode_triton import flash_decode_reference, flash_fold_kernel
from skote.kernels.flash_split_triton import flash_group_kernel, flash_stream_kernel, flash_tile_kernel
from skote.kernels.gate_up_gemv_triton import gate_up_gemv_kernel, gate_up_gemv_reference
from skote.kernels.greedy_token_triton import greedy_token_kernel
from skote.kernels.head_gemv_triton import head_gemv_kernel, head_gemv_reference
from skote.kernels.qkv_gemv_triton import qkv_gemv_kernel, qkv_gemv_reference
from skote.kernels.residual_gemv_triton import residual_gemv_kernel, residual_gemv_reference
from skote.kernels.rope import inverse_frequencies, rope_table

INTERPRETED = triton.knobs.runtime.interpret
pytestmark = [] if INTERPRETED else [pytest.mark.gpu]
DEVICE = "cpu" if INTERPRETED else "cuda"
DTYPES = [torch.float32, torch.float16] if INTERPRETED else [torch.float32, torch.float16, torch.bfloat16]
TOLERANCE = {
    torch.float32: 1e-5,
    torch.float16: 1e-3,
    torch.bfloat16: 8e-3,
}  # of what is rounded to the dtype at the end
EPS = 1e-5
PAGE = 32


def draw(*shape, dtype=torch.float32):
    return torch.randn(*shape, device=DEVICE).to(dtype)


def assert_near(result, expected, dtype):
    error = (result.float() - expected.float()).norm() / expected.float().norm()
    assert error < TOLERANCE[dtype], float(error)


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(7)


def integers(*values):
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("position", [0, 31, 32, 70])
def test_qkv_writes_rotated_heads_to_the_slot_of_the_position(dtype, position, biased):
    heads, kv_heads, head_dim, hidden = 3, 1, 16, 24
    cos, sin = rope_table(128, inverse_frequencies(head_dim, 10000.0).to(DEVICE))
    x, norm = draw(hidden), draw(hidden, dtype=dtype)
    weight = draw((heads + 2 * kv_heads) * head_dim, hidden, dtype=dtype)
    bias = draw(len(weight), dtype=dtype) * 3 if biased else None
    table = integers(2, 0, 3, 1)
    results = []
    for run in ("kernel", "reference"):
        q = torch.full((heads, head_dim), torch.nan, dtype=dtype, device=DEVICE)
        k, v = (torch.full((kv_heads, 128, head_dim), torch.nan, dtype=dtype, device=DEVICE) for _ in range(2))
        inputs = (cos, sin, integers(position), table, q, k, v)
        if run == "reference":
            qkv_gemv_reference(x, norm, weight, *inputs, eps=EPS, page=PAGE, bias=bias)
        else:
            qkv_gemv_kernel[(weight.shape[0] // 4,)](
                x, norm, weight, weight if bias is None else bias, *inputs, EPS, 128 * head_dim, HIDDEN=hidden,
                BLOCK=32, HEADS=heads, KV_HEADS=kv_heads, HEAD_DIM=head_dim, PAIRS=2, PAGE=PAGE, BIAS=biased,
                ROTATE=True, PDL=False,
            )  # fmt: skip
        results.append((q, k, v))
    slot = int(table[position // PAGE]) * PAGE + position % PAGE
    (q, k, v), (expected_q, expected_k, expected_v) = results
    assert_near(q, expected_q, dtype)
    assert_near(k[:, slot], expected_k[:, slot], dtype)
    assert_near(v[:, slot], expected_v[:, slot], dtype)
    assert int(k.isfinite().sum()) == int(v.isfinite().sum()) == kv_heads * head_dim  # no other slot was touched


def attend(q, k, v, position, table, splits, *, kernel="tile", fold=2):
    rows, heads, head_dim = q.shape
    kv_heads = k.shape[0]
    out = torch.full_like(q, torch.nan)
    sums = torch.full((rows, splits, heads, head_dim), torch.nan, device=DEVICE)
    stats = torch.full((rows, splits, 2, heads), torch.nan, device=DEVICE)
    scale = math.log2(math.e) / math.sqrt(head_dim)
    shape = {"HEADS": heads, "GROUP": heads // kv_heads, "HEAD_DIM": head_dim, "PAGE": PAGE, "PDL": False}
    strides = k.shape[1] * head_dim, table.shape[1]
    if kernel == "group":
        flash_group_kernel[(kv_heads, splits, rows)](
            q, k, v, position, table, sums, stats, scale, *strides, ROWS=16, TILE=16, **shape
        )
    elif kernel == "stream":
        flash_stream_kernel[(kv_heads, splits, rows)](
            q, k, v, position, table, sums, stats, scale, *strides, ROWS=16, BLOCK=16, STAGES=2, **shape
        )
    else:
        flash_tile_kernel[(heads, splits, rows)](
            q, k, v, position, table, out, sums, stats, scale, *strides, TILE=16, SINGLE=splits == 1, **shape
        )
    if splits > 1:
        split = PAGE if kernel == "stream" else 16
        flash_fold_kernel[(heads, 2, rows)](
            position, sums, stats, out, splits,
            HEADS=heads, HEAD_DIM=head_dim, SPLIT=split, FOLD=fold, DIMS=head_dim // 2, PDL=False,
        )  # fmt: skip
    return out


@pytest.mark.parametrize("kernel", ["tile", "group", "stream"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("position", [0, 1, 15, 16, 31, 32, 33, 127])
def test_attention_reads_pages_in_the_tables_order_and_nothing_beyond_the_position(dtype, position, kernel):
    heads, kv_heads, head_dim = 6, 2, 16
    q, k, v = draw(1, heads, head_dim, dtype=dtype), *(draw(kv_heads, 128, head_dim, dtype=dtype) for _ in range(2))
    table = integers(2, 0, 3, 1)
    beyond = torch.arange(position + 1, 128, device=DEVICE)
    slots = table[beyond // PAGE].long() * PAGE + beyond % PAGE
    k[:, slots] = torch.nan
    v[:, slots] = torch.nan
    out = attend(q, k, v, integers(position), table[None], splits=4 if kernel == "stream" else 8, kernel=kernel)
    assert_near(out, flash_decode_reference(q, k, v, integers(position), table[None], page=PAGE), dtype)


def test_one_split_gives_the_same_bits_with_and_without_the_fold():
    q, k, v = draw(1, 4, 16), draw(2, 64, 16), draw(2, 64, 16)
    table = integers(0, 1)[None]
    alone = attend(q, k, v, integers(9), table, splits=1)
    assert torch.equal(alone, attend(q, k, v, integers(9), table, splits=4))


@pytest.mark.parametrize("kernel", ["tile", "group", "stream"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_each_row_attends_to_its_own_pages_and_an_idle_one_to_nothing(dtype, kernel):
    q, k, v = draw(4, 6, 64, dtype=dtype), *(draw(2, 128, 64, dtype=dtype) for _ in range(2))
    table = torch.stack([integers(2, 0), integers(1, 3), integers(3, 1), integers(0, 2)])
    position = integers(40, -1, 0, 63)
    out = attend(q, k, v, position, table, splits=2 if kernel == "stream" else 4, kernel=kernel)
    assert_near(out, flash_decode_reference(q, k, v, position, table, page=PAGE), dtype)
    assert out[1].eq(0).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_idle_row_is_zero_where_one_split_holds_everything(dtype):
    q, k, v = draw(2, 4, 16, dtype=dtype), draw(2, 64, 16, dtype=dtype), draw(2, 64, 16, dtype=dtype)
    out = attend(q, k, v, integers(-1, 9), torch.stack([integers(0, 1)] * 2), splits=1)
    assert out[0].eq(0).all()
    assert out[1].ne(0).any()


@pytest.mark.parametrize("position", [0, 31, 32, 100])
def test_streamed_attention_gives_a_row_the_same_bits_in_every_batch_and_for_every_coverage(position):
    q, k, v = draw(4, 6, 16), draw(2, 128, 16), draw(2, 128, 16)
    pages = integers(2, 0, 3, 1)
    alone = attend(q[:1], k, v, integers(position), pages[None], splits=4, kernel="stream", fold=4)
    rows = integers(position, 127, -1, position)
    q[3] = q[0]
    crowded = attend(q, k, v, rows, torch.stack([pages] * 4), splits=4, kernel="stream", fold=4)
    assert torch.equal(crowded[0], alone[0])
    assert torch.equal(crowded[3], alone[0])
    covered = position // PAGE + 1
    if covered > 1:
        tight = attend(q[:1], k, v, integers(position), pages[None], splits=covered, kernel="stream", fold=4)
        assert torch.equal(tight, alone)


@pytest.mark.parametrize("turns", [1, 3])
@pytest.mark.parametrize("dtype", DTYPES)
def test_residual_adds_the_projection_in_place(dtype, turns):
    x, h, weight = draw(12), draw(24, dtype=dtype), draw(12, 24, dtype=dtype)
    expected = x.clone()
    residual_gemv_reference(expected, h, weight)
    cut = {"CHUNK": 16, "ROWS": 2, "TURNS": turns, "MMA": False, "PDL": False}
    residual_gemv_kernel[(6 // turns,)](x, h, weight, COLUMNS=24, **cut)
    assert_near(x, expected, torch.float32)


@pytest.mark.parametrize("turns", [1, 3])
@pytest.mark.parametrize("dtype", DTYPES)
def test_gate_up_takes_the_same_rows_of_both_matrices(dtype, turns):
    x, norm, weight = draw(24), draw(24, dtype=dtype), draw(24, 24, dtype=dtype)
    h, expected = (torch.full((12,), torch.nan, dtype=dtype, device=DEVICE) for _ in range(2))
    gate_up_gemv_reference(x, norm, weight, expected, eps=EPS)
    cut = {"CHUNK": 16, "ROWS": 2, "TURNS": turns, "MMA": False, "PDL": False}
    gate_up_gemv_kernel[(6 // turns,)](x, norm, weight, h, EPS, HIDDEN=24, INTERMEDIATE=12, **cut)
    assert_near(h, expected, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_head_ends_in_the_lowest_id_of_the_highest_logit_and_feeds_its_row_back(dtype):
    vocab, hidden, rows = 21, 24, 4
    x, norm, weight = draw(hidden), draw(hidden, dtype=dtype), draw(vocab, hidden, dtype=dtype)
    embed = draw(vocab, hidden, dtype=dtype)
    expected = torch.empty(vocab, device=DEVICE)
    head_gemv_reference(x, norm, weight, expected, eps=EPS)
    winner = int(expected.argmax())
    weight[20] = weight[winner]  # a tie, in the last and incomplete tile
    first_id = min(winner, 20)
    logits = torch.full((vocab,), torch.nan, device=DEVICE)
    best, first = torch.empty(6, device=DEVICE), torch.empty(6, dtype=torch.int32, device=DEVICE)
    head_gemv_kernel[(6,)](
        x, norm, weight, logits, best, first, EPS, vocab, HIDDEN=hidden, BLOCK=32, ROWS=rows, PDL=False
    )
    head_gemv_reference(x, norm, weight, expected, eps=EPS)
    assert_near(logits, expected, torch.float32)
    position, history = integers(3), torch.full((1, 8), -1, dtype=torch.int32, device=DEVICE)
    greedy_token_kernel[(1,)](
        best, first, position, history, embed, x, 6, 8, HIDDEN=hidden, BLOCK=32, PROGRAMS=8, PDL=False
    )
    assert int(position) == 4
    assert history.tolist() == [[-1, -1, -1, -1, first_id, -1, -1, -1]]
    assert torch.equal(x, embed[first_id].float())


def test_each_row_gets_its_own_token_and_an_idle_one_stays_as_it_is():
    embed = draw(30, 24)
    best = torch.tensor([[1.0, 5.0, 2.0], [9.0, 9.0, 9.0], [4.0, 4.0, 0.0]], device=DEVICE)
    first = torch.tensor([[3, 11, 20], [1, 2, 3], [7, 10, 29]], dtype=torch.int32, device=DEVICE)
    position, history = integers(0, -1, 2), torch.full((3, 5), -1, dtype=torch.int32, device=DEVICE)
    x = torch.full((3, 24), 0.5, device=DEVICE)
    greedy_token_kernel[(3,)](
        best, first, position, history, embed, x, 3, 5, HIDDEN=24, BLOCK=32, PROGRAMS=4, PDL=False
    )
    assert position.tolist() == [1, -1, 3]
    assert history.tolist() == [[-1, 11, -1, -1, -1], [-1] * 5, [-1, -1, -1, 7, -1]]
    assert torch.equal(x, torch.stack([embed[11], torch.full((24,), 0.5, device=DEVICE), embed[7]]))


def test_logits_that_are_not_numbers_give_no_token():
    best = torch.full((1, 3), torch.nan, device=DEVICE)
    first = torch.tensor([[3, 11, 20]], dtype=torch.int32, device=DEVICE)
    position, history = integers(2), torch.full((1, 5), 7, dtype=torch.int32, device=DEVICE)
    embed, x = draw(30, 24), torch.zeros(1, 24, device=DEVICE)
    greedy_token_kernel[(1,)](
        best, first, position, history, embed, x, 3, 5, HIDDEN=24, BLOCK=32, PROGRAMS=4, PDL=False
    )
    assert history.tolist() == [[7, 7, 7, -1, 7]]
    assert torch.equal(x[0], embed[0])
