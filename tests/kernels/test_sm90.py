"""The kernels' machine code for sm_90, compiled without a GPU: what comes before the wait, what after, and no spills.

In it ACQBULK is the wait, PREEXIT lets the successor start, a load's EF marks weights (evict_first) and its EL what
depends on the kernels before (evict_last), which is how the kernels' sources mark them (see `skote.kernels.launch`).
LDGSTS are the reads of a pipelined loop, weights and dependents alike: all of them belong after the wait. That the
sources put the marks, and a wait on every path, is what `test_pdl_order.py` sees to.
"""

import importlib.util
import inspect
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any, NamedTuple

import pytest
import torch

triton = pytest.importorskip("triton")
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from skote.kernels import (  # noqa: E402
    add_rms_norm_triton,
    expert_gemm_triton,
    expert_gemv_triton,
    flash_decode_triton,
    flash_prefill_triton,
    flash_split_triton,
    gate_up_gemm_triton,
    gate_up_gemv_triton,
    greedy_token_triton,
    gumbel_best_triton,
    head_gemm_triton,
    head_gemv_triton,
    head_norm_triton,
    qkv_gemm_triton,
    qkv_gemv_triton,
    read_sum_triton,
    residual_gemv_triton,
    rms_norm_triton,
    rope_write_triton,
    silu_mul_triton,
    split_gemm_triton,
)
from skote.kernels.expert_gemm_triton import gemm_tile  # noqa: E402
from skote.kernels.expert_gemv_triton import down_tile, up_tile  # noqa: E402
from skote.kernels.flash_decode_triton import STREAM_ROWS, Attention, fold_shape  # noqa: E402
from skote.kernels.flash_prefill_triton import prefill_tile  # noqa: E402
from skote.kernels.launch import GemmTile, Tile, padded  # noqa: E402
from skote.kernels.rms_norm_triton import launch_shape  # noqa: E402
from skote.kernels.tiles import batch_tiles, owing, step_tiles  # noqa: E402

pytestmark = [
    pytest.mark.skipif(triton.knobs.runtime.interpret, reason="the interpreter compiles nothing"),
    pytest.mark.skipif(sys.platform != "linux", reason="Triton's wheel has ptxas and cuobjdump on Linux"),
]

FP32 = ("x", "cos", "sin", "sums", "stats", "logits", "best", "cutoff", "temperature", "partials", "delta")
FP32 += ("owed", "post", "kept", "share")  # a norm of 1 + w is fp32 as well
INT32 = ("position", "positions", "table", "first", "history", "chosen", "order", "expert", "end")
FIXED = {
    f"{name}_ptr": kind for kind, names in {"fp32": FP32, "i32": INT32, "i64": ("seed",)}.items() for name in names
}
DIVISIBLE = {"head_stride", "vocab", "outputs", "intermediate", "hidden", "start", "capacity"}
"""By 16, as Triton finds out at the launch."""
STRIDES = {f"{name}_{axis}" for name in "qkv" for axis in ("piece", "token", "head")}
"""Likewise."""
SCALARS = {"eps": "fp32", "scale": "fp32"} | dict.fromkeys(
    (*DIVISIBLE, *STRIDES, "table_stride", "programs", "pages", "places", "room", "tokens", "keys"), "i32"
)
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
HEADS = {"HEADS": 32, "GROUP": 4}
WAIT = "gdc_wait()"


class Build(NamedTuple):
    """How a kernel is compiled: its module and name, warps, constants, and the dtype of what has no fixed one.

    `own` are the dtypes of this kernel alone, by argument; `given` are the pointers that need not be there and are.
    """

    module: ModuleType
    name: str
    warps: int
    constants: dict[str, Any]
    dtype: str = "bf16"
    own: Mapping[str, str] = MappingProxyType({})
    given: tuple[str, ...] = ()

    def key(self) -> str:
        """The same for what compiles alike."""
        constants = " ".join(f"{name}={value}" for name, value in self.constants.items())
        return " ".join((self.name, self.dtype, f"warps={self.warps}", constants, *self.given))


