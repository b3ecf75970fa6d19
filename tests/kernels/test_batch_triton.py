"""The multi-row kernels against their references: on CUDA, or raw through Triton's interpreter.

The interpreter knows neither bf16 nor PDL's instructions, so that it runs fp32 and fp16 with PDL off.
"""

import pytest
import torch
import triton

from skote.kernels.gate_up_gemm_triton import gate_up_gemm_kernel, gate_up_gemm_reference
from skote.kernels.head_gemm_triton import head_gemm_kernel, head_gemm_reference
from skote.kernels.head_norm_triton import head_norm_kernel, head_norm_reference
from skote.kernels.qkv_gemm_triton import qkv_gemm_kernel, qkv_gemm_reference
from skote.kernels.rope import inverse_frequencies, rope_table
from skote.kernels.split_gemm_triton import split_gemm_kernel, split_gemm_reference

INTERPRETED = triton.knobs.runtime.interpret
pytestmark = [] if INTERPRETED else [pytest.mark.gpu]
DEVICE = "cpu" if INTERPRETED else "cuda"
DTYPES = [torch.float32, torch.float16] if INTERPRETED else [torch.float32, torch.float16, torch.bfloat16]
TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}
WIDTHS = [24, 96, 576]
PAGE = 32
ROWS = 16
MORE_ROWS = [32, 64, 128]
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


