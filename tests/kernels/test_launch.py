"""What the launchers refuse, each before anything is launched."""

import pytest
import torch

pytest.importorskip("triton")

from skote.kernels.flash_decode_triton import Attention, flash_decode, fold_shape
from skote.kernels.gate_up_gemv_triton import gate_up_gemv
from skote.kernels.launch import GemmTile, Tile, check_matrix, check_rows, check_tensors, check_tile, padded
from skote.kernels.residual_gemm_triton import residual_gemm
from skote.kernels.residual_gemv_triton import residual_gemv
from skote.kernels.silu_mul_triton import silu_mul_triton
from skote.kernels.tiles import batch_tiles, step_tiles


def test_cpu_tensors_are_refused_by_name() -> None:
    with pytest.raises(TypeError, match="op: x is on cpu"):
        check_tensors("op", x=torch.zeros(2))
    with pytest.raises(TypeError, match="residual_gemv: x is on cpu"):
        residual_gemv(torch.zeros(4), torch.zeros(4), torch.zeros(4, 4), tile=Tile(1, 1), pdl=False)
    with pytest.raises(TypeError, match="gate_up_gemv: x is on cpu"):
        gate_up_gemv(*(torch.zeros(4) for _ in range(4)), eps=1e-5, tile=Tile(2, 1), pdl=False)
    with pytest.raises(TypeError, match="residual_gemm: x is on cpu"):
        residual_gemm(*(torch.zeros(16, 16) for _ in range(3)), tile=GemmTile(16, 64, 2, 1), pdl=False)
    with pytest.raises(TypeError, match="silu_mul_triton: gate_up is on cpu"):
        silu_mul_triton(torch.zeros(1, 4))
    with pytest.raises(TypeError, match="flash_decode: q is on cpu"):
        flash_decode(*(torch.zeros(1, 1, 1) for _ in range(8)), positions=1, cut=Attention(), pdl=False)


def test_tensors_that_are_not_contiguous_or_apart_are_refused() -> None:
    here = torch.zeros(4, 4, device="meta")
    with pytest.raises(TypeError, match="CUDA tensors alone"):
        check_tensors("op", x=here)


def test_matrices_of_another_shape_or_type_are_refused() -> None:
    check_matrix("op", torch.zeros(4, 8), 4, 8)
    check_matrix("op", torch.zeros(4, 8), None, 8)
    with pytest.raises(ValueError, match=r"shape \(4, 8\), expected \(3, 8\)"):
        check_matrix("op", torch.zeros(4, 8), 3, 8)
    with pytest.raises(ValueError, match=r"expected \(any, 7\)"):
        check_matrix("op", torch.zeros(4, 8), None, 7)
    with pytest.raises(TypeError, match="fp32, fp16 and bf16"):
        check_matrix("op", torch.zeros(4, 8, dtype=torch.float64), 4, 8)
    with pytest.raises(ValueError, match="32769 elements"):
        check_matrix("op", torch.zeros(1, 32769), 1, 32769)


def test_rows_must_fill_their_tiles() -> None:
    check_tile("op", Tile(4, 8), 12)
    with pytest.raises(ValueError, match="10 rows are not a multiple of the tile's 4"):
        check_tile("op", Tile(4, 8), 10)


def test_a_multi_row_step_has_sixteen_rows() -> None:
    check_rows("op", x=torch.zeros(16, 2), positions=torch.zeros(16))
    with pytest.raises(ValueError, match=r"op: x has shape \(15, 2\), expected 16 rows"):
        check_rows("op", positions=torch.zeros(16), x=torch.zeros(15, 2))
    with pytest.raises(ValueError, match="expected 16 rows"):
        check_rows("op", x=torch.tensor(1.0))


@pytest.mark.parametrize(
    ("hidden", "intermediate"), [(4096, 14336), (2048, 8192), (576, 1536), (36, 50), (5120, 13824)]
)
def test_tiles_divide_the_matrices(hidden: int, intermediate: int) -> None:
    tiles = step_tiles(hidden, intermediate)
    assert hidden % tiles.o.rows == hidden % tiles.down.rows == 2 * intermediate % tiles.gate_up.rows == 0
    assert tiles.gate_up.rows % 2 == tiles.qkv.rows % 2 == 0
    cut = tiles.attention
    assert cut.page % cut.tile == cut.page % cut.group == cut.page % cut.block == 0


@pytest.mark.parametrize(("hidden", "head_dim"), [(4096, 128), (2048, 64), (576, 64), (48, 16)])
def test_the_multi_row_tiles_fit_the_instruction_the_heads_and_a_multiprocessor(hidden: int, head_dim: int) -> None:
    tiles = batch_tiles(hidden, 4 * hidden)
    assert head_dim % tiles.qkv.rows == 0
    for tile in (tiles.qkv, tiles.o, tiles.gate_up, tiles.down, tiles.head):
        assert tile.rows in (16, 32, 64)
        assert tile.block >= 64 * tile.warps
        for dtype, size in ((torch.float32, 4), (torch.bfloat16, 2)):
            columns = tile.columns(dtype)
            in_flight = tile.stages * columns * (tile.rows * size + 16 * 4)  # weights, and x or less
            assert in_flight < 200 << 10


def test_the_multi_row_steps_attention_is_cut_alike_for_all_lengths() -> None:
    cut = batch_tiles(4096, 14336).attention
    assert {cut.split(positions) for positions in (1, 512, 16384, 16385, 131072)} == {cut.page}
    assert cut.fold is not None
    assert cut.page % cut.block == 0


def test_the_split_depends_on_the_positions_in_use_alone() -> None:
    cut = Attention(page=256, tile=32, tiled=512, group=64, grouped=1024)
    assert [cut.split(positions) for positions in (1, 512, 513, 1024, 1025, 40000)] == [32, 32, 64, 64, 256, 256]
    assert fold_shape(4, 128) == (4, 32)
    assert fold_shape(129, 16) == (128, 16)
    assert [padded(n) for n in (1, 3, 576, 4096)] == [1, 4, 1024, 4096]