class Shape(NamedTuple):
    """What of a model the tiles depend on."""

    hidden: int
    intermediate: int
    head_dim: int
    dtype: str

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype of an element."""
        return DTYPES[self.dtype]


def gemms(shape: Shape, rows: int, *, bias: bool = False, rotate: bool = True) -> list[Build]:
    """The multi-row kernels as a model of this shape runs them for `rows` rows."""
    hidden, intermediate, head_dim, dtype = shape
    tiles = batch_tiles(hidden, intermediate, head_dim, shape.torch_dtype.itemsize, rows)

    def build(module: ModuleType, name: str, tile: GemmTile, **more: int) -> Build:
        block = tile.columns(shape.torch_dtype)
        return Build(module, name, tile.warps, {"ROWS": rows, "BLOCK": block, "STAGES": tile.stages, **more}, dtype)

    heads = {"HEADS": 32, "KV_HEADS": 8, "HEAD_DIM": head_dim, "PAGE": tiles.attention.page}
    gate_up, head, pairs = tiles.gate_up, tiles.head, tiles.qkv.rows // 2
    flags = {"BIAS": bias, "ROTATE": rotate}
    return [
        build(qkv_gemm_triton, "qkv_gemm", tiles.qkv, HIDDEN=hidden, **heads, PAIRS=pairs, **flags),
        *(
            build(split_gemm_triton, "split_gemm", tile, COLUMNS=columns, TILE=tile.rows, SPLITS=tile.splits)
            for tile, columns in ((tiles.o, hidden), (tiles.down, intermediate))
        ),
        build(gate_up_gemm_triton, "gate_up_gemm", gate_up, HIDDEN=hidden, TILE=gate_up.rows // 2),
        build(head_gemm_triton, "head_gemm", head, HIDDEN=hidden, TILE=head.rows),
    ]


def gemvs(shape: Shape, *, bias: bool = False, rotate: bool = True, owed: bool = False) -> list[Build]:
    """The matrix-vector kernels of the single-row set."""
    hidden, intermediate, head_dim, dtype = shape
    tiles = step_tiles(hidden, intermediate, head_dim, shape.torch_dtype)
    tiles = owing(tiles, shape.torch_dtype) if owed else tiles

    def build(module: ModuleType, name: str, tile: Tile, **more: int) -> Build:
        return Build(module, name, tile.warps, more, dtype)

    def turned(tile: Tile) -> dict[str, int]:
        return {"CHUNK": tile.chunk(shape.torch_dtype), "TURNS": tile.turns, "MMA": tile.mma}

    block, pairs = padded(hidden), tiles.qkv.rows // 2
    flags = {"BIAS": bias, "ROTATE": rotate}
    heads = {"HEADS": 32, "KV_HEADS": 8, "HEAD_DIM": head_dim, "PAGE": tiles.attention.page}
    halves = {"HIDDEN": hidden, "INTERMEDIATE": intermediate, "ROWS": tiles.gate_up.rows // 2}
    return [
        build(qkv_gemv_triton, "qkv_gemv", tiles.qkv, BLOCK=block, HIDDEN=hidden, **heads, PAIRS=pairs, **flags),
        *(
            build(residual_gemv_triton, "residual_gemv", tile, COLUMNS=columns, ROWS=tile.rows, **turned(tile))
            for tile, columns in ((tiles.down, intermediate), (tiles.o, hidden))
        ),
        build(gate_up_gemv_triton, "gate_up_gemv", tiles.gate_up, **halves, **turned(tiles.gate_up)),
        build(head_gemv_triton, "head_gemv", tiles.head, BLOCK=block, HIDDEN=hidden, ROWS=tiles.head.rows),
    ]


def attentions(shape: Shape, cut: Attention) -> list[Build]:
    """The kernels of attention that is cut so; without those that `cut` leaves out."""
    shared = {**HEADS, "HEAD_DIM": shape.head_dim, "PAGE": cut.page}
    tiled = {**shared, "TILE": cut.tile, "SINGLE": cut.tile >= cut.tiled}
    grouped = {**shared, "ROWS": STREAM_ROWS, "TILE": cut.group}
    streamed = {**shared, "ROWS": STREAM_ROWS, "BLOCK": cut.block, "STAGES": cut.stages}
    builds = [Build(flash_split_triton, "flash_stream", cut.stream_warps, streamed, shape.dtype)]
    if cut.tiled:
        builds.append(Build(flash_split_triton, "flash_tile", cut.tile_warps, tiled, shape.dtype))
    if cut.grouped:
        builds.append(Build(flash_split_triton, "flash_group", cut.group_warps, grouped, shape.dtype))
    for splits in (cut.fold,) if cut.fold else (4, 128):
        fold, dims = fold_shape(splits, shape.head_dim)
        constants = {"HEADS": 32, "HEAD_DIM": shape.head_dim, "SPLIT": cut.page, "FOLD": fold, "DIMS": dims}
        builds.append(Build(flash_decode_triton, "flash_fold", 1 if fold <= 32 else 4, constants, shape.dtype))
    return builds


def experts(hidden: int, intermediate: int, count: int, chosen: int, dtype: str) -> list[Build]:
    """The kernels of a mixture of `count` experts."""
    shape = Shape(hidden, intermediate, 128, dtype)
    tile = up_tile(step_tiles(hidden, intermediate, 128, shape.torch_dtype).gate_up, shape.torch_dtype)
    up = {"HIDDEN": hidden, "INTERMEDIATE": intermediate, "EXPERTS": count, "ALL": padded(count), "CHOSEN": chosen}
    up |= {"NORMALISED": True, "ACTIVATION": "silu", "CHUNK": tile.chunk(shape.torch_dtype), "ROWS": tile.rows // 2}
    chunk, rows, warps = down_tile(intermediate, padded(chosen), hidden)
    down = {"COLUMNS": intermediate, "CHOSEN": chosen, "SLOTS": padded(chosen), "CHUNK": chunk, "ROWS": rows}
    outputs, block, stages = gemm_tile(shape.torch_dtype)
    many = {"ROWS": 16 if dtype == "fp32" else 128, "TILE": outputs, "BLOCK": block, "STAGES": stages}
    return [
        Build(expert_gemv_triton, "expert_up_gemv", tile.warps, up | {"MMA": tile.mma}, dtype),
        Build(expert_gemv_triton, "expert_down_gemv", warps, down, dtype),
        Build(
            expert_gemm_triton,
            "expert_gemm",
            4,
            {"SHARED": chosen, "COLUMNS": hidden, **many, "ACTIVATION": "silu"},
            dtype,
        ),
        Build(
            expert_gemm_triton,
            "expert_gemm",
            4,
            {"SHARED": 1, "COLUMNS": intermediate, **many, "ACTIVATION": ""},
            dtype,
        ),
    ]


def plain(dtype: str) -> list[Build]:
    """The kernels without programmatic dependent launch: those of a prefill, of its norms, and of the read ceiling."""
    alike, summed = MappingProxyType({"x_ptr": dtype}), MappingProxyType({"x_ptr": dtype, "out_ptr": "fp32"})
    norms = dict(map(launch_shape, (576, 5120)))
    heads = {"HEADS": 32, "KV_HEADS": 8, "BLOCK": 64, "PAGE": 256}
    return [
        *(Build(rms_norm_triton, "rms_norm", warps, {"BLOCK": block}, dtype, alike) for block, warps in norms.items()),
        *(
            Build(rope_write_triton, "rope_write", 4, {**heads, "HEAD_DIM": head_dim, "NORM": norm}, dtype)
            for head_dim, norm in ((128, False), (256, True))
        ),
        Build(silu_mul_triton, "silu_mul", 4, {"INTERMEDIATE": 14336, "BLOCK": 1024}, dtype),
        Build(read_sum_triton, "read_sum", 8, {"BLOCK": read_sum_triton.BLOCK}, dtype, summed),
    ]


def between(dtype: str) -> dict[str, Build]:
    """Of the kernels with programmatic dependent launch, as an 8B model runs them, those that no tile cuts."""
    return {
        "add_rms_norm": Build(add_rms_norm_triton, "add_rms_norm", 8, {"BLOCK": 4096, "PARTS": 4}, dtype),
        "head_norm": Build(head_norm_triton, "head_norm", 1, {"HEADS": 32, "HEAD_DIM": 128, "PAGE": 128}, dtype),
        "greedy_token": Build(
            greedy_token_triton, "greedy_token", 32, {"HIDDEN": 4096, "BLOCK": 4096, "PROGRAMS": 32768}, dtype
        ),
    }


def cut_by_tiles(shape: Shape) -> dict[str, Build]:
    """The other ones of a model of this shape; behind a name may stand its rows."""
    return {
        **{build.name: build for build in attentions(shape, Attention())},
        **{build.name: build for build in gemvs(shape) if build.constants.get("COLUMNS") != shape.hidden},
        **{f"{build.name} {rows}": build for rows in (16, 128) for build in gemms(shape, rows)},
    }


def of_experts(dtype: str) -> dict[str, Build]:
    """Those of a step of one row through the experts of Qwen3-30B-A3B."""
    return {build.name: build for build in experts(2048, 768, 128, 8, dtype) if "gemv" in build.name}


LARGEST = Shape(4096, 14336, 128, "bf16")
KERNELS = {
    **cut_by_tiles(LARGEST),
    **of_experts("bf16"),
    **between("bf16"),
    "gumbel_best": Build(gumbel_best_triton, "gumbel_best", 4, {"BLOCK": 1024}),
}
"""The kernels with programmatic dependent launch, as an 8B model runs them; behind a name may stand its rows."""
GEMMS = [name for name in KERNELS if "gemm" in name]
IN_FP16 = {**cut_by_tiles(LARGEST._replace(dtype="fp16")), **of_experts("fp16"), **between("fp16")}
ORDERED = [*KERNELS.items(), *IN_FP16.items()]

SHAPES = [
    Shape(*sizes, dtype)
    for sizes in (
        (576, 1536, 64),  # SmolLM2-135M
        (2048, 8192, 64),  # Llama-3.2-1B
        (2048, 6144, 128),  # Qwen3-1.7B
        (2048, 16384, 256),  # Gemma-2B
        (3072, 8192, 128),  # Llama-3.2-3B
        (4096, 14336, 128),  # Llama-3.1-8B
        (4096, 14336, 64),
        (4096, 14336, 256),
        (576, 1536, 128),
        (576, 1536, 256),
    )
    for dtype in ("bf16", "fp32")
]
OWING = [  # of each width, in fp32 those that need the most registers
    LARGEST,
    Shape(3584, 14336, 256, "bf16"),  # Gemma 2 9B
    Shape(3584, 14336, 256, "fp32"),
    Shape(2048, 16384, 256, "bf16"),
    Shape(576, 1536, 256, "bf16"),
    Shape(576, 1536, 256, "fp32"),
]
FLAGS = ({"bias": True}, {"rotate": False})
OWED = ("owed_ptr", "post_ptr", "kept_ptr")


def gemma(shape: Shape) -> list[Build]:
    """All kernels of a Gemma 2 of this shape that are others than a Llama's, and those of its prefill."""
    norms = {"qkv_gemv": {}, "gate_up_gemv": {"ACTIVATION": "gelu_tanh"}, "head_gemv": {"CAP": 30.0}}
    builds = [
        each._replace(constants=each.constants | norms[each.name], given=OWED)
        for each in gemvs(shape, owed=True)
        if each.name in norms
    ]
    builds += [
        each._replace(constants=each.constants | {"ADD": False})
        for each in gemvs(shape, owed=True)
        if each.name == "residual_gemv"
    ]
    flags = {"gate_up_gemm": {"ACTIVATION": "gelu_tanh"}, "head_gemm": {"CAP": 30.0}}
    for rows in (16, 128) if shape.dtype == "bf16" else (16,):
        builds += [
            each._replace(constants=each.constants | flags[each.name])
            for each in gemms(shape, rows)
            if each.name in flags
        ]
    for tiles in (step_tiles(*shape[:3], shape.torch_dtype), batch_tiles(*shape[:3], shape.torch_dtype.itemsize)):
        for each in attentions(shape, tiles.attention):
            scores = {} if each.name == "flash_fold" else {"CAP": 50.0}
            builds.append(each._replace(constants=each.constants | scores | {"WINDOW": 4096}))
    parts = {"BLOCK": padded(shape.hidden), "PARTS": 4}
    warps = launch_shape(shape.hidden)[1]
    builds.append(Build(add_rms_norm_triton, "add_rms_norm", warps, parts, shape.dtype, given=("post_ptr",)))
    return builds


