"""What the launchers refuse, each before anything is launched."""

import pytest
import torch

pytest.importorskip("triton")

from skote.kernels.flash_decode_triton import Attention, flash_decode, fold_shape
from skote.kernels.gate_up_gemv_triton import gate_up_gemv
from skote.kernels.head_norm_triton import head_norm
from skote.kernels.launch import (
    MAX_ROWS,
    ROW_TILES,
    GemmTile,
    Tile,
    check_bias,
    check_contiguous,
    check_matrix,
    check_offsets,
    check_operand,
    check_rows,
    check_tensors,
    check_tile,
    check_turns,
    check_unsplit,
    padded,
)
from skote.kernels.pages import check_head_dim, check_pool, check_table
from skote.kernels.residual_gemv_triton import residual_gemv
from skote.kernels.silu_mul_triton import silu_mul_triton
from skote.kernels.split_gemm_triton import split_gemm
from skote.kernels.tiles import batch_tiles, step_tiles


def test_cpu_tensors_are_refused_by_name() -> None:
    with pytest.raises(TypeError, match="op: x is on cpu"):
        check_tensors("op", x=torch.zeros(2))
    with pytest.raises(TypeError, match="residual_gemv: x is on cpu"):
        residual_gemv(torch.zeros(4), torch.zeros(4), torch.zeros(4, 4), tile=Tile(1, 1), pdl=False)
    with pytest.raises(TypeError, match="gate_up_gemv: x is on cpu"):
        gate_up_gemv(*(torch.zeros(4) for _ in range(4)), eps=1e-5, tile=Tile(2, 1), pdl=False)
    with pytest.raises(TypeError, match="split_gemm: h is on cpu"):
        split_gemm(*(torch.zeros(16, 16) for _ in range(3)), tile=GemmTile(16, 64, 2, 1), pdl=False)
    with pytest.raises(TypeError, match="head_norm: k is on cpu"):
        head_norm(*(torch.zeros(1, 1, 4) for _ in range(8)), eps=1e-5, page=4, pdl=False)
    with pytest.raises(TypeError, match="op: weight is on cpu"):
        check_bias("op", torch.zeros(4), torch.zeros(4, 8))
    with pytest.raises(TypeError, match="silu_mul_triton: gate_up is on cpu"):
        silu_mul_triton(torch.zeros(1, 4))
    with pytest.raises(TypeError, match="flash_decode: q is on cpu"):
        flash_decode(*(torch.zeros(1, 1, 1) for _ in range(8)), positions=1, cut=Attention(), pdl=False)


def test_tensors_that_are_not_contiguous_or_apart_are_refused() -> None:
    here = torch.zeros(4, 4, device="meta")
    with pytest.raises(TypeError, match="CUDA tensors alone"):
        check_tensors("op", x=here)


def test_pinned_memory_must_be_contiguous_too() -> None:
    """A history in the host's memory is not among what lies on the device."""
    check_contiguous("op", history=torch.zeros(2, 3))
    with pytest.raises(ValueError, match="op: history is not contiguous"):
        check_contiguous("op", history=torch.zeros(3, 2).T)


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


def test_offsets_of_32_bits_have_an_end() -> None:
    check_offsets("op", weight=2**31 - 1)
    with pytest.raises(
        ValueError, match=r"op: weight has 2147483648 elements; the kernel's offsets reach 2147483647\."
    ):
        check_offsets("op", weight=2**31)
    keys = torch.empty(1, 2**24, 128, dtype=torch.float16, device="meta")
    with pytest.raises(ValueError, match="op: a head of the cache has 2147483648 elements"):
        check_pool("op", 128, k=keys)
    check_pool("op", 128, k=keys[:, 1:])


