"""The single-row kernels, and the sum that measures reads, at sizes that fill no tile, block or chunk: on CUDA, or raw
through Triton's interpreter (see test_interpreter.py).

The interpreter knows neither bf16 nor PDL's instructions, so that it runs fp32 and fp16 with PDL off.
"""

import math

import pytest
import torch
import triton

from skote.kernels.flash_decode_triton import flash_decode_reference, flash_fold_kernel
from skote.kernels.flash_split_triton import flash_group_kernel, flash_stream_kernel, flash_tile_kernel
from skote.kernels.gate_up_gemv_triton import gate_up_gemv_kernel, gate_up_gemv_reference
from skote.kernels.greedy_token_triton import greedy_token_kernel, greedy_token_reference
from skote.kernels.head_gemv_triton import head_gemv_kernel, head_gemv_reference
from skote.kernels.launch import padded
from skote.kernels.qkv_gemv_triton import qkv_gemv_kernel, qkv_gemv_reference
from skote.kernels.read_sum_triton import read_sum_kernel, read_sum_reference
from skote.kernels.residual_gemv_triton import residual_gemv_kernel, residual_gemv_reference
from skote.kernels.rope import inverse_frequencies, rope_table

INTERPRETED = triton.knobs.runtime.interpret
pytestmark = [] if INTERPRETED else [pytest.mark.gpu]
DEVICE = "cpu" if INTERPRETED else "cuda"
DTYPES = [torch.float32, torch.float16] if INTERPRETED else [torch.float32, torch.float16, torch.bfloat16]
TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}
EPS = 1e-5
PAGE = 16
COLUMNS = [1, 33, 100, 576]
"""Of a matrix's row: shorter than a chunk, a little longer, several and a part of one."""


def draw(*shape, dtype=torch.float32):
    """The same numbers on every device: of a single one the relative error depends on which it is."""
    return torch.randn(*shape).to(DEVICE, dtype)


def unset(*shape, dtype=torch.float32):
    return torch.full(shape, torch.nan, dtype=dtype, device=DEVICE)


