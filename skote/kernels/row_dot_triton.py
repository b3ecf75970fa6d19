"""The product of a matrix-vector kernel: rows of a matrix, held in registers, times one vector.

    p[n] = sum over c of W[rows[n], c] * x[c]

The columns come in chunks, one piece of 16 bytes a thread. By additions, each weight is converted and multiplied on
its own. By the matrix instruction (MMA, bf16 alone) four weights of every lane go into one m16n8k16: where a kernel is
bound by memory and by power, instructions cost both. A lane's weights belong to column g = lane / 4 of the right
operand, its four elements of x to row g of the left one, so that entry (g, g) of the product is what the four lanes of
g have to add; the other entries mean nothing. Row g + 8 of the left operand holds what x lost when it was rounded to
bf16, so that entry (g + 8, g) adds the rest: x counts with 16 bits, the products are exact, the sums are fp32.

Offsets into the matrix have 32 bits, which launchers check (`check_offsets`).

All that this asks of the compiler's layout is that each lane has a piece of its own, as it does where a chunk is one
piece a thread. (The fragments of m16n8k16 are those of the PTX ISA, section on warp-level matrix instructions.)
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, assignment"

from __future__ import annotations

import triton
import triton.language as tl

_IN_TWO = tl.constexpr("""{
    .reg .b32 even, odd;
    .reg .f32 a, b;
    cvt.rn.bf16x2.f32 $0, $3, $2;
    shl.b32 even, $0, 16;
    and.b32 odd, $0, 0xffff0000;
    mov.b32 a, even;
    mov.b32 b, odd;
    sub.f32 a, $2, a;
    sub.f32 b, $3, b;
    cvt.rn.bf16x2.f32 $1, b, a;
}""")
_MMA = "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"
_MULTIPLY = tl.constexpr(f"{_MMA} {{$0, $1, $2, $3}}, {{$6, $8, $7, $9}}, {{$4, $5}}, {{$10, $11, $12, $13}};")
_MULTIPLY_EXACT = tl.constexpr(f"""{{
    .reg .b32 nothing;
    mov.b32 nothing, 0;
    {_MMA} {{$0, $1, $2, $3}}, {{$6, nothing, $7, nothing}}, {{$4, $5}}, {{$8, $9, $10, $11}};
}}""")
_DIAGONAL = tl.constexpr("""{
    .reg .u32 lane, row, pair, low;
    .reg .pred there, odd;
    .reg .f32 rounded, rest;
    mov.u32 lane, %laneid;
    shr.u32 row, lane, 3;
    and.b32 pair, lane, 3;
    setp.eq.u32 there, row, pair;
    and.b32 low, lane, 4;
    setp.ne.u32 odd, low, 0;
    selp.f32 rounded, $5, $4, odd;
    selp.f32 rest, $7, $6, odd;
    add.f32 rounded, rounded, rest;
    selp.f32 $0, rounded, 0f00000000, there;
    mov.f32 $1, 0f00000000;
    mov.f32 $2, 0f00000000;
    mov.f32 $3, 0f00000000;
}""")


@triton.jit
def weight_chunks(weight_ptr, rows, COLUMNS: tl.constexpr, CHUNK: tl.constexpr):
    """Rows of a matrix of COLUMNS columns, as a tuple of chunks [rows, CHUNK]; zeros beyond the last column."""
    columns = tl.arange(0, CHUNK)
    offsets = rows[:, None] * COLUMNS + columns[None, :]
    chunks = ()
    for start in tl.static_range(0, COLUMNS, CHUNK):
        inside = (columns < COLUMNS - start)[None, :]
        chunks += (tl.load(weight_ptr + offsets + start, mask=inside, other=0.0, eviction_policy="evict_first"),)
    return chunks


@triton.jit
def norm_chunks(norm_ptr, COLUMNS: tl.constexpr, CHUNK: tl.constexpr):
    """A norm's weight, as a tuple of chunks [CHUNK]; zeros beyond the last column."""
    columns = tl.arange(0, CHUNK)
    chunks = ()
    for start in tl.static_range(0, COLUMNS, CHUNK):
        chunks += (tl.load(norm_ptr + columns + start, mask=columns < COLUMNS - start, other=0.0),)
    return chunks


@triton.jit
def row_chunks(x_ptr, COLUMNS: tl.constexpr, CHUNK: tl.constexpr):
    """The vector that an earlier kernel wrote, as a tuple of chunks [CHUNK]; belongs after the wait."""
    columns = tl.arange(0, CHUNK)
    chunks = ()
    for start in tl.static_range(0, COLUMNS, CHUNK):
        inside = columns < COLUMNS - start
        chunks += (tl.load(x_ptr + columns + start, mask=inside, other=0.0, eviction_policy="evict_last"),)
    return chunks


@triton.jit
def normed_chunks(x, norm, eps, COLUMNS: tl.constexpr, MMA: tl.constexpr):
    """x * norm, as `row_dot` takes it, and the number that its products still lack: 1 / sqrt(mean(x^2) + eps)."""
    rounded = ()
    rest = ()
    squares = tl.zeros_like(x[0])
    for chunk in tl.static_range(len(x)):
        squares += x[chunk] * x[chunk]
        scaled = x[chunk] * norm[chunk].to(tl.float32)
        if MMA:
            high, low = tl.inline_asm_elementwise(
                _IN_TWO, "=&r,=r,f,f", [scaled], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=2
            )
            rounded += (high,)
            rest += (low,)
        else:
            rounded += (scaled,)
    return rounded, rest, tl.rsqrt(tl.sum(squares, axis=0) / COLUMNS + eps)


@triton.jit
def row_dot(weight, x, rest, MMA: tl.constexpr):
    """p, fp32 [rows]: `weight` of `weight_chunks` times `x` + `rest`, both tuples of chunks, `rest` perhaps empty."""
    sums = tl.zeros(weight[0].shape, tl.float32)
    for chunk in tl.static_range(len(x)):
        wide = tl.broadcast_to(x[chunk][None, :], weight[0].shape)
        if not MMA:
            sums += weight[chunk].to(tl.float32) * wide.to(tl.float32)
        elif len(rest) > 0:
            low = tl.broadcast_to(rest[chunk][None, :], weight[0].shape)
            sums = tl.inline_asm_elementwise(
                _MULTIPLY,
                "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f",
                [weight[chunk], wide, low, sums],
                dtype=tl.float32,
                is_pure=True,
                pack=4,
            )
        else:
            sums = tl.inline_asm_elementwise(
                _MULTIPLY_EXACT,
                "=f,=f,=f,=f,r,r,r,r,f,f,f,f",
                [weight[chunk], wide, sums],
                dtype=tl.float32,
                is_pure=True,
                pack=4,
            )
    if MMA:  # of four entries a lane has one that counts, or none
        sums = tl.inline_asm_elementwise(
            _DIAGONAL, "=&f,=&f,=&f,=&f,f,f,f,f", [sums], dtype=tl.float32, is_pure=True, pack=4
        )
        sums, _ = tl.split(tl.reshape(sums, [sums.shape[0], sums.shape[1] // 2, 2]))
        sums, _ = tl.split(tl.reshape(sums, [sums.shape[0], sums.shape[1] // 2, 2]))
    return tl.sum(sums, axis=1)
