"""Every launcher against every wrong argument: tensors that only say that they are on CUDA, and kernels that only note
that they were launched.

A case is a right call. It has to be launched; with one tensor of it on another device, strided, of another dtype, or
of another size in any of its dimensions, it must not be, and one sentence says why.
"""

from __future__ import annotations

import contextlib
import importlib
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

pytest.importorskip("triton")

import skote.kernels
from skote.kernels.expert_gemm_triton import Groups
from skote.kernels.flash_decode_triton import Attention
from skote.kernels.launch import GemmTile, Tile
from skote.kernels.owed_triton import Owed
from skote.kernels.read_sum_triton import BLOCK

FP32, BF16, INT32, INT64 = torch.float32, torch.bfloat16, torch.int32, torch.int64
Given = tuple[torch.dtype, tuple[int, ...]]
"""Dtype and shape of a tensor."""

HEADS, KV_HEADS, HEAD_DIM, PAGE, PAGES = 6, 2, 16, 16, 3
HIDDEN, INTERMEDIATE, VOCAB, ROWS = 32, 48, 40, 16
POSITIONS = PAGE * PAGES
QKV = (HEADS + 2 * KV_HEADS) * HEAD_DIM
CUT = Attention(page=PAGE, tile=16, tiled=16, group=16, grouped=32, block=16)
GEMV, GEMM = Tile(2, 1), GemmTile(16, 64, 2, 4)
ROPE: dict[str, Given] = {"cos": (FP32, (POSITIONS, HEAD_DIM)), "sin": (FP32, (POSITIONS, HEAD_DIM))}
KEYS: Given = (BF16, (KV_HEADS, ROWS * POSITIONS, HEAD_DIM))
CACHE: dict[str, Given] = {"k": KEYS, "v": KEYS}


class Case(NamedTuple):
    """A call that is right; `free` are sizes, by tensor and dimension, that would be right too."""

    launcher: str
    tensors: dict[str, Given]
    options: dict[str, Any]
    free: dict[tuple[str, int], set[int]] = {}  # noqa: RUF012 - nobody writes to it
    together: tuple[str, Callable[..., Any], tuple[str, ...]] | None = None
    """The argument that is made of some of the tensors, and how."""

    @property
    def module(self) -> str:
        """Where the launcher is defined."""
        name = {"expert_up_gemv": "expert_gemv", "expert_down_gemv": "expert_gemv"}.get(self.launcher, self.launcher)
        return f"skote.kernels.{name.removesuffix('_triton')}_triton"


def rows_of_pages(*rows: int) -> dict[str, Given]:
    return {"table": (INT32, (*rows, PAGES))}


def of_rows(*tensors: torch.Tensor) -> Groups:
    return Groups(*tensors, rows=16)


