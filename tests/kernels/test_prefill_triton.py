"""What lies between a prefill's products, against references: on CUDA, or in the interpreter (test_interpreter.py)."""

import pytest
import torch
import triton

from skote.kernels.add_rms_norm_triton import add_rms_norm_kernel, add_rms_norm_reference
from skote.kernels.rope import inverse_frequencies, rope_table
from skote.kernels.rope_write_triton import rope_write_kernel, rope_write_reference
from skote.kernels.silu_mul import silu_mul
from skote.kernels.silu_mul_triton import silu_mul_kernel

INTERPRETED = triton.knobs.runtime.interpret
pytestmark = [] if INTERPRETED else [pytest.mark.gpu]
DEVICE = "cpu" if INTERPRETED else "cuda"
DTYPES = [torch.float32, torch.float16] if INTERPRETED else [torch.float32, torch.float16, torch.bfloat16]
TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}


def draw(*shape, dtype=torch.float32):
    return torch.randn(*shape, device=DEVICE).to(dtype)


def assert_near(result, expected, dtype):
    error = (result.float() - expected.float()).norm() / expected.float().norm()
    assert error < TOLERANCE[dtype], float(error)


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(7)


def add_norm(x, delta, norm, parts):
    out = torch.full(x.shape, torch.nan, dtype=norm.dtype, device=DEVICE)
    add_rms_norm_kernel[(len(x),)](x, delta, norm, out, x.shape[1], 1e-5, BLOCK=32, PARTS=parts, PDL=False)
    return out


@pytest.mark.parametrize("parts", [0, 1, 3])
@pytest.mark.parametrize("dtype", DTYPES)
def test_add_rms_norm(dtype, parts):
    x, delta, norm = draw(5, 24), draw(3, 5, 24, dtype=dtype), draw(24, dtype=dtype)
    expected_x, expected = x.clone(), torch.empty(5, 24, dtype=dtype, device=DEVICE)
    add_rms_norm_reference(expected_x, delta[:parts] if parts else None, norm, expected, eps=1e-5)
    out = add_norm(x, delta, norm, parts)
    assert torch.equal(x, expected_x)
    assert_near(out, expected, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_residual_stream_beyond_fp16_is_normalised_all_the_same(dtype):
    x, norm = draw(5, 24), 4 * draw(24, dtype=dtype)
    x[:, 5] = 1e5
    x[3] *= 1e-3  # and a small row beside the large ones
    expected = torch.empty(5, 24, dtype=dtype, device=DEVICE)
    add_rms_norm_reference(x, None, norm, expected, eps=1e-5)
    out = add_norm(x, x, norm, 0)
    assert_near(out, expected, dtype)
    assert_near(out[3], expected[3], dtype)


@pytest.mark.parametrize(("start", "capacity"), [(0, 12), (0, 9), (5, 20), (5, 12)])
@pytest.mark.parametrize("heads", [3, 0])
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rope_write_fills_the_pages_and_leaves_out_what_is_beyond_the_capacity(dtype, normed, heads, start, capacity):
    kv_heads, head_dim, tokens, page, slots = 1, 16, 11, 4, 20
    cos, sin = rope_table(capacity, inverse_frequencies(head_dim, 10000.0).to(DEVICE))
    table = torch.tensor([2, 0, 1, 4, 3], dtype=torch.int32, device=DEVICE)
    given = draw(tokens, heads + 2 * kv_heads, head_dim, dtype=dtype)
    norms = (draw(head_dim, dtype=dtype), draw(head_dim, dtype=dtype)) if normed else None
    results = []
    for run in ("kernel", "reference"):
        qkv = given.clone()
        k, v = (torch.zeros(kv_heads, slots, head_dim, dtype=dtype, device=DEVICE) for _ in range(2))
        if run == "reference":
            rope_write_reference(qkv, cos, sin, table, k, v, page=page, start=start, norms=norms, eps=1e-5)
        else:
            rope_write_kernel[(tokens,)](
                qkv, cos, sin, *(norms or (qkv, qkv)), table, k, v, 1e-5, start, capacity, slots * head_dim,
                HEADS=heads, KV_HEADS=kv_heads, BLOCK=8, HEAD_DIM=head_dim, PAGE=page, NORM=normed,
            )  # fmt: skip
        results.append((qkv, k, v))
    (qkv, k, v), (expected_qkv, expected_k, _) = results
    within = min(tokens, capacity - start)
    written = [int(table[place // page]) * page + place % page for place in range(start, start + within)]
    assert_near(qkv[:within], expected_qkv[:within], dtype)
    assert_near(k[:, written], expected_k[:, written], dtype)
    assert torch.equal(v[0, written], given[:within, -1])
    assert int((v != 0).any(-1).sum()) == within


@pytest.mark.parametrize("dtype", DTYPES)
def test_silu_mul(dtype):
    gate_up = draw(3, 2 * 40, dtype=dtype)
    out = torch.full((3, 40), torch.nan, dtype=dtype, device=DEVICE)
    silu_mul_kernel[(3, 2)](gate_up, out, INTERMEDIATE=40, BLOCK=32)
    assert_near(out, silu_mul(gate_up.float()), dtype)
