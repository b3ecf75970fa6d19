"""The decode kernels' machine code for sm_90, compiled without a GPU: what comes before the wait, what after.

In it ACQBULK is the wait, PREEXIT lets the successor start, a load's EF marks weights (evict_first) and its EL what
depends on the kernels before (evict_last), which is how the kernels' sources mark them (see `skote.kernels.launch`).
LDGSTS are the reads of a pipelined loop, weights and dependents alike: all of them belong after the wait.
"""

import importlib.util
import inspect
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

triton = pytest.importorskip("triton")
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from skote.kernels import (  # noqa: E402
    add_rms_norm_triton,
    flash_decode_triton,
    flash_split_triton,
    gate_up_gemm_triton,
    gate_up_gemv_triton,
    greedy_token_triton,
    gumbel_best_triton,
    head_gemm_triton,
    head_gemv_triton,
    qkv_gemm_triton,
    qkv_gemv_triton,
    residual_gemv_triton,
    split_gemm_triton,
)
from skote.kernels.launch import GemmTile  # noqa: E402
from skote.kernels.tiles import batch_tiles  # noqa: E402

pytestmark = [
    pytest.mark.skipif(triton.knobs.runtime.interpret, reason="the interpreter compiles nothing"),
    pytest.mark.skipif(sys.platform != "linux", reason="Triton's wheel has ptxas and cuobjdump on Linux"),
]

FP32 = ("x", "cos", "sin", "sums", "stats", "logits", "best", "cutoff", "temperature", "partials", "delta")
INT32 = ("position", "positions", "table", "first", "history")
FIXED = {
    f"{name}_ptr": kind for kind, names in {"fp32": FP32, "i32": INT32, "i64": ("seed",)}.items() for name in names
}
DIVISIBLE = {"head_stride", "vocab", "outputs", "intermediate", "hidden"}  # by 16, as Triton finds out at the launch
SCALARS = {"eps": "fp32", "scale": "fp32"} | dict.fromkeys(
    (*DIVISIBLE, "table_stride", "programs", "pages", "places", "room"), "i32"
)
HEADS = {"HEADS": 32, "GROUP": 4, "HEAD_DIM": 128}
Kernels = dict[str, tuple[ModuleType, int, dict[str, Any]]]
"""The module, the warps and the constants of each kernel; behind its name may stand the number of rows."""