def prefills(head_dim: int, dtype: str) -> list[Build]:
    """The attention of a prefill with what it has beyond SDPA's; of the largest heads also one without the other."""
    shape = Shape(0, 0, head_dim, dtype)
    tile = prefill_tile(head_dim, shape.torch_dtype)
    constants = {**HEADS, "HEAD_DIM": head_dim, "ROWS": tile.rows, "BLOCK": tile.block, "STAGES": tile.stages}
    return [
        Build(flash_prefill_triton, "flash_prefill", tile.warps, constants | {"WINDOW": window, "CAP": cap}, dtype)
        for window, cap in ((4096, 50.0), *(((4096, 0.0), (0, 50.0)) if head_dim == 256 else ()))
    ]


BUILDS = {
    build.key(): build
    for builds in (
        KERNELS.values(),
        IN_FP16.values(),
        between("fp32").values(),
        *map(plain, DTYPES),
        *map(gemvs, SHAPES),
        *(gemvs(shape, **flags) for shape in (*SHAPES[:2], LARGEST) for flags in FLAGS),
        *(gemms(shape, rows, **flags) for shape in (SHAPES[0], LARGEST) for rows in (32, 128) for flags in FLAGS),
        *map(gemma, OWING),
        *(experts(2048, 768, 128, 8, dtype) for dtype in ("bf16", "fp16")),  # Qwen3-30B-A3B
        *(experts(4096, 14336, 8, 2, dtype) for dtype in ("bf16", "fp32")),  # Mixtral-8x7B
        *(prefills(head_dim, dtype) for head_dim in (128, 256) for dtype in ("bf16", "fp32")),
        prefills(64, "fp16"),
        *(attentions(shape, step_tiles(*shape[:3], shape.torch_dtype).attention) for shape in SHAPES),
        *(attentions(shape, batch_tiles(*shape[:3], shape.torch_dtype.itemsize).attention) for shape in SHAPES),
        # The most rows that either of a width's tiles takes: the more rows, the more registers. In fp32 a step's 16,
        # since its prefill does not take these kernels.
        *(
            gemms(shape, rows)
            for shape in SHAPES
            if shape.hidden in (576, 2048, 4096)
            for rows in ((32, 128) if shape.dtype == "bf16" else (16,))
        ),
    )
    for build in builds
}
"""All tile sets, dtypes and head sizes, each kernel that compiles differently once."""

