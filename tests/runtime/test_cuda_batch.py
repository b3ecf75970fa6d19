"""Batches on a GPU: a request's keys, values and tokens are the same bits, whoever shares its packs and its steps."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from skote.runtime.engine import SkotergyEngine
from skote.runtime.scheduler import Piece, Seat
from skote.types import FinishReason, Request, Sampling, SkoteError

pytestmark = pytest.mark.gpu

VOCAB = 1003
SHAPE = {
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
WIDE = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 2, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128}  # fmt: skip


def build(tmp: Path, *, rows: int, dtype: str = "bf16", wide: bool = False, **options: Any) -> SkotergyEngine:
    (tmp / "config.json").write_text(json.dumps(SHAPE | (WIDE if wide else {})), encoding="utf-8")
    return SkotergyEngine(
        local_dir=str(tmp), device="cuda:0", dtype=dtype, random_seed=3, max_model_len=700, max_batch=rows, **options
    )


def prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(1000 * length + seed)
    return tuple(torch.randint(0, VOCAB, (length,), generator=generator).tolist())


def tokens(engine: SkotergyEngine, requests: Sequence[Request]) -> list[list[int]]:
    out: list[list[int]] = [[] for _ in requests]
    engine.generate(requests, lambda row, new: out[row].extend(new))
    return out


def kept(engine: SkotergyEngine, positions: int) -> list[torch.Tensor]:
    """Keys and values of the request that was admitted first, whose pages are the first ones."""
    closure: Any = engine._closure
    return [pool[:, :positions].clone() for layer in closure._cache.layers for pool in layer]


COMPANIONS = [
    Request(f"c{index}", prompt(1 + 37 * index % 150, index), 30 + index % 9,
            (Sampling(), Sampling(0.9, seed=index), Sampling(0.7, top_k=9, top_p=0.9, seed=index))[index % 3],
            ignore_eos=True)
    for index in range(127)
]  # fmt: skip


@pytest.mark.parametrize(("dtype", "wide"), [("bf16", False), ("fp16", False), ("fp32", False), ("bf16", True)])
def test_every_number_of_companions_leaves_the_same_bits(tmp_path: Path, dtype: str, wide: bool) -> None:
    """Steps of all sizes, 1 to 128 rows, and packs of one to four prompts."""
    engine = build(tmp_path, rows=128, dtype=dtype, wide=wide)
    for length in (128, 300):
        request = Request("r", prompt(length, 7), 40, ignore_eos=True)
        positions = length + 39
        expected = tokens(engine, [request])
        pools = kept(engine, positions)
        for companions in (1, 2, 3, 7, 12, 15, 16, 31, 40, 63, 100, 127):
            given = tokens(engine, [request, *COMPANIONS[:companions]])
            assert given[0] == expected[0], f"{companions} companions"
            for mine, alone in zip(kept(engine, positions), pools, strict=True):
                assert torch.equal(mine, alone), f"{companions} companions"


def test_all_rows_of_a_batch_get_the_tokens_of_a_run_alone(tmp_path: Path) -> None:
    engine = build(tmp_path, rows=64)
    alone = [tokens(engine, [request])[0] for request in COMPANIONS]
    assert tokens(engine, COMPANIONS) == alone
    assert tokens(engine, COMPANIONS[::-1]) == alone[::-1]
    small = tmp_path / "small"
    small.mkdir()
    assert tokens(build(small, rows=5), COMPANIONS[:40]) == alone[:40]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_a_thousand_repeats_among_changing_companions_give_the_same_bits(tmp_path: Path, dtype: str) -> None:
    """Tokens, keys and values, and the last step's logits, which the request takes alone: the companions are short."""
    engine = build(tmp_path, rows=4, dtype=dtype)
    state: Any = engine._closure._step.state  # type: ignore[attr-defined]
    request, positions = Request("r", prompt(70, 7), 8, ignore_eos=True), 77
    expected = tokens(engine, [request])
    pools, logits = kept(engine, positions), state.logits[0].clone()
    short = [replace(each, max_new_tokens=3) for each in COMPANIONS]
    for index in range(1000):
        first = index % 120
        given = tokens(engine, [request, *short[first : first + index % 4]])
        assert given[0] == expected[0], index
        assert torch.equal(state.logits[0], logits), index
        for mine, alone in zip(kept(engine, positions), pools, strict=True):
            assert torch.equal(mine, alone), index


class Visitors:
    """A desk: one request comes each fourth turn, every seventh of them is cancelled eleven turns later."""

    def __init__(self, requests: Sequence[Request]) -> None:
        self.turn = 0
        self.tokens: dict[int, list[int]] = {}
        self.ends: dict[int, FinishReason | None] = {}
        self.cached_tokens: dict[int, int] = {}
        self._requests = requests
        self._came: dict[int, int] = {}

    def arrivals(self) -> list[tuple[int, Request]]:
        self.turn += 1
        key = len(self._came)
        if self.turn % 4 != 1 or key == len(self._requests):
            return []
        self._came[key], self.tokens[key] = self.turn, []
        return [(key, self._requests[key])]

    def is_cancelled(self, key: int) -> bool:
        return key % 7 == 6 and self.turn >= self._came[key] + 11

    def admit(self, key: int) -> None:
        pass

    def keeps(self, tokens: int) -> None:
        self.kept_tokens = tokens

    def cached(self, key: int, tokens: int) -> None:
        self.cached_tokens[key] = tokens

    def emit(self, key: int, token_ids: Sequence[int]) -> None:
        self.tokens[key].extend(token_ids)

    def end(self, key: int, reason: FinishReason | None) -> None:
        self.ends[key] = reason

    def fail(self, key: int, error: SkoteError) -> None:
        raise error