def qkv(normed, weight, positions, table, *, kv_heads, head_dim, kernel=True, bias=None, rotate=True):
    """q, k, v of a pool of 64 pages."""
    rows, hidden = normed.shape
    heads = weight.shape[0] // head_dim - 2 * kv_heads
    cos, sin = rope_table(4 * PAGE, inverse_frequencies(head_dim, 10000.0).to(DEVICE))
    q = unset(rows, heads, head_dim, dtype=weight.dtype)
    k, v = (unset(kv_heads, 64 * PAGE, head_dim, dtype=weight.dtype) for _ in range(2))
    inputs = (cos, sin, positions, table, q, k, v)
    if kernel:
        pairs = min(head_dim // 2, 16)
        qkv_gemm_kernel[(weight.shape[0] // 2 // pairs,)](
            normed, weight, weight if bias is None else bias, *inputs, 64 * PAGE * head_dim,
            4 if len(table) == rows else 0, HIDDEN=hidden, ROWS=rows, HEADS=heads, KV_HEADS=kv_heads,
            HEAD_DIM=head_dim, PAIRS=pairs, PAGE=PAGE, BIAS=bias is not None, ROTATE=rotate, **CUT,
        )  # fmt: skip
    else:
        qkv_gemm_reference(normed, weight, *inputs, page=PAGE, bias=bias, rotate=rotate)
    return q, k, v


def split(h, weight, splits):
    (rows, columns), outputs = h.shape, weight.shape[0]
    partials = unset(splits, rows, outputs)
    split_gemm_kernel[(triton.cdiv(outputs, 16), splits)](
        h, weight, partials, outputs, COLUMNS=columns, ROWS=rows, TILE=16, SPLITS=splits, **CUT
    )
    return partials


def gate_up(normed, weight):
    (rows, hidden), intermediate = normed.shape, weight.shape[0] // 2
    h = unset(rows, intermediate, dtype=weight.dtype)
    gate_up_gemm_kernel[(triton.cdiv(intermediate, 8),)](
        normed, weight, h, intermediate, HIDDEN=hidden, ROWS=rows, TILE=8, **CUT
    )
    return h


def head(normed, weight):
    (rows, hidden), vocab = normed.shape, weight.shape[0]
    programs = triton.cdiv(vocab, 16)
    logits, best = unset(rows, vocab), unset(rows, programs)
    first = torch.full((rows, programs), -1, dtype=torch.int32, device=DEVICE)
    head_gemm_kernel[(programs,)](normed, weight, logits, best, first, vocab, HIDDEN=hidden, ROWS=rows, TILE=16, **CUT)
    return logits, best, first


def random_tables():
    """A table whose 64 pages each belong to one row, in no order."""
    return torch.randperm(64, device=DEVICE).to(torch.int32).view(ROWS, 4)


@pytest.mark.parametrize("head_dim", [16, 64])
@pytest.mark.parametrize("hidden", WIDTHS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_qkv_writes_each_rows_rotated_heads_to_its_slot_and_nothing_of_idle_rows(dtype, hidden, head_dim):
    kv_heads = 2
    normed, weight = draw(ROWS, hidden, dtype=dtype), draw((3 + 2 * kv_heads) * head_dim, hidden, dtype=dtype)
    positions = torch.tensor([0, 31, 32, -1, 127, 70, 5, -1] * 2, dtype=torch.int32, device=DEVICE)
    table = random_tables()
    q, k, v = qkv(normed, weight, positions, table, kv_heads=kv_heads, head_dim=head_dim)
    expected = qkv(normed, weight, positions, table, kv_heads=kv_heads, head_dim=head_dim, kernel=False)
    live = positions >= 0
    assert_near(q[live], expected[0][live], dtype)
    assert q.isfinite().all()
    for cache, wanted in ((k, expected[1]), (v, expected[2])):
        written = wanted.isfinite()
        assert int(written.sum()) == 12 * kv_heads * head_dim
        assert torch.equal(cache.isfinite(), written)  # no other slot was touched
        assert_near(cache[written], wanted[written], dtype)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("heads", [3, 0])
@pytest.mark.parametrize("dtype", DTYPES)
def test_heads_are_normalised_and_rotated_where_they_lie(dtype, heads, shared):
    """What the projection left without rotating it; idle rows leave the cache alone."""
    kv_heads, head_dim = 2, 16
    normed, weight = draw(ROWS, 96, dtype=dtype), draw((heads + 2 * kv_heads) * head_dim, 96, dtype=dtype)
    positions = torch.tensor([0, 31, 32, -1, 127, 70, 5, 64] * 2, dtype=torch.int32, device=DEVICE)
    table = random_tables()
    if shared:
        positions, table = torch.arange(ROWS, dtype=torch.int32, device=DEVICE), table[:1]
    norms = draw(head_dim, dtype=dtype), draw(head_dim, dtype=dtype)
    tables = rope_table(4 * PAGE, inverse_frequencies(head_dim, 10000.0).to(DEVICE))
    q, k, _ = qkv(normed, weight, positions, table, kv_heads=kv_heads, head_dim=head_dim, rotate=False)
    expected_q, expected_k = q.clone(), k.clone()
    head_norm_kernel[(heads + kv_heads, ROWS)](
        q, k, *norms, *tables, positions, table, 1e-5, k.shape[1] * head_dim, 0 if shared else 4,
        HEADS=heads, HEAD_DIM=head_dim, PAGE=PAGE, PDL=False,
    )  # fmt: skip
    head_norm_reference(expected_q, expected_k, *norms, *tables, positions, table, eps=1e-5, page=PAGE)
    live = positions >= 0
    if heads:
        assert_near(q[live], expected_q[live], dtype)
    written = expected_k.isfinite()
    assert torch.equal(k.isfinite(), written)
    assert_near(k[written], expected_k[written], dtype)


@pytest.mark.parametrize("heads", [3, 0])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_bias_is_added_before_the_rotation(dtype, heads):
    kv_heads, head_dim = 2, 16
    normed, weight = draw(ROWS, 96, dtype=dtype), draw((heads + 2 * kv_heads) * head_dim, 96, dtype=dtype)
    positions, table = torch.arange(40, 40 + ROWS, dtype=torch.int32, device=DEVICE), random_tables()
    options = {"kv_heads": kv_heads, "head_dim": head_dim, "bias": draw(len(weight), dtype=dtype) * 20}
    q, k, v = qkv(normed, weight, positions, table, **options)
    expected = qkv(normed, weight, positions, table, kernel=False, **options)
    if heads:
        assert_near(q, expected[0], dtype)
    for cache, wanted in ((k, expected[1]), (v, expected[2])):
        assert_near(cache[wanted.isfinite()], wanted[wanted.isfinite()], dtype)


@pytest.mark.parametrize("heads", [3, 0])
@pytest.mark.parametrize("rows", MORE_ROWS)
def test_rows_of_one_request_lie_in_the_pages_of_one_table_row(rows, heads):
    kv_heads, head_dim, dtype = 2, 16, torch.float16
    normed, weight = draw(rows, 96, dtype=dtype), draw((heads + 2 * kv_heads) * head_dim, 96, dtype=dtype)
    positions = torch.arange(rows, dtype=torch.int32, device=DEVICE)
    pages = random_tables()[:1]
    q, k, v = qkv(normed, weight, positions, pages, kv_heads=kv_heads, head_dim=head_dim)
    expected = qkv(normed, weight, positions, pages, kv_heads=kv_heads, head_dim=head_dim, kernel=False)
    if heads:
        assert_near(q, expected[0], dtype)
    slots = (pages[0].long()[:, None] * PAGE + torch.arange(PAGE, device=DEVICE)).flatten()[:rows]
    for cache, wanted in ((k, expected[1]), (v, expected[2])):
        assert_near(cache[:, slots], wanted[:, slots], dtype)
        assert int(cache.isfinite().sum()) == rows * kv_heads * head_dim


@pytest.mark.parametrize(("outputs", "columns"), [(24, 96), (96, 24), (36, 50), (576, 130), (40, 97)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_parts_of_a_split_projection_sum_to_it(dtype, outputs, columns):
    h, weight = draw(ROWS, columns, dtype=dtype), draw(outputs, columns, dtype=dtype)
    for splits in (1, 2, 4):
        assert_near(split(h, weight, splits).sum(0), split_gemm_reference(h, weight), torch.float32)


def test_each_part_of_a_split_projection_is_that_of_its_columns():
    """200 columns are four blocks of 64: two for either part."""
    h, weight = draw(ROWS, 200), draw(24, 200)
    first, second = split(h, weight, 2)
    assert_near(first, split_gemm_reference(h[:, :128], weight[:, :128]), torch.float32)
    assert_near(second, split_gemm_reference(h[:, 128:], weight[:, 128:]), torch.float32)


@pytest.mark.parametrize("intermediate", [8, 50])
@pytest.mark.parametrize("hidden", WIDTHS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_gate_up_takes_the_same_rows_of_both_matrices(dtype, hidden, intermediate):
    normed, weight = draw(ROWS, hidden, dtype=dtype), draw(2 * intermediate, hidden, dtype=dtype)
    expected = unset(ROWS, intermediate, dtype=dtype)
    weight /= hidden**0.5  # as in a model: h of order 1
    gate_up_gemm_reference(normed, weight, expected)
    assert_near(gate_up(normed, weight), expected, dtype)


@pytest.mark.parametrize("hidden", WIDTHS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_head_leaves_each_programs_highest_logit_and_its_lowest_id(dtype, hidden):
    normed, weight = draw(ROWS, hidden, dtype=dtype), draw(VOCAB, hidden, dtype=dtype)
    weight[17:20] = weight[16]  # ties
    expected = unset(ROWS, VOCAB)
    head_gemm_reference(normed, weight, expected)
    logits, best, first = head(normed, weight)
    assert_near(logits, expected, torch.float32)
    for program, ids in enumerate(range(0, VOCAB, 16)):
        part = logits[:, ids : ids + 16]
        assert torch.equal(best[:, program], part.max(1).values)
        lowest = [ids + row.index(max(row)) for row in part.tolist()]
        assert first[:, program].tolist() == lowest


@pytest.mark.parametrize("rows", MORE_ROWS)
def test_more_rows(rows):
    dtype, hidden, intermediate = torch.float16, 96, 40
    normed, weight = draw(rows, hidden, dtype=dtype), draw(2 * intermediate, hidden, dtype=dtype) / hidden**0.5
    expected, expected_logits = unset(rows, intermediate, dtype=dtype), unset(rows, 2 * intermediate)
    gate_up_gemm_reference(normed, weight, expected)
    head_gemm_reference(normed, weight, expected_logits)
    logits, best, _ = head(normed, weight)
    assert_near(gate_up(normed, weight), expected, dtype)
    assert_near(logits, expected_logits, torch.float32)
    assert torch.equal(best.max(1).values, logits.max(1).values)
    assert_near(split(normed, weight, 2).sum(0), split_gemm_reference(normed, weight), torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_rows_bits_depend_on_that_row_alone(dtype):
    """Row 5 stays, all others change; then row 5's content is in row 12 too."""
    hidden, head_dim = 96, 16
    matrix, table = draw(128, hidden, dtype=dtype) / hidden**0.5, random_tables()
    positions = torch.arange(ROWS, dtype=torch.int32, device=DEVICE)
    normed, other = draw(ROWS, hidden, dtype=dtype), 10 * draw(ROWS, hidden, dtype=dtype)
    other[5] = other[12] = normed[5]
    others = torch.full_like(positions, -1)
    others[[5, 12]] = positions[5]

    def results(normed, positions):
        q, k, v = qkv(normed, matrix, positions, table, kv_heads=2, head_dim=head_dim)
        at = positions.clamp_min(0)
        slots = table[torch.arange(ROWS), at // PAGE].long() * PAGE + at % PAGE
        written = k[:, slots].transpose(0, 1), v[:, slots].transpose(0, 1)
        return q, *written, split(normed, matrix, 2).transpose(0, 1), gate_up(normed, matrix), *head(normed, matrix)

    for before, after in zip(results(normed, positions), results(other, others), strict=True):
        assert torch.equal(after[5], before[5])
        assert torch.equal(after[12], before[5])