PROJECTIONS = ("qkv_gemv", "residual_gemv", "gate_up_gemv", "head_gemv")


def machine_code(build: Build, tmp_path: Path, module: ModuleType | None = None) -> list[str]:
    """The opcodes of a kernel, compiled for sm_90 with PDL on, where it knows it, in the order of the code.

    Of `module`, if one is given.
    """
    kernel = getattr(module or build.module, f"{build.name}_kernel")
    optional = {each.name: each.default for each in kernel.params if each.has_default}  # constants all of them, or None
    constants = {**{name: value for name, value in optional.items() if name not in build.given}, **build.constants}
    constants |= {"PDL": True} if "PDL" in kernel.arg_names else {}
    dtypes = FIXED | build.own
    signature, attributes = {}, {}
    for index, argument in enumerate(kernel.arg_names):
        if argument in constants:
            signature[argument] = "constexpr"
        elif argument in SCALARS:
            signature[argument] = SCALARS[argument]
        else:
            signature[argument] = f"*{dtypes.get(argument, build.dtype)}"
        if argument in DIVISIBLE | STRIDES or argument.endswith("_ptr"):
            attributes[index,] = [["tt.divisibility", 16]]
    places = {(kernel.arg_names.index(argument),): value for argument, value in constants.items()}
    source = ASTSource(kernel, signature, constexprs=places, attrs=attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": build.warps})
    binary = tmp_path / "kernel.cubin"
    binary.write_bytes(compiled.asm["cubin"])
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    listing = subprocess.run([tool, "--dump-sass", binary], capture_output=True, text=True, check=True).stdout
    return re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)", listing)