def test_pages_hold_every_position_that_has_an_angle() -> None:
    table = torch.zeros(4, 3, dtype=torch.int32)
    check_table("op", table, (4,), page=16, slots=64, positions=48)
    with pytest.raises(ValueError, match="op: 49 positions do not fit 3 pages of 16 positions in a cache of 64 slots"):
        check_table("op", table, (4,), page=16, slots=64, positions=49)
    with pytest.raises(ValueError, match="48 positions do not fit 3 pages of 16 positions in a cache of 32 slots"):
        check_table("op", table, (4,), page=16, slots=32, positions=48)
    with pytest.raises(ValueError, match="cache of 65 slots"):
        check_table("op", table, (4,), page=16, slots=65, positions=48)
    with pytest.raises(ValueError, match=r"op: table has shape \(4, 3\), expected \[pages\] or \[1, pages\]\."):
        check_table("op", table, (), (1,), page=16, slots=64, positions=48)


def test_heads_are_powers_of_two() -> None:
    check_head_dim("op", 16, 16)
    for head_dim in (8, 48):
        with pytest.raises(ValueError, match=f"op: head_dim {head_dim} must be a power of two of at least 16"):
            check_head_dim("op", head_dim, 16)


def test_rows_must_fill_their_tiles() -> None:
    check_tile("op", Tile(4, 8), 12)
    with pytest.raises(ValueError, match="10 rows are not a multiple of the tile's 4"):
        check_tile("op", Tile(4, 8), 10)


def test_rows_must_fill_every_turn_and_the_matrix_instruction_takes_bf16() -> None:
    half, whole = torch.zeros(1).bfloat16(), torch.zeros(1)
    check_turns("op", Tile(4, 8, 2, mma=True), 24, half, 8)
    check_turns("op", Tile(4, 8, 2), 24, whole, 7)
    with pytest.raises(ValueError, match="12 rows are not a multiple of the tile's 4 x 2"):
        check_turns("op", Tile(4, 8, 2), 12, whole, 8)
    with pytest.raises(TypeError, match=r"op: the weight is torch.float32; a tile with mma takes bf16"):
        check_turns("op", Tile(4, 8, mma=True), 12, whole, 8)
    with pytest.raises(ValueError, match="op: rows of 12 elements; a tile with mma takes a multiple of 8"):
        check_turns("op", Tile(4, 8, mma=True), 12, half, 12)


def test_a_chunk_is_a_piece_of_16_bytes_for_every_thread() -> None:
    assert Tile(2, 4).chunk(torch.bfloat16) == 1024
    assert Tile(2, 4).chunk(torch.float32) == 512


def test_the_multi_row_kernels_take_a_few_numbers_of_rows() -> None:
    check_rows("op", 16, x=torch.zeros(16, 2), positions=torch.zeros(16))
    check_rows("op", 128, x=torch.zeros(128, 2))
    with pytest.raises(ValueError, match="op: 48 rows; the kernel takes 16, 32, 64, 128"):
        check_rows("op", 48, x=torch.zeros(48, 2))
    with pytest.raises(ValueError, match=r"op: x has shape \(15, 2\), expected 16 rows"):
        check_rows("op", 16, positions=torch.zeros(16), x=torch.zeros(15, 2))
    with pytest.raises(ValueError, match="expected 16 rows"):
        check_rows("op", 16, x=torch.tensor(1.0))


def test_what_a_matrix_is_multiplied_with_is_of_its_dtype() -> None:
    check_operand("op", torch.zeros(2, 2), h=torch.zeros(2, 2))
    with pytest.raises(TypeError, match=r"op: h is torch.float16, the weight torch.float32"):
        check_operand("op", torch.zeros(2, 2), h=torch.zeros(2, 2).half())


def test_only_one_kernel_splits_the_columns() -> None:
    check_unsplit("op", GemmTile(16, 64, 2, 1))
    with pytest.raises(ValueError, match="op: the tile splits the columns in 2"):
        check_unsplit("op", GemmTile(16, 64, 2, 1, splits=2))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize(
    ("hidden", "intermediate"), [(4096, 14336), (2048, 8192), (576, 1536), (36, 50), (5120, 13824), (4100, 11009)]
)
def test_tiles_divide_the_matrices(hidden: int, intermediate: int, head_dim: int, dtype: torch.dtype) -> None:
    tiles = step_tiles(hidden, intermediate, head_dim, dtype)
    weight = torch.zeros(1, dtype=dtype)
    check_turns("op", tiles.o, hidden, weight, hidden)
    check_turns("op", tiles.gate_up, 2 * intermediate, weight, hidden)
    check_turns("op", tiles.down, hidden, weight, intermediate)
    assert tiles.gate_up.rows % 2 == tiles.qkv.rows % 2 == 0
    for cut in (tiles.attention, batch_tiles(hidden, intermediate, head_dim, dtype.itemsize).attention):
        assert cut.page % cut.tile == cut.page % cut.group == cut.page % cut.block == 0


