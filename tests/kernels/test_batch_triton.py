"""The kernels of the multi-row step against their references: on CUDA, or raw through Triton's interpreter.

The interpreter knows neither bf16 nor PDL's instructions, so that it runs fp32 and fp16 with PDL off.
"""

import pytest
import torch
import triton

from skote.kernels.gate_up_gemm_triton import gate_up_gemm_kernel, gate_up_gemm_reference
from skote.kernels.head_gemm_triton import head_gemm_kernel, head_gemm_reference
from skote.kernels.qkv_gemm_triton import qkv_gemm_kernel, qkv_gemm_reference
from skote.kernels.residual_gemm_triton import residual_gemm_kernel, residual_gemm_reference
from skote.kernels.rope import inverse_frequencies, rope_table

INTERPRETED = triton.knobs.runtime.interpret
pytestmark = [] if INTERPRETED else [pytest.mark.gpu]
DEVICE = "cpu" if INTERPRETED else "cuda"
DTYPES = [torch.float32, torch.float16] if INTERPRETED else [torch.float32, torch.float16, torch.bfloat16]
TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}
WIDTHS = [24, 96, 576]
EPS = 1e-5
PAGE = 32
ROWS = 16
VOCAB = 97
CUT = {"BLOCK": 64, "STAGES": 3, "PDL": False}


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