def integers(*values):
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def assert_near(result, expected, dtype):
    error = (result.float() - expected.float()).norm() / expected.float().norm()
    assert error < TOLERANCE[dtype], float(error)


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(11)


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim", "pairs"), [(1, 1, 4, 1), (5, 1, 8, 4), (7, 3, 48, 8)])
@pytest.mark.parametrize("hidden", COLUMNS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_qkv(dtype, hidden, heads, kv_heads, head_dim, pairs):
    """One head, a group of five, and a head that is no power of two."""
    slots, at = 3 * PAGE, 21
    cos, sin = rope_table(slots, inverse_frequencies(head_dim, 10000.0).to(DEVICE))
    x, norm = draw(hidden), draw(hidden, dtype=dtype)
    weight = draw((heads + 2 * kv_heads) * head_dim, hidden, dtype=dtype)
    table, results = integers(1, 2, 0), []
    for run in ("kernel", "reference"):
        q = unset(heads, head_dim, dtype=dtype)
        k, v = (unset(kv_heads, slots, head_dim, dtype=dtype) for _ in range(2))
        inputs = (cos, sin, integers(at), table, q, k, v)
        if run == "reference":
            qkv_gemv_reference(x, norm, weight, *inputs, eps=EPS, page=PAGE)
        else:
            qkv_gemv_kernel[(len(weight) // 2 // pairs,)](
                x, norm, weight, weight, *inputs, EPS, slots * head_dim, HIDDEN=hidden, BLOCK=padded(hidden),
                HEADS=heads, KV_HEADS=kv_heads, HEAD_DIM=head_dim, PAIRS=pairs, PAGE=PAGE, BIAS=False, ROTATE=True,
                PDL=False,
            )  # fmt: skip
        results.append((q, k, v))
    (q, *caches), (expected_q, *expected) = results
    assert_near(q, expected_q, dtype)
    for cache, wanted in zip(caches, expected, strict=True):
        written = wanted.isfinite()
        assert torch.equal(cache.isfinite(), written)
        assert int(written.sum()) == kv_heads * head_dim
        assert_near(cache[written], wanted[written], dtype)


@pytest.mark.parametrize(("rows", "at_once", "turns"), [(1, 1, 1), (6, 2, 3), (20, 4, 5)])
@pytest.mark.parametrize("columns", COLUMNS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_residual(dtype, columns, rows, at_once, turns):
    x, h, weight = draw(rows), draw(columns, dtype=dtype), draw(rows, columns, dtype=dtype)
    expected = x.clone()
    residual_gemv_reference(expected, h, weight)
    residual_gemv_kernel[(rows // at_once // turns,)](
        x, h, weight, COLUMNS=columns, CHUNK=32, ROWS=at_once, TURNS=turns, MMA=False, PDL=False
    )
    assert_near(x, expected, torch.float32)


@pytest.mark.parametrize(("intermediate", "at_once", "turns"), [(1, 1, 1), (6, 2, 3), (20, 4, 5)])
@pytest.mark.parametrize("hidden", COLUMNS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_gate_up(dtype, hidden, intermediate, at_once, turns):
    x, norm = draw(hidden), draw(hidden, dtype=dtype)
    weight = (draw(2 * intermediate, hidden) / hidden**0.5).to(dtype)
    h, expected = unset(intermediate, dtype=dtype), unset(intermediate, dtype=dtype)
    gate_up_gemv_reference(x, norm, weight, expected, eps=EPS)
    gate_up_gemv_kernel[(intermediate // at_once // turns,)](
        x, norm, weight, h, EPS, HIDDEN=hidden, INTERMEDIATE=intermediate, CHUNK=32, ROWS=at_once, TURNS=turns,
        MMA=False, PDL=False,
    )  # fmt: skip
    assert_near(h, expected, dtype)


@pytest.mark.parametrize(("vocab", "rows"), [(1, 4), (3, 4), (13, 4), (33, 8)])
@pytest.mark.parametrize("hidden", COLUMNS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_head(dtype, hidden, vocab, rows):
    x, norm, weight = draw(hidden), draw(hidden, dtype=dtype), draw(vocab, hidden, dtype=dtype)
    logits, expected = unset(vocab), unset(vocab)
    programs = triton.cdiv(vocab, rows)
    best, first = unset(programs), torch.full((programs,), -1, dtype=torch.int32, device=DEVICE)
    head_gemv_reference(x, norm, weight, expected, eps=EPS)
    head_gemv_kernel[(programs,)](
        x, norm, weight, logits, best, first, EPS, vocab, HIDDEN=hidden, BLOCK=padded(hidden), ROWS=rows, PDL=False
    )
    assert_near(logits, expected, torch.float32)
    for program, part in enumerate(logits.split(rows)):
        assert float(best[program]) == float(part.max())
        assert int(first[program]) == program * rows + part.tolist().index(float(part.max()))


@pytest.mark.parametrize("kernel", ["tile", "group", "stream"])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(1, 1, 16), (5, 1, 32), (14, 2, 16)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_attention(dtype, heads, kv_heads, head_dim, kernel):
    """One head, and groups of five and seven: none fills the tile of 16 queries."""
    splits, newest = 3, integers(41)
    q, table = draw(1, heads, head_dim, dtype=dtype), integers(2, 0, 1)[None]
    k, v = (draw(kv_heads, 3 * PAGE, head_dim, dtype=dtype) for _ in range(2))
    out, sums, stats = torch.full_like(q, torch.nan), unset(1, splits, heads, head_dim), unset(1, splits, 2, heads)
    scale, strides = math.log2(math.e) / math.sqrt(head_dim), (3 * PAGE * head_dim, 3)
    shape = {"HEADS": heads, "GROUP": heads // kv_heads, "HEAD_DIM": head_dim, "PAGE": PAGE, "PDL": False}
    inputs = (q, k, v, newest, table)
    if kernel == "tile":
        flash_tile_kernel[(heads, splits, 1)](
            *inputs, out, sums, stats, scale, *strides, TILE=16, SINGLE=False, **shape
        )
    elif kernel == "group":
        flash_group_kernel[(kv_heads, splits, 1)](*inputs, sums, stats, scale, *strides, ROWS=16, TILE=16, **shape)
    else:
        flash_stream_kernel[(kv_heads, splits, 1)](
            *inputs, sums, stats, scale, *strides, ROWS=16, BLOCK=16, STAGES=2, **shape
        )
    flash_fold_kernel[(heads, 2, 1)](
        newest, sums, stats, out, splits, HEADS=heads, HEAD_DIM=head_dim, SPLIT=PAGE, FOLD=2, DIMS=head_dim // 2,
        PDL=False,
    )  # fmt: skip
    assert_near(out, flash_decode_reference(*inputs, page=PAGE), dtype)


@pytest.mark.parametrize(("rows", "programs"), [(1, 1), (1, 7), (3, 5), (5, 33)])
@pytest.mark.parametrize("hidden", COLUMNS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_greedy_token(dtype, hidden, rows, programs):
    """Ties, a row without a number and one with some, an idle row: the kernel as its reference, bit for bit."""
    vocab, places = 40, 6
    best = torch.randint(-3, 3, (rows, programs), device=DEVICE).float()
    best[0, programs // 2 + 1 :] = torch.nan
    if rows > 2:
        best[1] = torch.nan
        best[2] = -torch.inf
    first = torch.randint(0, vocab, (rows, programs), dtype=torch.int32, device=DEVICE)
    position = integers(*(3, 0, 2, -1, 4)[:rows])
    embed, results = draw(vocab, hidden, dtype=dtype), []
    for run in ("kernel", "reference"):
        at, x = position.clone(), torch.full((rows, hidden), 0.5, device=DEVICE)
        history = torch.full((rows, places), -7, dtype=torch.int32, device=DEVICE)
        if run == "reference":
            greedy_token_reference(best, first, at, history, embed, x)
        else:
            greedy_token_kernel[(rows,)](
                best, first, at, history, embed, x, programs, places,
                HIDDEN=hidden, BLOCK=padded(hidden), PROGRAMS=padded(programs), PDL=False,
            )  # fmt: skip
        results.append((at, history, x))
    for mine, expected in zip(*results, strict=True):
        assert torch.equal(mine, expected)


def test_greedy_tokens_reference_by_hand():
    best = torch.tensor([[1.0, 5.0, 5.0], [9.0, 9.0, 9.0], [torch.nan, 2.0, 1.0]], device=DEVICE)
    best = torch.cat((best, torch.full((1, 3), torch.nan, device=DEVICE)))
    first = integers(3, 11, 20, 1, 2, 3, 4, 12, 25, 6, 7, 8).view(4, 3)
    position, history = integers(0, -1, 2, 1), torch.full((4, 5), -7, dtype=torch.int32, device=DEVICE)
    embed, x = draw(30, 6), torch.full((4, 6), 0.5, device=DEVICE)
    greedy_token_reference(best, first, position, history, embed, x)
    assert position.tolist() == [1, -1, 3, 2]
    assert history.tolist() == [[-7, 11, -7, -7, -7], [-7] * 5, [-7, -7, -7, 12, -7], [-7, -7, -1, -7, -7]]
    assert torch.equal(x, torch.stack((embed[11], torch.full((6,), 0.5, device=DEVICE), embed[12], embed[0])))


@pytest.mark.parametrize("block", [1, 16, 16384])
@pytest.mark.parametrize("dtype", DTYPES)
def test_read_sum(dtype, block):
    x = draw(3, block, dtype=dtype)
    out, expected = unset(3), unset(3)
    read_sum_kernel[(3,)](x, out, BLOCK=block)
    read_sum_reference(x, expected, block=block)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5 * block**0.5)
    torch.testing.assert_close(expected.double(), x.double().sum(1), rtol=1e-5, atol=1e-5 * block**0.5)
