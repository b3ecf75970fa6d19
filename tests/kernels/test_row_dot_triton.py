"""The matrix instruction's fragments by hand, and on CUDA the kernels that use it against exact products."""

import re

import pytest
import torch

triton = pytest.importorskip("triton")
from skote.kernels import row_dot_triton  # noqa: E402
from skote.kernels.gate_up_gemv_triton import gate_up_gemv, gate_up_gemv_reference  # noqa: E402
from skote.kernels.launch import Tile  # noqa: E402
from skote.kernels.residual_gemv_triton import residual_gemv, residual_gemv_reference  # noqa: E402

LANES = 32
EPS = 1e-5


def operands(name: str) -> list[list[str]]:
    """The four register lists of the m16n8k16 in a source: D, A, B, C."""
    text = getattr(row_dot_triton, name).value
    return [part.replace(" ", "").split(",") for part in re.findall(r"\{((?:\$\d+|nothing)[^{}]*)\}", text)]


def m16n8k16(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """D = A B, lane by lane as the PTX ISA lays them out: A `[32, 4, 2]`, B `[32, 2, 2]`, D `[32, 4]`."""
    a, b, d = torch.zeros(16, 16), torch.zeros(16, 8), torch.zeros(LANES, 4)
    for lane in range(LANES):
        group, within = lane // 4, lane % 4
        for register in range(4):
            row, column = group + 8 * (register % 2), 2 * within + 8 * (register // 2)
            a[row, column : column + 2] = left[lane, register]
        for register in range(2):
            b[2 * within + 8 * register : 2 * within + 8 * register + 2, group] = right[lane, register]
    product = a @ b
    for lane in range(LANES):
        group, within = lane // 4, lane % 4
        for register in range(4):
            d[lane, register] = product[group + 8 * (register // 2), 2 * within + register % 2]
    return d


def diagonal(entries: torch.Tensor) -> torch.Tensor:
    """What `_DIAGONAL` makes of a warp's registers $4 to $7: its $0 in every lane."""
    kept = torch.zeros(LANES)
    for lane in range(LANES):
        if lane >> 3 == lane & 3:
            odd = int(lane & 4 != 0)
            kept[lane] = entries[lane, odd] + entries[lane, 2 + odd]
    return kept


@pytest.mark.parametrize(("name", "inputs"), [("_MULTIPLY", 3), ("_MULTIPLY_EXACT", 2)])
def test_the_diagonal_of_a_warps_product_is_the_dot_product(name: str, inputs: int) -> None:
    torch.manual_seed(3)
    weight, x = torch.randint(-8, 8, (2, LANES, 4)).float()
    rest = torch.randint(-8, 8, (LANES, 4)).float() / 16 if inputs == 3 else torch.zeros(LANES, 4)
    held = {"nothing": torch.zeros(LANES, 2)}  # registers: two bf16 each, four elements a lane and operand
    for index, tensor in enumerate((weight, x, rest)[:inputs]):
        held |= {f"${4 + 2 * index + half}": tensor[:, 2 * half : 2 * half + 2] for half in range(2)}
    results, left, right, added = operands(name)
    assert results == ["$0", "$1", "$2", "$3"]
    assert added == [f"${4 + 2 * inputs + index}" for index in range(4)]
    entries = m16n8k16(torch.stack([held[each] for each in left], 1), torch.stack([held[each] for each in right], 1))
    assert diagonal(entries).sum() == (weight * (x + rest)).sum()


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, device="cuda").to(dtype)


SIZES = [(8, 4), (24, 8), (576, 24), (4096, 16), (4104, 8)]
TILES = [Tile(2, 1, mma=True), Tile(4, 4, mma=True), Tile(4, 4, 2, mma=True), Tile(2, 8, 2, mma=True)]


@pytest.mark.gpu
@pytest.mark.parametrize(("columns", "rows"), SIZES)
@pytest.mark.parametrize("tile", TILES)
def test_residual_by_the_matrix_instruction(columns: int, rows: int, tile: Tile) -> None:
    """Products are exact and sums fp32: as near as the sums of the reference."""
    torch.manual_seed(5)
    x, h, weight = draw(2 * rows), draw(columns, dtype=torch.bfloat16), draw(2 * rows, columns, dtype=torch.bfloat16)
    expected = x.double() + weight.double() @ h.double()
    reference = x.clone()
    residual_gemv_reference(reference, h, weight)
    residual_gemv(x, h, weight, tile=tile, pdl=True)
    torch.testing.assert_close(x.double(), expected, rtol=1e-5, atol=1e-5 * columns**0.5)
    torch.testing.assert_close(x, reference, rtol=1e-5, atol=1e-5 * columns**0.5)


@pytest.mark.gpu
@pytest.mark.parametrize(("columns", "rows"), SIZES)
@pytest.mark.parametrize("tile", TILES)
def test_gate_up_by_the_matrix_instruction(columns: int, rows: int, tile: Tile) -> None:
    """x counts with 16 bits: against fp64 no further than the result's own rounding to bf16."""
    torch.manual_seed(6)
    x, norm, weight = draw(columns) * 30, draw(columns, dtype=torch.bfloat16), draw(2 * rows, columns).bfloat16() / 8
    h, expected = torch.empty(2, rows, dtype=torch.bfloat16, device="cuda").unbind()
    gate_up_gemv_reference(x, norm, weight, expected, eps=EPS)
    gate_up_gemv(x, norm, weight, h, eps=EPS, tile=tile, pdl=True)
    error = (h.float() - expected.float()).norm() / expected.float().norm()
    assert error < 8e-3
    again = torch.empty_like(h)
    gate_up_gemv(x, norm, weight, again, eps=EPS, tile=tile, pdl=False)
    assert torch.equal(again, h)