def pair(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return tensors


OWED: dict[str, Given] = {"owed": (FP32, (HIDDEN,)), "post_norm": (BF16, (HIDDEN,)), "kept": (FP32, (HIDDEN,))}
EXPERTS, CHOSEN, TOKENS, BLOCKS = 7, 2, 5, 7
ROUTED: dict[str, Given] = {"chosen": (INT32, (CHOSEN,)), "share": (FP32, (CHOSEN,))}
GROUPS: dict[str, Given] = {
    "order": (INT32, (TOKENS * CHOSEN,)), **dict.fromkeys(("expert", "first", "end"), (INT32, (BLOCKS,))),
}  # fmt: skip
LONGER_TABLE = {("table", 1): {PAGES + 1}}
CASES = {
    "rms_norm": Case("rms_norm_triton", {"x": (BF16, (3, HIDDEN)), "weight": (BF16, (HIDDEN,))}, {"eps": 1e-5},
                     {("x", 0): {2, 4}}),
    **{
        f"add_rms_norm {name}": Case(
            "add_rms_norm",
            {"x": (FP32, (3, HIDDEN)), "delta": delta, "norm": (BF16, (HIDDEN,)), "out": (BF16, (3, HIDDEN)),
             "post": (BF16, (HIDDEN,))},
            {"eps": 1e-5, "pdl": True},
            {("delta", 0): {1, 3}} if len(delta[1]) == 3 else {},
        )
        for name, delta in {"of one": (BF16, (3, HIDDEN)), "of parts": (FP32, (2, 3, HIDDEN))}.items()
    },
    "silu_mul": Case("silu_mul_triton", {"gate_up": (BF16, (3, 2 * INTERMEDIATE))}, {"activation": "relu2"},
                     {("gate_up", 0): {2, 4}}),
    "read_sum": Case("read_sum", {"x": (BF16, (2, BLOCK)), "out": (FP32, (2,))}, {}),
    **{
        f"rope_write {name}": Case(
            "rope_write",
            {"qkv": (BF16, (5, HEADS + 2 * KV_HEADS, HEAD_DIM)), **ROPE, **rows_of_pages(), **CACHE, **norms},
            {"page": PAGE, "eps": 1e-5},
            {("table", 0): {4}, ("qkv", 0): {4, 6}, ("qkv", 1): {9, 11}},
            ("norms", pair, tuple(norms)) if norms else None,
        )
        for name, norms in {
            "alone": {}, "with norms": dict.fromkeys(("q_norm", "k_norm"), (BF16, (HEAD_DIM,))),
        }.items()
    },
    "qkv_gemv": Case(
        "qkv_gemv",
        {"x": (FP32, (HIDDEN,)), "norm": (BF16, (HIDDEN,)), "weight": (BF16, (QKV, HIDDEN)), **ROPE,
         "position": (INT32, (1,)), **rows_of_pages(1), "q": (BF16, (HEADS, HEAD_DIM)), **CACHE,
         "bias": (BF16, (QKV,)), **OWED},
        {"eps": 1e-5, "page": PAGE, "tile": GEMV, "pdl": True},
        LONGER_TABLE,
        ("owed", Owed, tuple(OWED)),
    ),
    "residual_gemv": Case(
        "residual_gemv",
        {"x": (FP32, (HIDDEN,)), "h": (BF16, (HEADS * HEAD_DIM,)), "weight": (BF16, (HIDDEN, HEADS * HEAD_DIM))},
        {"tile": GEMV, "pdl": True},
    ),
    "gate_up_gemv": Case(
        "gate_up_gemv",
        {"x": (FP32, (HIDDEN,)), "norm": (BF16, (HIDDEN,)), "weight": (BF16, (2 * INTERMEDIATE, HIDDEN)),
         "h": (BF16, (INTERMEDIATE,)), **OWED},
        {"eps": 1e-5, "tile": GEMV, "pdl": True, "activation": "gelu"},
        {},
        ("owed", Owed, tuple(OWED)),
    ),
    "head_gemv": Case(
        "head_gemv",
        {"x": (FP32, (HIDDEN,)), "norm": (BF16, (HIDDEN,)), "weight": (BF16, (VOCAB, HIDDEN)),
         "logits": (FP32, (VOCAB,)), "best": (FP32, (VOCAB // 2,)), "first": (INT32, (VOCAB // 2,)), **OWED},
        {"eps": 1e-5, "tile": GEMV, "pdl": True, "softcap": 30.0},
        {},
        ("owed", Owed, tuple(OWED)),
    ),
    "expert_up_gemv": Case(
        "expert_up_gemv",
        {"x": (FP32, (HIDDEN,)), "norm": (BF16, (HIDDEN,)), "weight": (BF16, (EXPERTS, 2 * INTERMEDIATE, HIDDEN)),
         "logits": (FP32, (EXPERTS,)), "h": (BF16, (CHOSEN, INTERMEDIATE)), **ROUTED},
        {"eps": 1e-5, "normalised": True, "tile": GEMV, "pdl": True},
    ),
    "expert_down_gemv": Case(
        "expert_down_gemv",
        {"x": (FP32, (HIDDEN,)), "h": (BF16, (CHOSEN, INTERMEDIATE)), "weight": (BF16, (EXPERTS, HIDDEN, INTERMEDIATE)),
         **ROUTED},
        {"pdl": True},
        {("weight", 0): {EXPERTS - 1, EXPERTS + 1}},
    ),
    **{
        f"expert_gemm {name}": Case(
            "expert_gemm",
            {"x": (BF16, (TOKENS, HIDDEN)), "weight": (BF16, (EXPERTS, INTERMEDIATE, HIDDEN)), **GROUPS},
            {"out_dtype": BF16, "activation": activation},
            {("weight", 0): {EXPERTS - 1, EXPERTS + 1}, **free},
            ("groups", of_rows, tuple(GROUPS)),
        )
        for name, activation, free in (
            ("of gates", "silu", {}), ("alone", None, {("weight", 1): {INTERMEDIATE - 1, INTERMEDIATE + 1}}),
        )
    },
    "flash_prefill": Case(
        "flash_prefill",
        {"q": (BF16, (3, TOKENS, HEADS, HEAD_DIM)),
         **dict.fromkeys(("k", "v"), (BF16, (3, KV_HEADS, 2 * TOKENS, HEAD_DIM)))},
        {"window": 4, "softcap": 50.0},
        {("q", 1): {TOKENS - 1, TOKENS + 1}},
    ),
    **{
        f"qkv_gemm {name}": Case(
            "qkv_gemm",
            {"normed": (BF16, (ROWS, HIDDEN)), "weight": (BF16, (QKV, HIDDEN)), **ROPE, "positions": (INT32, (ROWS,)),
             **rows_of_pages(rows), "q": (BF16, (ROWS, HEADS, HEAD_DIM)), **CACHE, "bias": (BF16, (QKV,))},
            {"page": PAGE, "tile": GEMM, "pdl": True},
            LONGER_TABLE,
        )
        for name, rows in {"of rows": ROWS, "of one request": 1}.items()
    },
    "head_norm": Case(
        "head_norm",
        {"q": (BF16, (ROWS, HEADS, HEAD_DIM)), "k": KEYS, **dict.fromkeys(("q_norm", "k_norm"), (BF16, (HEAD_DIM,))),
         **ROPE, "positions": (INT32, (ROWS,)), **rows_of_pages(ROWS)},
        {"eps": 1e-5, "page": PAGE, "pdl": True},
        {**LONGER_TABLE, ("q", 1): {5, 7}, ("k", 0): {1, 3}},
    ),
    "split_gemm": Case(
        "split_gemm",
        {"h": (BF16, (ROWS, INTERMEDIATE)), "weight": (BF16, (HIDDEN, INTERMEDIATE)),
         "partials": (FP32, (2, ROWS, HIDDEN))},
        {"tile": GEMM._replace(splits=2), "pdl": True},
    ),
    "gate_up_gemm": Case(
        "gate_up_gemm",
        {"normed": (BF16, (ROWS, HIDDEN)), "weight": (BF16, (2 * INTERMEDIATE, HIDDEN)),
         "h": (BF16, (ROWS, INTERMEDIATE))},
        {"tile": GEMM, "pdl": True},
    ),
    "head_gemm": Case(
        "head_gemm",
        {"normed": (BF16, (ROWS, HIDDEN)), "weight": (BF16, (VOCAB, HIDDEN)), "logits": (FP32, (ROWS, VOCAB)),
         "best": (FP32, (ROWS, 3)), "first": (INT32, (ROWS, 3))},
        {"tile": GEMM, "pdl": True},
    ),
    **{
        f"flash_decode of {positions}": Case(
            "flash_decode",
            {"q": (BF16, (ROWS, HEADS, HEAD_DIM)), **CACHE, "position": (INT32, (ROWS,)), **rows_of_pages(ROWS),
             "out": (BF16, (ROWS, HEADS, HEAD_DIM)), "sums": (FP32, (ROWS, splits, HEADS, HEAD_DIM)),
             "stats": (FP32, (ROWS, splits, 2, HEADS))},
            {"positions": positions, "cut": CUT, "pdl": True, "softcap": 50.0},
            {("table", 1): {4} if positions == 48 else {2, 4},
             **{("sums", dim): {size + 1} for dim, size in enumerate((ROWS, splits, HEADS, HEAD_DIM))},
             **{("stats", dim): {size + 1} for dim, size in enumerate((ROWS, splits, 2, HEADS))}},
        )
        for positions, splits in ((16, 1), (32, 2), (48, 3))
    },
    "greedy_token": Case(
        "greedy_token",
        {"best": (FP32, (ROWS, 3)), "first": (INT32, (ROWS, 3)), "position": (INT32, (ROWS,)),
         "history": (INT32, (ROWS, 9)), "embed": (BF16, (VOCAB, HIDDEN)), "x": (FP32, (ROWS, HIDDEN))},
        {"pdl": True},
        {("history", 1): {8, 10}, ("embed", 0): {VOCAB - 1, VOCAB + 1}},
    ),
    "gumbel_best": Case(
        "gumbel_best",
        {"logits": (FP32, (ROWS, VOCAB)), **dict.fromkeys(("cutoff", "temperature"), (FP32, (ROWS,))),
         "seed": (INT64, (ROWS,)), "position": (INT32, (ROWS,)), "best": (FP32, (ROWS, 1)),
         "first": (INT32, (ROWS, 1))},
        {"pdl": True},
        {("logits", 1): {VOCAB - 1, VOCAB + 1}},
    ),
}  # fmt: skip
ANY_RANK = {  # of any shape, or of one of two ranks
    ("rms_norm_triton", "x"), ("read_sum", "x"), ("residual_gemv", "h"), ("add_rms_norm", "delta"),
    ("rope_write", "table"), ("qkv_gemv", "table"), ("flash_decode", "sums"), ("flash_decode", "stats"),
}  # fmt: skip
EVERY = pytest.mark.parametrize("name", CASES)


class Launches:
    """In place of a module's kernels: how many were launched."""

    def __init__(self) -> None:
        self.count = 0

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        assert all(isinstance(each, int) and each > 0 for each in grid)

        def launch(*arguments: object, **options: object) -> None:
            self.count += 1

        return launch


@pytest.fixture(autouse=True)
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(FakeTensor, "data_ptr", FakeTensor.__hash__)  # they lie nowhere
    with FakeTensorMode():
        yield


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    noted = Launches()
    for case in CASES.values():
        module = importlib.import_module(case.module)
        for name in [each for each in vars(module) if each.endswith("_kernel")]:
            monkeypatch.setattr(module, name, noted)
    return noted


def tensors_of(case: Case) -> dict[str, torch.Tensor]:
    return {name: torch.empty(shape, dtype=dtype, device="cuda:0") for name, (dtype, shape) in case.tensors.items()}


def launch(case: Case, **replaced: torch.Tensor) -> None:
    given = tensors_of(case) | replaced
    if case.together is not None:
        argument, make, parts = case.together
        given[argument] = make(*(given.pop(part) for part in parts))
    getattr(importlib.import_module(case.module), case.launcher)(**given, **case.options)


def refused(case: Case, kind: type[Exception], **replaced: torch.Tensor) -> str:
    """The sentence that the launch is refused with."""
    with pytest.raises(kind) as caught:
        launch(case, **replaced)
    sentence = str(caught.value)
    assert sentence.startswith(f"{case.launcher}: ")
    assert sentence.endswith(".")
    assert "\n" not in sentence
    return sentence


def test_there_is_a_case_for_every_launcher() -> None:
    files = {path.stem for path in Path(skote.kernels.__path__[0]).glob("*_triton.py")}
    without = {  # parts of others' kernels
        "activation_triton", "flash_split_triton", "owed_triton", "row_dot_triton", "rows_dot_triton",
    }  # fmt: skip
    assert {case.module.rpartition(".")[2] for case in CASES.values()} == files - without


@EVERY
def test_the_right_call_is_launched(name: str, launches: Launches) -> None:
    launch(CASES[name])
    assert launches.count == (2 if name in ("flash_decode of 32", "flash_decode of 48") else 1)


def test_numbers_that_no_tensor_shows_are_refused(launches: Launches) -> None:
    case = CASES["rope_write alone"]
    for start in (-1, POSITIONS):
        assert f"start {start} lies beyond the {POSITIONS} positions" in refused(at(case, start=start), ValueError)
    heads = torch.empty(5, 2 * KV_HEADS - 1, HEAD_DIM, dtype=BF16, device="cuda:0")
    assert "qkv has 3 heads" in refused(case, ValueError, qkv=heads)
    case = CASES["flash_decode of 32"]
    assert "49 positions do not fit" in refused(at(case, positions=POSITIONS + 1), ValueError)
    seven = torch.empty(ROWS, 7, HEAD_DIM, dtype=BF16, device="cuda:0")
    assert "7 query heads cannot share 2 kv heads" in refused(case, ValueError, q=seven, out=seven)
    for name, tile in {"residual_gemv": Tile(3, 1), "gate_up_gemv": Tile(4, 1, 5), "qkv_gemv": Tile(6, 1)}.items():
        assert "are not a multiple of the tile's" in refused(at(CASES[name], tile=tile), ValueError)
    for name in ("silu_mul", "gate_up_gemv", "gate_up_gemm", "expert_up_gemv", "expert_gemm of gates"):
        sentence = "the activation is 'selu'; the kernel computes silu, gelu, gelu_tanh, relu, relu2."
        assert sentence in refused(at(CASES[name], activation="selu"), ValueError)
    for name in ("head_gemv", "head_gemm", "flash_decode of 16", "flash_prefill"):
        for cap in (0.0, -1.0, math.inf, math.nan):
            assert f"the soft cap is {cap}; it must be" in refused(at(CASES[name], softcap=cap), ValueError)
    for name in ("flash_decode of 16", "flash_prefill"):
        assert "a window of 0 positions" in refused(at(CASES[name], window=0), ValueError)
    three = torch.empty(3, TOKENS, 3, HEAD_DIM, dtype=BF16, device="cuda:0")
    assert "3 query heads cannot share 2 kv heads" in refused(CASES["flash_prefill"], ValueError, q=three)
    many = torch.empty(3, 2 * TOKENS + 1, HEADS, HEAD_DIM, dtype=BF16, device="cuda:0")
    assert "11 tokens have 10 keys" in refused(CASES["flash_prefill"], ValueError, q=many)
    assert "out is torch.int32" in refused(at(CASES["expert_gemm alone"], out_dtype=INT32), TypeError)
    for name in ("qkv_gemm of rows", "gate_up_gemm", "head_gemm"):
        tile = GEMM._replace(splits=2)
        assert "the tile splits the columns" in refused(at(CASES[name], tile=tile), ValueError)
    assert launches.count == 0


def at(case: Case, **options: Any) -> Case:
    return case._replace(options=case.options | options)


@EVERY
def test_a_tensor_elsewhere_is_refused(name: str, launches: Launches) -> None:
    case = CASES[name]
    for tensor, (dtype, shape) in case.tensors.items():
        if tensor == "history":
            continue
        for device in ("cpu", "meta"):
            moved = torch.empty(shape, dtype=dtype, device=device)
            assert f"{tensor} is on {device}; the kernel takes CUDA" in refused(case, TypeError, **{tensor: moved})
        if len(case.tensors) > 1:
            moved = torch.empty(shape, dtype=dtype, device="cuda:1")
            assert "on several devices (cuda:0, cuda:1)" in refused(case, ValueError, **{tensor: moved})
    assert launches.count == 0


def test_a_history_elsewhere_is_refused(launches: Launches) -> None:
    """In pinned memory it might be on the host."""
    case = CASES["greedy_token"]
    dtype, shape = case.tensors["history"]
    for device in ("cpu", "meta", "cuda:1"):
        moved = torch.empty(shape, dtype=dtype, device=device)
        sentence = f"history is on {device}; it must lie on cuda:0 or in the host's pinned memory."
        assert sentence in refused(case, ValueError, history=moved)
    assert launches.count == 0


def test_a_sum_is_not_kept_where_others_still_read(launches: Launches) -> None:
    for name in ("qkv_gemv", "gate_up_gemv", "head_gemv"):
        x = torch.empty(HIDDEN, device="cuda:0")
        assert "kept is x, which other programs still read" in refused(CASES[name], ValueError, x=x, kept=x)
    assert launches.count == 0


def test_more_experts_than_a_program_can_choose_from_are_refused(launches: Launches) -> None:
    case = CASES["expert_up_gemv"]
    for experts, count in ((EXPERTS, EXPERTS + 1), (40, 17), (1025, 2), (EXPERTS, 0)):
        sizes = {"weight": (experts, 2 * INTERMEDIATE, HIDDEN), "logits": (experts,), "h": (count, INTERMEDIATE),
                 "chosen": (count,), "share": (count,)}  # fmt: skip
        given = {name: torch.empty(size, dtype=case.tensors[name][0], device="cuda:0") for name, size in sizes.items()}
        assert f"{count} of {experts} experts; the kernel takes" in refused(case, ValueError, **given)
    assert launches.count == 0


@EVERY
def test_a_strided_tensor_is_refused(name: str, launches: Launches) -> None:
    case = CASES[name]
    for tensor, (dtype, shape) in case.tensors.items():
        if shape == (1,):  # a single element has no stride
            continue
        strides = [2 * math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
        strided = torch.empty_strided(shape, strides, dtype=dtype, device="cuda:0")
        assert f"{tensor} is not contiguous" in refused(case, ValueError, **{tensor: strided})
    assert launches.count == 0


@EVERY
def test_a_tensor_of_another_dtype_is_refused(name: str, launches: Launches) -> None:
    case = CASES[name]
    others = {FP32: (BF16, torch.float64), BF16: (torch.float64, INT32), INT32: (INT64, FP32), INT64: (INT32, FP32)}
    for tensor, (dtype, shape) in case.tensors.items():
        for other in others[dtype]:
            if (tensor, other) == ("delta", BF16):  # in any float dtype
                continue
            wrong = torch.empty(shape, dtype=other, device="cuda:0")
            assert f"{other}" in refused(case, TypeError, **{tensor: wrong})
    assert launches.count == 0


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("residual_gemv", "h"), ("qkv_gemv", "bias"), ("qkv_gemm of rows", "normed"), ("qkv_gemm of rows", "bias"),
        ("split_gemm", "h"), ("gate_up_gemm", "normed"), ("head_gemm", "normed"), ("flash_decode of 16", "v"),
        ("expert_down_gemv", "h"), ("expert_gemm alone", "x"),
    ],
)  # fmt: skip
def test_what_is_multiplied_together_is_of_one_dtype(name: str, tensor: str) -> None:
    dtype, shape = CASES[name].tensors[tensor]
    assert dtype == BF16
    wrong = torch.empty(shape, dtype=torch.float16, device="cuda:0")
    assert "they must be alike" in refused(CASES[name], TypeError, **{tensor: wrong})


@EVERY
def test_a_tensor_of_another_size_is_refused(name: str, launches: Launches) -> None:
    case = CASES[name]
    for tensor, (dtype, shape) in case.tensors.items():
        for dim, size in enumerate(shape):
            sizes = {size - 1, size + 1} - (case.free.get((tensor, dim)) or set())
            for other in sizes:
                wrong = torch.empty((*shape[:dim], other, *shape[dim + 1 :]), dtype=dtype, device="cuda:0")
                refused(case, ValueError, **{tensor: wrong})
    assert launches.count == 0


@EVERY
def test_a_tensor_of_another_rank_is_refused(name: str, launches: Launches) -> None:
    case = CASES[name]
    for tensor, (dtype, shape) in case.tensors.items():
        for size in ((), *(() if (case.launcher, tensor) in ANY_RANK else ((1, *shape), (*shape, 1)))):
            refused(case, ValueError, **{tensor: torch.empty(size, dtype=dtype, device="cuda:0")})
    assert launches.count == 0
