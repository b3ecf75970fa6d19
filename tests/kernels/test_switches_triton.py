"""What kernels compute beyond a Llama's step: on CUDA, or in the interpreter (see test_interpreter.py)."""

import math

import pytest
import torch
import triton
import triton.language as tl

from skote.kernels.activation import ACTIVATIONS
from skote.kernels.activation import activated as activated_reference
from skote.kernels.activation_triton import activated, capped
from skote.kernels.add_rms_norm_triton import add_rms_norm_kernel, add_rms_norm_reference
from skote.kernels.attention import capped as capped_reference
from skote.kernels.flash_decode_triton import Attention, flash_decode_reference, flash_fold_kernel
from skote.kernels.flash_prefill_triton import flash_prefill_kernel, flash_prefill_reference
from skote.kernels.flash_split_triton import flash_group_kernel, flash_stream_kernel, flash_tile_kernel
from skote.kernels.gate_up_gemm_triton import gate_up_gemm_kernel, gate_up_gemm_reference
from skote.kernels.gate_up_gemv_triton import gate_up_gemv_kernel, gate_up_gemv_reference
from skote.kernels.greedy_token_triton import greedy_token_kernel
from skote.kernels.head_gemm_triton import head_gemm_kernel, head_gemm_reference
from skote.kernels.head_gemv_triton import head_gemv_kernel, head_gemv_reference
from skote.kernels.owed_triton import Owed
from skote.kernels.qkv_gemv_triton import qkv_gemv_kernel, qkv_gemv_reference
from skote.kernels.residual_gemv_triton import residual_gemv_kernel
from skote.kernels.rope import inverse_frequencies, rope_table
from skote.kernels.silu_mul_triton import silu_mul_kernel

INTERPRETED = triton.knobs.runtime.interpret
OVERFLOW = pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")  # to infinity, as is meant
pytestmark = [OVERFLOW] if INTERPRETED else [pytest.mark.gpu]
DEVICE = "cpu" if INTERPRETED else "cuda"
DTYPES = [torch.float32, torch.float16] if INTERPRETED else [torch.float32, torch.float16, torch.bfloat16]
TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}
EPS = 1e-5
PAGE = 32


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


@triton.jit
def each_kernel(x_ptr, out_ptr, N: tl.constexpr, ACTIVATION: tl.constexpr, CAP: tl.constexpr):
    places = tl.arange(0, N)
    tl.store(out_ptr + places, capped(activated(tl.load(x_ptr + places), ACTIVATION), CAP))