def waits(build: Build) -> int:
    """How many waits the source of a kernel has."""
    return inspect.getsource(getattr(build.module, f"{build.name}_kernel").fn).count(WAIT)


def violations(opcodes: list[str], name: str, expected: int, turns: int = 1) -> list[str]:
    """What the machine code breaks of the rules in `skote.kernels.launch`, where its source has `expected` waits.

    Of a kernel that takes several `turns` the weights of the first are read before the wait, those of the others after.
    """
    if "ACQBULK" not in opcodes:
        return ["there is no wait"]
    found = []
    if (there := opcodes.count("ACQBULK")) != expected:
        found.append(f"of {expected} waits there are {there}")
    wait = opcodes.index("ACQBULK")
    before, after = opcodes[:wait], opcodes[wait : opcodes.index("EXIT", wait)]
    if "PREEXIT" not in before:
        found.append("the successor may not start before the wait")
    late = {"a write": r"STG", "a dependent read": r"LDG\..*\.EL", "a read of a pipelined loop": r"LDGSTS"}
    found += [
        f"{what} comes before the wait" for what, code in late.items() if any(re.match(code, each) for each in before)
    ]
    if name in GEMMS:
        if sum(code.startswith("LDGSTS") and code.endswith(".128") for code in after) < 8:
            found.append("no pipelined loop reads in wide loads after the wait")
    elif not any(code.startswith("LDG.") and ".EL" in code for code in after):
        found.append("no dependent read comes after the wait")
    if name in PROJECTIONS:
        early, late_reads = (sum(".EF" in code for code in part) for part in (before, after))
        if late_reads != early * (turns - 1):
            found.append("a weight is read after the wait")
        if sum(".EF" in code and code.endswith(".128") for code in before) < 4:
            found.append("the weights are not read in wide loads before the wait")
    return found