def qkv(x, norm, weight, positions, table, *, kv_heads, head_dim, kernel=True):
    """q, k, v of a pool of 64 pages."""
    heads = weight.shape[0] // head_dim - 2 * kv_heads
    cos, sin = rope_table(4 * PAGE, inverse_frequencies(head_dim, 10000.0).to(DEVICE))
    q = unset(ROWS, heads, head_dim, dtype=weight.dtype)
    k, v = (unset(kv_heads, 64 * PAGE, head_dim, dtype=weight.dtype) for _ in range(2))
    inputs = (x, norm, weight, cos, sin, positions, table, q, k, v)
    if kernel:
        pairs = min(head_dim // 2, 16)
        qkv_gemm_kernel[(weight.shape[0] // 2 // pairs,)](
            *inputs, EPS, 64 * PAGE * head_dim, 4, HIDDEN=x.shape[1], HEADS=heads, KV_HEADS=kv_heads,
            HEAD_DIM=head_dim, PAIRS=pairs, PAGE=PAGE, **CUT,
        )  # fmt: skip
    else:
        qkv_gemm_reference(*inputs, eps=EPS, page=PAGE)
    return q, k, v


def residual(x, h, weight):
    out = x.clone()
    outputs, columns = weight.shape
    residual_gemm_kernel[(triton.cdiv(outputs, 16),)](out, h, weight, outputs, COLUMNS=columns, TILE=16, **CUT)
    return out


def gate_up(x, norm, weight):
    intermediate = weight.shape[0] // 2
    h = unset(ROWS, intermediate, dtype=weight.dtype)
    gate_up_gemm_kernel[(triton.cdiv(intermediate, 8),)](
        x, norm, weight, h, EPS, intermediate, HIDDEN=x.shape[1], TILE=8, **CUT
    )
    return h


def head(x, norm, weight):
    vocab = weight.shape[0]
    programs = triton.cdiv(vocab, 16)
    logits, best = unset(ROWS, vocab), unset(ROWS, programs)
    first = torch.full((ROWS, programs), -1, dtype=torch.int32, device=DEVICE)
    head_gemm_kernel[(programs,)](x, norm, weight, logits, best, first, EPS, vocab, HIDDEN=x.shape[1], TILE=16, **CUT)
    return logits, best, first


def random_tables():
    """A table whose 64 pages each belong to one row, in no order."""
    return torch.randperm(64, device=DEVICE).to(torch.int32).view(ROWS, 4)


@pytest.mark.parametrize("head_dim", [16, 64])
@pytest.mark.parametrize("hidden", WIDTHS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_qkv_writes_each_rows_rotated_heads_to_its_slot_and_nothing_of_idle_rows(dtype, hidden, head_dim):
    kv_heads = 2
    x, norm = draw(ROWS, hidden), draw(hidden, dtype=dtype)
    weight = draw((3 + 2 * kv_heads) * head_dim, hidden, dtype=dtype)
    positions = torch.tensor([0, 31, 32, -1, 127, 70, 5, -1] * 2, dtype=torch.int32, device=DEVICE)
    table = random_tables()
    q, k, v = qkv(x, norm, weight, positions, table, kv_heads=kv_heads, head_dim=head_dim)
    expected = qkv(x, norm, weight, positions, table, kv_heads=kv_heads, head_dim=head_dim, kernel=False)
    live = positions >= 0
    assert_near(q[live], expected[0][live], dtype)
    assert q.isfinite().all()
    for cache, wanted in ((k, expected[1]), (v, expected[2])):
        written = wanted.isfinite()
        assert int(written.sum()) == 12 * kv_heads * head_dim
        assert torch.equal(cache.isfinite(), written)  # no other slot was touched
        assert_near(cache[written], wanted[written], dtype)


@pytest.mark.parametrize(("outputs", "columns"), [(24, 96), (96, 24), (36, 50), (576, 130), (40, 97)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_residual_adds_the_projection_of_each_row_in_place(dtype, outputs, columns):
    x, h, weight = draw(ROWS, outputs), draw(ROWS, columns, dtype=dtype), draw(outputs, columns, dtype=dtype)
    expected = x.clone()
    residual_gemm_reference(expected, h, weight)
    assert_near(residual(x, h, weight), expected, torch.float32)


@pytest.mark.parametrize("intermediate", [8, 50])
@pytest.mark.parametrize("hidden", WIDTHS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_gate_up_takes_the_same_rows_of_both_matrices(dtype, hidden, intermediate):
    x, norm, weight = draw(ROWS, hidden), draw(hidden, dtype=dtype), draw(2 * intermediate, hidden, dtype=dtype)
    expected = unset(ROWS, intermediate, dtype=dtype)
    weight /= hidden**0.5  # as in a model: h of order 1
    gate_up_gemm_reference(x, norm, weight, expected, eps=EPS)
    assert_near(gate_up(x, norm, weight), expected, dtype)


@pytest.mark.parametrize("hidden", WIDTHS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_head_leaves_each_programs_highest_logit_and_its_lowest_id(dtype, hidden):
    x, norm, weight = draw(ROWS, hidden), draw(hidden, dtype=dtype), draw(VOCAB, hidden, dtype=dtype)
    weight[17:20] = weight[16]  # ties
    expected = unset(ROWS, VOCAB)
    head_gemm_reference(x, norm, weight, expected, eps=EPS)
    logits, best, first = head(x, norm, weight)
    assert_near(logits, expected, dtype)
    for program, ids in enumerate(range(0, VOCAB, 16)):
        part = logits[:, ids : ids + 16]
        assert torch.equal(best[:, program], part.max(1).values)
        lowest = [ids + row.index(max(row)) for row in part.tolist()]
        assert first[:, program].tolist() == lowest


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_residual_stream_beyond_fp16_is_normalised_all_the_same(dtype):
    x, norm, weight = draw(ROWS, 96), 4 * draw(96, dtype=dtype), draw(VOCAB, 96, dtype=dtype)
    x[:, 5] = 1e5
    x[3] *= 1e-3  # and a small row beside the large ones
    expected = unset(ROWS, VOCAB)
    head_gemm_reference(x, norm, weight, expected, eps=EPS)
    logits, _, _ = head(x, norm, weight)
    assert_near(logits, expected, dtype)
    assert_near(logits[3], expected[3], dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_rows_bits_depend_on_that_row_alone(dtype):
    """Row 5 stays, all others change; then row 5's content is in row 12 too."""
    hidden, head_dim = 96, 16
    norm, matrix = draw(hidden, dtype=dtype), draw(128, hidden, dtype=dtype)
    positions = torch.arange(ROWS, dtype=torch.int32, device=DEVICE)
    table = random_tables()
    x, h, other, other_h = (draw(ROWS, hidden) for _ in range(4))
    h, other_h = h.to(dtype), 100 * other_h.to(dtype)
    other *= 1e4
    for moved in (other, other_h):
        kept = x if moved is other else h
        moved[5] = moved[12] = kept[5]
    others = torch.full_like(positions, -1)
    others[[5, 12]] = positions[5]

    def results(x, h, positions):
        q, k, v = qkv(x, norm, matrix, positions, table, kv_heads=2, head_dim=head_dim)
        slots = table[torch.arange(ROWS), positions.clamp_min(0) // PAGE].long() * PAGE + positions.clamp_min(0) % PAGE
        logits, best, first = head(x, norm, matrix)
        written = k[:, slots].transpose(0, 1), v[:, slots].transpose(0, 1)
        return (
            q,
            *written,
            residual(x[:, :64].contiguous(), h, matrix[:64]),
            gate_up(x, norm, matrix),
            logits,
            best,
            first,
        )

    for before, after in zip(results(x, h, positions), results(other, other_h, others), strict=True):
        assert torch.equal(after[5], before[5])
        assert torch.equal(after[12], before[5])