@pytest.mark.parametrize("cap", [None, 5.0, 50.0])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_and_caps_over_their_whole_range(name, cap):
    x = torch.cat(
        [torch.linspace(-9, 9, 240), torch.tensor([-1e4, -200.0, -90, -0.0, 0, 1e-3, 90, 200, 1e4] + [1.0] * 7)]
    )
    x, out = x.to(DEVICE), unset(256)
    each_kernel[(1,)](x, out, N=256, ACTIVATION=name, CAP=cap or 0.0)
    expected = capped_reference(activated_reference(x.double(), name, gated=False), cap)
    torch.testing.assert_close(out.double(), expected, rtol=3e-6, atol=1e-5)


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_gate_has_its_activation_in_both_sets_and_in_a_prefill(dtype, name):
    x, norm, weight = draw(24), draw(24, dtype=dtype), draw(24, 24, dtype=dtype)
    h, expected = unset(12, dtype=dtype), unset(12, dtype=dtype)
    gate_up_gemv_reference(x, norm, weight, expected, eps=EPS, activation=name)
    cut = {"CHUNK": 16, "ROWS": 2, "TURNS": 1, "MMA": False, "PDL": False}
    gate_up_gemv_kernel[(6,)](x, norm, weight, h, EPS, HIDDEN=24, INTERMEDIATE=12, **cut, ACTIVATION=name)
    assert_near(h, expected, dtype)

    rows = draw(16, 24, dtype=dtype)
    h, expected = unset(16, 12, dtype=dtype), unset(16, 12, dtype=dtype)
    gate_up_gemm_reference(rows, weight, expected, activation=name)
    cut = {"ROWS": 16, "TILE": 8, "BLOCK": 32, "STAGES": 2, "PDL": False}
    gate_up_gemm_kernel[(2,)](rows, weight, h, 12, HIDDEN=24, **cut, ACTIVATION=name)
    assert_near(h, expected, dtype)

    gate_up, out = draw(3, 80, dtype=dtype), unset(3, 40, dtype=dtype)
    silu_mul_kernel[(3, 2)](gate_up, out, INTERMEDIATE=40, BLOCK=32, ACTIVATION=name)
    assert_near(out, activated_reference(gate_up.float(), name, gated=True), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_logits_are_capped_before_the_best_of_them_is_found(dtype):
    vocab, hidden, cap = 21, 24, 1.5
    x, norm, weight = draw(hidden), draw(hidden, dtype=dtype), draw(vocab, hidden, dtype=dtype)
    logits, expected, best, first = (
        unset(vocab),
        unset(vocab),
        unset(6),
        torch.zeros(6, dtype=torch.int32, device=DEVICE),
    )
    head_gemv_reference(x, norm, weight, expected, eps=EPS, softcap=cap)
    head_gemv_kernel[(6,)](
        x, norm, weight, logits, best, first, EPS, vocab, HIDDEN=hidden, BLOCK=32, ROWS=4, PDL=False, CAP=cap
    )
    assert_near(logits, expected, torch.float32)
    assert logits.abs().max() <= cap
    assert torch.equal(best[:5], logits[:20].view(5, 4).max(1).values)

    rows = draw(16, hidden, dtype=dtype)
    logits, expected, best = unset(16, vocab), unset(16, vocab), unset(16, 2)
    first = torch.zeros(16, 2, dtype=torch.int32, device=DEVICE)
    head_gemm_reference(rows, weight, expected, softcap=cap)
    cut = {"ROWS": 16, "TILE": 16, "BLOCK": 32, "STAGES": 2, "PDL": False}
    head_gemm_kernel[(2,)](rows, weight, logits, best, first, vocab, HIDDEN=hidden, **cut, CAP=cap)
    assert_near(logits, expected, torch.float32)
    assert torch.equal(best[:, 0], logits[:, :16].max(1).values)


def owing(hidden, norm_dtype):
    """x, what is owed to it, and the kernel's arguments; two of each, since the sum is kept."""
    x, delta, post = draw(hidden), 3 * draw(hidden), draw(hidden, dtype=norm_dtype)
    first, second = (Owed(delta, post, unset(hidden)) for _ in range(2))
    return x, first, {"owed_ptr": second.delta, "post_ptr": second.norm, "kept_ptr": second.kept}


@pytest.mark.parametrize("norm_dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_owed_is_added_before_each_norm_and_kept(dtype, norm_dtype):
    hidden = 24
    x, owed, arguments = owing(hidden, norm_dtype)
    norm, weight = draw(hidden, dtype=norm_dtype), draw(24, hidden, dtype=dtype)
    h, expected = unset(12, dtype=dtype), unset(12, dtype=dtype)
    before = x.clone()
    gate_up_gemv_reference(x, norm, weight, expected, eps=EPS, owed=owed)
    cut = {"CHUNK": 16, "ROWS": 2, "TURNS": 1, "MMA": False, "PDL": False}
    gate_up_gemv_kernel[(6,)](x, norm, weight, h, EPS, HIDDEN=24, INTERMEDIATE=12, **cut, **arguments)
    assert_near(h, expected, dtype)
    assert_near(arguments["kept_ptr"], owed.kept, torch.float32)
    scale = (owed.delta.square().mean() + EPS).rsqrt()
    assert_near(owed.kept, before + owed.delta * scale * owed.norm.float(), torch.float32)
    assert torch.equal(x, before)

    x, owed, arguments = owing(hidden, norm_dtype)
    logits, expected, best, first = unset(24), unset(24), unset(6), torch.zeros(6, dtype=torch.int32, device=DEVICE)
    head_gemv_reference(x, norm, weight, expected, eps=EPS, owed=owed)
    head_gemv_kernel[(6,)](
        x, norm, weight, logits, best, first, EPS, 24, HIDDEN=hidden, BLOCK=32, ROWS=4, PDL=False, **arguments
    )
    assert_near(logits, expected, torch.float32)
    assert_near(arguments["kept_ptr"], owed.kept, torch.float32)

    x, owed, arguments = owing(hidden, norm_dtype)
    cos, sin = rope_table(8, inverse_frequencies(8, 10000.0).to(DEVICE))
    place, table = (torch.tensor([each], dtype=torch.int32, device=DEVICE) for each in (5, 0))
    results = []
    for kernel in (False, True):
        outputs = unset(1, 8, dtype=dtype), unset(1, PAGE, 8, dtype=dtype), unset(1, PAGE, 8, dtype=dtype)
        if kernel:
            qkv_gemv_kernel[(6,)](
                x, norm, weight, weight, cos, sin, place, table, *outputs, EPS, PAGE * 8, HIDDEN=hidden, BLOCK=32,
                HEADS=1, KV_HEADS=1, HEAD_DIM=8, PAIRS=2, PAGE=PAGE, BIAS=False, ROTATE=True, PDL=False, **arguments,
            )  # fmt: skip
        else:
            qkv_gemv_reference(x, norm, weight, cos, sin, place, table, *outputs, eps=EPS, page=PAGE, owed=owed)
        results.append((outputs[0][0], outputs[1][0, 5], outputs[2][0, 5]))
    for result, wanted in zip(*reversed(results), strict=True):
        assert_near(result, wanted, dtype)
    assert_near(arguments["kept_ptr"], owed.kept, torch.float32)


@pytest.mark.parametrize("turns", [1, 3])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_projection_that_is_owed_takes_the_place_of_what_was_there(dtype, turns):
    x, h, weight = unset(12), draw(24, dtype=dtype), draw(12, 24, dtype=dtype)
    cut = {"CHUNK": 16, "ROWS": 2, "TURNS": turns, "MMA": False, "PDL": False, "ADD": False}
    residual_gemv_kernel[(6 // turns,)](x, h, weight, COLUMNS=24, **cut)
    assert_near(x, weight.float() @ h.float(), torch.float32)


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("dtype", DTYPES)
def test_many_rows_add_the_norm_of_all_parts_together(dtype, parts):
    x, delta, norm, post = draw(5, 24), draw(parts, 5, 24, dtype=dtype), draw(24, dtype=dtype), draw(24)
    expected_x, expected, out = x.clone(), unset(5, 24, dtype=dtype), unset(5, 24, dtype=dtype)
    add_rms_norm_reference(expected_x, delta, norm, expected, eps=EPS, post=post)
    add_rms_norm_kernel[(5,)](x, delta, norm, out, 24, EPS, BLOCK=32, PARTS=parts, PDL=False, post_ptr=post)
    assert_near(x, expected_x, torch.float32)
    assert_near(out, expected, dtype)


def test_a_tokens_embedding_is_scaled():
    embed, x = draw(30, 24), unset(1, 24)
    position, history = (torch.zeros(shape, dtype=torch.int32, device=DEVICE) for shape in (1, (1, 5)))
    first = torch.tensor([[3, 11, 20]], dtype=torch.int32, device=DEVICE)
    greedy_token_kernel[(1,)](
        torch.tensor([[1.0, 5.0, 2.0]], device=DEVICE), first, position, history, embed, x, 3, 5, HIDDEN=24, BLOCK=32,
        PROGRAMS=4, PDL=False, SCALE=59.75,
    )  # fmt: skip
    assert torch.equal(x[0], embed[11] * 59.75)


def attend(q, k, v, position, table, *, kernel, window, cap, positions=128):
    """Decode attention as `flash_decode` cuts it, of which the grid covers `positions`."""
    rows, heads, head_dim = q.shape
    cut = Attention(page=PAGE, tile=16, group=16, block=16, tiled=0, grouped=0 if kernel == "stream" else 4096)
    split, splits = cut.splits(positions, window)
    out, sums, stats = (
        unset(*q.shape, dtype=q.dtype),
        unset(rows, splits, heads, head_dim),
        unset(rows, splits, 2, heads),
    )
    scale = (1.0 if cap else math.log2(math.e)) / math.sqrt(head_dim)
    shape = {"HEADS": heads, "GROUP": heads // len(k), "HEAD_DIM": head_dim, "PAGE": PAGE, "PDL": False}
    shape |= {"WINDOW": window or 0, "CAP": cap or 0.0}
    inputs, strides = (q, k, v, position, table), (scale, k.shape[1] * head_dim, table.shape[1])
    if kernel == "tile":
        flash_tile_kernel[(heads, splits, rows)](
            *inputs, out, sums, stats, *strides, TILE=split, SINGLE=splits == 1, **shape
        )
    elif kernel == "group":
        flash_group_kernel[(len(k), splits, rows)](*inputs, sums, stats, *strides, ROWS=16, TILE=split, **shape)
    else:
        flash_stream_kernel[(len(k), splits, rows)](
            *inputs, sums, stats, *strides, ROWS=16, BLOCK=16, STAGES=2, **shape
        )
    if kernel != "tile" or splits > 1:
        flash_fold_kernel[(heads, 2, rows)](
            position, sums, stats, out, splits, HEADS=heads, HEAD_DIM=head_dim, SPLIT=split, FOLD=2,
            DIMS=head_dim // 2, PDL=False, WINDOW=window or 0,
        )  # fmt: skip
    return out


@pytest.mark.parametrize("kernel", ["tile", "group", "stream"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("window", "cap"), [(1, None), (5, None), (16, None), (33, 2.0), (100, 2.0), (None, 2.0)])
def test_a_row_attends_to_its_window_and_its_scores_are_capped(dtype, kernel, window, cap):
    q, k, v = draw(4, 6, 16, dtype=dtype), *(2 * draw(2, 256, 16, dtype=dtype) for _ in range(2))
    pages = torch.tensor([2, 0, 3, 1], dtype=torch.int32, device=DEVICE)
    table = torch.stack([pages] * 4)
    position = torch.tensor([15, 96, -1, 127], dtype=torch.int32, device=DEVICE)  # a split's last, first, and last
    out = attend(q, k, v, position, table, kernel=kernel, window=window, cap=cap)
    wanted = flash_decode_reference(q, k, v, position, table, page=PAGE, window=window, softcap=cap)
    assert_near(out, wanted, dtype)
    assert out[2].eq(0).all()  # the idle row
    uncapped = flash_decode_reference(q, k, v, position, table, page=PAGE, window=window)
    assert cap is None or (uncapped.float() - wanted.float()).norm() > 0.1 * wanted.float().norm()


@pytest.mark.parametrize("kernel", ["tile", "group", "stream"])
def test_what_lies_before_the_window_is_never_read_and_the_grid_is_the_windows(kernel):
    """Whole splits before it hold what is no number, and those that remain are few, however long the cache."""
    q, (k, v) = draw(1, 4, 16), (draw(2, 128, 16) for _ in range(2))
    table = torch.arange(4, dtype=torch.int32, device=DEVICE)[None]
    position = torch.tensor([120], dtype=torch.int32, device=DEVICE)
    wanted = flash_decode_reference(q, k, v, position, table, page=PAGE, window=10)
    k[:, :96] = v[:, :96] = torch.nan  # 111 to 120 are seen
    assert_near(attend(q, k, v, position, table, kernel=kernel, window=10, cap=None), wanted, torch.float32)
    assert Attention(page=PAGE, tile=16, tiled=4096).splits(128, 10) == (16, 2)
    assert Attention(page=PAGE, tile=16, tiled=4096).splits(128, 128) == (16, 8)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "keys"), [(1, 1), (37, 37), (20, 52)])
@pytest.mark.parametrize(("window", "cap"), [(None, None), (1, None), (7, 2.0), (33, None), (None, 2.0)])
def test_a_prefill_attends_within_its_windows(dtype, tokens, keys, window, cap):
    heads, kv_heads, head_dim, pieces = 6, 2, 16, 2
    q = draw(pieces, tokens, heads + 1, head_dim, dtype=dtype)[:, :, 1:]  # strides that are not its shape's
    k, v = (2 * draw(pieces, keys, kv_heads, head_dim, dtype=dtype).transpose(1, 2) for _ in range(2))
    out = unset(pieces, tokens, heads, head_dim, dtype=dtype)
    flash_prefill_kernel[(triton.cdiv(tokens, 16), heads, pieces)](
        q, k, v, out, (1.0 if cap else math.log2(math.e)) / math.sqrt(head_dim), tokens, keys,
        *(q.stride(axis) for axis in (0, 1, 2)), *(each.stride(axis) for each in (k, v) for axis in (0, 2, 1)),
        HEADS=heads, GROUP=heads // kv_heads, HEAD_DIM=head_dim, ROWS=16, BLOCK=16, STAGES=1, WINDOW=window or 0,
        CAP=cap or 0.0,
    )  # fmt: skip
    assert_near(out, flash_prefill_reference(q, k, v, window=window, softcap=cap), dtype)