@pytest.mark.parametrize(
    ("hidden", "head_dim", "measured"),
    [
        (576, 64, Attention(tile=64, tile_warps=2)),
        (2048, 64, Attention(page=512, tile=512, tile_warps=8)),
        (4096, 128, Attention()),
    ],
)
def test_attention_is_cut_as_measured_where_it_was_measured(hidden: int, head_dim: int, measured: Attention) -> None:
    assert step_tiles(hidden, 4 * hidden, head_dim, torch.bfloat16).attention == measured


@pytest.mark.parametrize("hidden", [576, 2048, 3072, 4096])
@pytest.mark.parametrize("head_dim", [16, 64, 128, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_thread_holds_no_more_of_a_split_than_its_registers_do(
    hidden: int, head_dim: int, dtype: torch.dtype
) -> None:
    cut = step_tiles(hidden, 4 * hidden, head_dim, dtype).attention
    keys_and_values = 2 * cut.tile * head_dim * dtype.itemsize
    assert keys_and_values // (32 * cut.tile_warps) <= 512  # half of its 255 registers of 4 bytes


@pytest.mark.parametrize("hidden", [4096, 2048, 576])
def test_every_number_of_rows_splits_the_columns_alike(hidden: int) -> None:
    splits = {
        tuple(tile.splits for tile in batch_tiles(hidden, 4 * hidden, 64, 2, rows) if isinstance(tile, GemmTile))
        for rows in ROW_TILES
    }
    assert len(splits) == 1


@pytest.mark.parametrize("rows", ROW_TILES)
@pytest.mark.parametrize(("hidden", "head_dim"), [(4096, 128), (2048, 64), (2048, 16), (576, 64), (48, 16)])
def test_the_multi_row_tiles_fit_the_instruction_the_heads_and_a_multiprocessor(
    hidden: int, head_dim: int, rows: int
) -> None:
    tiles = batch_tiles(hidden, 4 * hidden, head_dim, 2, rows)
    assert head_dim % tiles.qkv.rows == 0
    assert {tile.splits for tile in (tiles.qkv, tiles.gate_up, tiles.head)} == {1}
    for tile in (tiles.qkv, tiles.o, tiles.gate_up, tiles.down, tiles.head):
        assert tile.rows in (16, 32, 64, 128)
        for dtype, size in ((torch.float32, 4), (torch.bfloat16, 2)):
            in_flight = tile.stages * tile.columns(dtype) * (tile.rows + rows) * size
            assert in_flight < 200 << 10


def test_the_multi_row_steps_attention_is_cut_alike_for_all_lengths() -> None:
    assert batch_tiles(4096, 14336, 128, 2) == batch_tiles(4096, 14336, 128, 2, MAX_ROWS)
    cut = batch_tiles(4096, 14336, 128, 2).attention
    assert {cut.split(positions) for positions in (1, 512, 16384, 16385, 131072)} == {cut.page}
    assert cut.fold is not None
    assert cut.page % cut.block == 0


def test_the_split_depends_on_the_positions_in_use_alone() -> None:
    cut = Attention(page=256, tile=32, tiled=512, group=64, grouped=1024)
    assert [cut.split(positions) for positions in (1, 512, 513, 1024, 1025, 40000)] == [32, 32, 64, 64, 256, 256]
    assert fold_shape(4, 128) == (4, 32)
    assert fold_shape(129, 16) == (128, 16)
    assert [padded(n) for n in (1, 3, 576, 4096)] == [1, 4, 1024, 4096]