def test_every_kernel_is_compiled_in_every_dtype() -> None:
    folder = Path(str(flash_split_triton.__file__)).parent
    sources = "\n".join(re.sub("#.*", "", path.read_text(encoding="utf-8")) for path in folder.glob("*_triton.py"))
    assert set(re.findall(r"def (\w+)_kernel\([^)]*PDL: tl", sources)) == {build.name for build in KERNELS.values()}
    compiled = {(build.name, build.dtype) for build in BUILDS.values()}
    one_dtype = {("gumbel_best", "bf16")}  # fp32 and integers alone
    kernels = set(re.findall(r"def (\w+)_kernel\(", sources)) - {"gumbel_best"}
    assert compiled == one_dtype | {(name, dtype) for name in kernels for dtype in DTYPES}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "build"), ORDERED, ids=[f"{name} {build.dtype}" for name, build in ORDERED])
def test_loads_and_stores_are_on_their_side_of_the_wait(name: str, build: Build, tmp_path: Path) -> None:
    assert violations(machine_code(build, tmp_path), name, waits(build), build.constants.get("TURNS", 1)) == []


@pytest.mark.slow
@pytest.mark.parametrize("key", BUILDS, ids=list(BUILDS))
def test_no_tile_spills_registers_to_memory(key: str, tmp_path: Path) -> None:
    opcodes = machine_code(BUILDS[key], tmp_path)
    assert not [code for code in opcodes if code.startswith(("LDL", "STL"))]