def gemms(rows: int) -> Kernels:
    """The multi-row kernels, as an 8B model runs them."""
    tiles = batch_tiles(4096, 14336, 128, rows)

    def cut(tile: GemmTile, **more: int) -> tuple[int, dict[str, Any]]:
        return tile.warps, {"ROWS": rows, "BLOCK": tile.block, "STAGES": tile.stages, **more}

    qkv = {"HIDDEN": 4096, "HEADS": 32, "KV_HEADS": 8, "HEAD_DIM": 128, "PAGE": 128, "PAIRS": tiles.qkv.rows // 2}
    down = {"COLUMNS": 14336, "TILE": tiles.down.rows, "SPLITS": tiles.down.splits}
    return {
        f"qkv_gemm {rows}": (qkv_gemm_triton, *cut(tiles.qkv, **qkv)),
        f"split_gemm {rows}": (split_gemm_triton, *cut(tiles.down, **down)),
        f"gate_up_gemm {rows}": (gate_up_gemm_triton, *cut(tiles.gate_up, HIDDEN=4096, TILE=tiles.gate_up.rows // 2)),
        f"head_gemm {rows}": (head_gemm_triton, *cut(tiles.head, HIDDEN=4096, TILE=tiles.head.rows)),
    }


GEMMS = gemms(16) | gemms(128)
KERNELS: Kernels = {
    "qkv_gemv": (
        qkv_gemv_triton,
        8,
        {"HIDDEN": 4096, "BLOCK": 4096, "HEADS": 32, "KV_HEADS": 8, "HEAD_DIM": 128, "PAIRS": 2, "PAGE": 256},
    ),
    "flash_tile": (flash_split_triton, 4, {**HEADS, "PAGE": 256, "TILE": 64, "SINGLE": False}),
    "flash_group": (flash_split_triton, 8, {**HEADS, "ROWS": 16, "PAGE": 256, "TILE": 64}),
    "flash_stream": (flash_split_triton, 4, {**HEADS, "ROWS": 16, "PAGE": 256, "BLOCK": 64, "STAGES": 2}),
    "flash_fold": (flash_decode_triton, 1, {"HEADS": 32, "HEAD_DIM": 128, "SPLIT": 64, "FOLD": 16, "DIMS": 32}),
    "residual_gemv": (residual_gemv_triton, 16, {"COLUMNS": 14336, "BLOCK": 16384, "ROWS": 2}),
    "gate_up_gemv": (gate_up_gemv_triton, 4, {"HIDDEN": 4096, "INTERMEDIATE": 14336, "BLOCK": 4096, "ROWS": 2}),
    "head_gemv": (head_gemv_triton, 4, {"HIDDEN": 4096, "BLOCK": 4096, "ROWS": 4}),
    **GEMMS,
    "add_rms_norm": (add_rms_norm_triton, 8, {"BLOCK": 4096, "PARTS": 4}),
    "gumbel_best": (gumbel_best_triton, 4, {"BLOCK": 1024}),
    "greedy_token": (greedy_token_triton, 32, {"HIDDEN": 4096, "BLOCK": 4096, "PROGRAMS": 32768}),
}
PROJECTIONS = ("qkv_gemv", "residual_gemv", "gate_up_gemv", "head_gemv")


def machine_code(module: ModuleType, name: str, tmp_path: Path) -> list[str]:
    """The opcodes of kernel `name` of `module`, compiled for sm_90 with PDL on, in the order of the code."""
    _, warps, constants = KERNELS[name]
    kernel = getattr(module, f"{name.partition(' ')[0]}_kernel")
    constants = {**constants, "PDL": True}
    signature, attributes = {}, {}
    for index, argument in enumerate(kernel.arg_names):
        if argument in constants:
            signature[argument] = "constexpr"
        elif argument in SCALARS:
            signature[argument] = SCALARS[argument]
        else:
            signature[argument] = f"*{FIXED.get(argument, 'bf16')}"
        if argument in DIVISIBLE or argument.endswith("_ptr"):
            attributes[index,] = [["tt.divisibility", 16]]
    places = {(kernel.arg_names.index(argument),): value for argument, value in constants.items()}
    source = ASTSource(kernel, signature, constexprs=places, attrs=attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps})
    binary = tmp_path / "kernel.cubin"
    binary.write_bytes(compiled.asm["cubin"])
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    listing = subprocess.run([tool, "--dump-sass", binary], capture_output=True, text=True, check=True).stdout
    return re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)", listing)


def violations(opcodes: list[str], name: str) -> list[str]:
    """What the machine code breaks of the rules in `skote.kernels.launch`."""
    if "ACQBULK" not in opcodes:
        return ["there is no wait"]
    found = []
    wait = opcodes.index("ACQBULK")
    before, after = opcodes[:wait], opcodes[wait:]
    if "PREEXIT" not in before:
        found.append("the successor may not start before the wait")
    if any(code.startswith("STG") for code in before):
        found.append("a write comes before the wait")
    if any(code.startswith("LDG.") and ".EL" in code for code in before):
        found.append("a dependent read comes before the wait")
    if name in GEMMS:
        if sum(code.startswith("LDGSTS") and code.endswith(".128") for code in after) < 8:
            found.append("no pipelined loop reads in wide loads after the wait")
    elif not any(code.startswith("LDG.") and ".EL" in code for code in after):
        found.append("no dependent read comes after the wait")
    if any(code.startswith("LDGSTS") for code in before):
        found.append("a read of a pipelined loop comes before the wait")
    if name in PROJECTIONS:
        if any(".EF" in code for code in after):
            found.append("a weight is read after the wait")
        if sum(".EF" in code and code.endswith(".128") for code in before) < 4:
            found.append("the weights are not read in wide loads before the wait")
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", KERNELS)
def test_loads_and_stores_are_on_their_side_of_the_wait(name: str, tmp_path: Path) -> None:
    opcodes = machine_code(KERNELS[name][0], name, tmp_path)
    assert violations(opcodes, name) == []
    assert not [code for code in opcodes if code.startswith(("LDL", "STL"))], "registers spill to memory"


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in GEMMS if name != "qkv_gemm 16"])
def test_tiles_of_64_rows_go_from_shared_memory_to_the_matrix_instruction(name: str, tmp_path: Path) -> None:
    opcodes = machine_code(KERNELS[name][0], name, tmp_path)
    rows = name.partition(" ")[2]
    assert any(code.startswith(f"HGMMA.64x{rows}x16") for code in opcodes)
    assert not [code for code in opcodes if code.startswith("LDSM")], "an operand goes through registers"


@pytest.mark.slow
@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_without_its_wait_is_found_out(name: str, tmp_path: Path) -> None:
    source = inspect.getsource(KERNELS[name][0])
    assert "gdc_wait()" in source
    path = tmp_path / f"{name.replace(' ', '_')}_hasty.py"
    path.write_text(source.replace("gdc_wait()", "pass"), encoding="utf-8")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    hasty = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hasty)
    assert violations(machine_code(hasty, name, tmp_path), name) == ["there is no wait"]


def test_the_rules_see_each_way_of_breaking_them() -> None:
    good = ["PREEXIT", *["LDG.E.EF.128"] * 4, "ACQBULK", "LDG.E.EL.128", "STG.E"]
    assert violations(good, "qkv_gemv") == []
    assert violations(["STG.E", *good], "qkv_gemv") == ["a write comes before the wait"]
    assert violations(["LDG.E.EL.128", *good], "qkv_gemv") == ["a dependent read comes before the wait"]
    assert violations([*good, "LDG.E.EF.128"], "qkv_gemv") == ["a weight is read after the wait"]
    assert violations(["LDGSTS.E.BYPASS.128", *good], "qkv_gemv") == [
        "a read of a pipelined loop comes before the wait"
    ]
    assert violations(good[1:], "qkv_gemv") == ["the successor may not start before the wait"]
    assert violations(["PREEXIT", *good[3:]], "qkv_gemv") == ["the weights are not read in wide loads before the wait"]
    pipelined = ["PREEXIT", "ACQBULK", *["LDGSTS.E.BYPASS.128"] * 8, "STG.E"]
    assert violations(pipelined, "head_gemm 16") == []
    assert violations([*pipelined[:2], "LDG.E", "STG.E"], "head_gemm 16") == [
        "no pipelined loop reads in wide loads after the wait"
    ]
    assert violations(["PREEXIT", "ACQBULK", "STG.E"], "flash_fold") == ["no dependent read comes after the wait"]