@pytest.mark.parametrize("rows", [3, 20])
def test_requests_that_join_and_leave_get_the_tokens_of_a_run_alone(tmp_path: Path, rows: int) -> None:
    engine = build(tmp_path, rows=rows)
    requests = COMPANIONS[:40]
    alone = [tokens(engine, [request])[0] for request in requests]
    desk = Visitors(requests)
    while len(desk.ends) < 40:  # an engine that has nothing left to do returns, though there may be more to come
        engine.serve(desk)
    for key, expected in enumerate(alone):
        if desk.ends[key] is None:
            assert desk.tokens[key] == expected[: len(desk.tokens[key])]
        else:
            assert desk.tokens[key] == expected
    described = engine.describe()
    assert described["captures_after_warmup"] == described["allocations_after_warmup"] == 0


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_prefilled_position_depends_on_nothing_beside_and_after_it(tmp_path: Path, dtype: str) -> None:
    """Pieces in other places of a pack, with other prompts, and of a longer prompt."""
    engine = build(tmp_path, rows=4, dtype=dtype)
    closure: Any = engine._closure
    page = closure._cache.page
    ids = prompt(500)

    def seat(length: int, first: int, other: tuple[int, ...] = ids) -> Seat:
        return Seat(0, Request("r", other[:length], 2), tuple(range(first, first + 4)))

    def pieces(of: Seat) -> list[Piece]:
        length = len(of.request.input_ids)
        return [Piece(of, start, min(start + page, length)) for start in range(0, length, page)]

    def pools(length: int, first: int) -> list[torch.Tensor]:
        """All positions but the last, which took the step's kernels in the last layer."""
        start = first * page
        return [pool[:, start : start + length - 1].clone() for layer in closure._cache.layers for pool in layer]

    with torch.no_grad():
        closure._prefill(pieces(seat(500, 0)))
        whole = pools(500, 0)
        stranger = seat(200, 12, prompt(200, 5))
        for length in (500, 385, 384, 257, 128, 70):
            mine = seat(length, 4)
            for index, piece in enumerate(pieces(mine)):
                beside = pieces(stranger)
                closure._prefill([*beside[: index % 2 + 1], piece])
            for found, expected in zip(pools(length, 4), whole, strict=True):
                assert torch.equal(found, expected[:, : length - 1]), length


def test_the_memory_of_the_cache_follows_real_lengths(tmp_path: Path) -> None:
    """More requests than rows, and than the pages would hold at full length, one after another in the same pages."""
    engine = build(tmp_path, rows=5)
    closure: Any = engine._closure
    closure._pages = 6  # one request of the longest kind, or three to six of these
    alone = [tokens(engine, [request])[0] for request in COMPANIONS[:12]]
    assert tokens(engine, COMPANIONS[:12]) == alone


@pytest.mark.parametrize(("dtype", "wide"), [("bf16", False), ("fp32", False), ("bf16", True)])
def test_shared_prefixes_change_no_bit(tmp_path: Path, dtype: str, wide: bool) -> None:
    """Prompts that begin alike, alone and together, from pages that were kept and from pages of the same pack."""
    plain = build(tmp_path, rows=8, dtype=dtype, wide=wide)
    keeping = build(tmp_path, rows=8, dtype=dtype, wide=wide, prefix_cache=True)
    head = prompt(520)
    requests = [
        Request(f"s{cut}-{tail}", head[:cut] + prompt(tail, 1), 20, Sampling(0.9, seed=cut) if cut % 2 else Sampling(),
                ignore_eos=True)
        for cut, tail in ((130, 20), (256, 1), (256, 129), (300, 300), (385, 70), (512, 100), (520, 1), (127, 90))
    ]  # fmt: skip
    forced = prompt(6)
    expected = [tokens(plain, [request])[0] for request in requests]
    scores = [plain.score(request, forced) for request in requests]
    assert tokens(keeping, requests) == expected
    assert tokens(keeping, requests[::-1]) == expected[::-1]
    assert [tokens(keeping, [request])[0] for request in requests] == expected
    for request, score in zip(requests, scores, strict=True):
        assert np.array_equal(keeping.score(request, forced), score)
    desk = Visitors(requests)
    while len(desk.ends) < len(requests):
        keeping.serve(desk)
    page = keeping._closure._cache.page  # type: ignore[attr-defined]
    whole = {key: (len(request.input_ids) - 1) // page * page for key, request in enumerate(requests)}
    assert whole.keys() - desk.cached_tokens.keys() <= {6}  # which is cancelled
    assert desk.cached_tokens.items() <= whole.items()
    assert keeping.describe()["captures_after_warmup"] == 0