@pytest.mark.slow
@pytest.mark.parametrize("build", plain("bf16"), ids=lambda build: build.key())
def test_what_streams_is_read_and_written_in_pieces_of_16_bytes(build: Build, tmp_path: Path) -> None:
    opcodes = machine_code(build, tmp_path)
    assert sum(code.startswith("LDG") and code.endswith(".128") for code in opcodes) >= 2
    if build.name != "read_sum":  # which writes a number a program
        assert {code.rpartition(".")[2] for code in opcodes if code.startswith("STG")} == {"128"}


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in GEMMS if name != "qkv_gemm 16"])
def test_tiles_of_64_rows_go_from_shared_memory_to_the_matrix_instruction(name: str, tmp_path: Path) -> None:
    opcodes = machine_code(KERNELS[name], tmp_path)
    groups = KERNELS[name].warps // 4  # of four warps, which share the rows where there are several
    rows = int(name.partition(" ")[2]) // groups
    assert any(code.startswith(f"HGMMA.64x{rows}x16") for code in opcodes)
    assert not [code for code in opcodes if code.startswith("LDSM")], "an operand goes through registers"


@pytest.mark.slow
@pytest.mark.parametrize(("name", "index"), [(name, i) for name, each in KERNELS.items() for i in range(waits(each))])
def test_a_kernel_without_one_of_its_waits_is_found_out(name: str, index: int, tmp_path: Path) -> None:
    build = KERNELS[name]
    head, kernel, body = inspect.getsource(build.module).partition(f"def {build.name}_kernel")
    parts = body.split(WAIT)
    path = tmp_path / f"{build.name}_hasty.py"
    hasty_body = WAIT.join(parts[: index + 1]) + "pass" + WAIT.join(parts[index + 1 :])
    path.write_text(head + kernel + hasty_body, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    hasty = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hasty)
    expected = waits(build)
    found = violations(machine_code(build, tmp_path, hasty), name, expected, build.constants.get("TURNS", 1))
    assert found[0] == ("there is no wait" if expected == 1 else f"of {expected} waits there are {expected - 1}")


def test_the_rules_see_each_way_of_breaking_them() -> None:
    good = ["PREEXIT", *["LDG.E.EF.128"] * 4, "ACQBULK", "LDG.E.EL.128", "STG.E", "EXIT"]
    assert violations(good, "qkv_gemv", 1) == []
    assert violations(["STG.E", *good], "qkv_gemv", 1) == ["a write comes before the wait"]
    assert violations(["LDG.E.EL.128", *good], "qkv_gemv", 1) == ["a dependent read comes before the wait"]
    assert violations([*good[:-1], "LDG.E.EF.128", "EXIT"], "qkv_gemv", 1) == ["a weight is read after the wait"]
    assert violations([*good[:-1], *["LDG.E.EF.128"] * 4, "EXIT"], "gate_up_gemv", 1, turns=2) == []
    assert violations(good, "gate_up_gemv", 1, turns=2) == ["a weight is read after the wait"]
    assert violations(["LDGSTS.E.BYPASS.128", *good], "qkv_gemv", 1) == [
        "a read of a pipelined loop comes before the wait"
    ]
    assert violations(good[1:], "qkv_gemv", 1) == ["the successor may not start before the wait"]
    assert violations(["PREEXIT", *good[3:]], "qkv_gemv", 1) == [
        "the weights are not read in wide loads before the wait"
    ]
    pipelined = ["PREEXIT", "ACQBULK", *["LDGSTS.E.BYPASS.128"] * 8, "STG.E", "EXIT"]
    assert violations(pipelined, "head_gemm 16", 1) == []
    assert violations([*pipelined[:2], "LDG.E", "STG.E", "EXIT"], "head_gemm 16", 1) == [
        "no pipelined loop reads in wide loads after the wait"
    ]
    assert violations(["PREEXIT", "ACQBULK", "STG.E", "EXIT"], "flash_fold", 1) == [
        "no dependent read comes after the wait"
    ]
    idle_first = ["PREEXIT", "ACQBULK", "EXIT", *good[1:]]
    assert violations(idle_first, "flash_tile", 2) == ["no dependent read comes after the wait"]
    assert violations(good, "flash_tile", 2) == ["of 2 waits there are 1"]
