"""The closure of many rows with every launcher's reference in place of its kernel, graphs that run at once, and a CPU.

All that is launched goes through the launcher's checks, too, but for the one that asks for CUDA.
What it shows is where rows, pages and tokens go; the kernels' own bits are the GPU tests' (test_cuda_batch.py).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from skote.kernels.activation import activated
from skote.kernels.add_rms_norm_triton import add_rms_norm, add_rms_norm_reference
from skote.kernels.expert_gemm_triton import Groups, expert_gemm, expert_gemm_reference
from skote.kernels.flash_decode_triton import flash_decode, flash_decode_reference
from skote.kernels.flash_prefill_triton import flash_prefill, flash_prefill_reference
from skote.kernels.gate_up_gemm_triton import gate_up_gemm, gate_up_gemm_reference
from skote.kernels.greedy_token_triton import greedy_token, greedy_token_reference
from skote.kernels.gumbel_best_triton import gumbel_best, gumbel_best_reference
from skote.kernels.head_gemm_triton import head_gemm, head_gemm_reference
from skote.kernels.head_norm_triton import head_norm, head_norm_reference
from skote.kernels.qkv_gemm_triton import qkv_gemm, qkv_gemm_reference
from skote.kernels.rope_write_triton import rope_write, rope_write_reference
from skote.kernels.silu_mul_triton import silu_mul_triton
from skote.kernels.split_gemm_triton import split_gemm, split_gemm_reference
from skote.model.decoder import Decoder
from skote.model.spec import DecoderSpec, ExpertSpec, RopeSpec
from skote.model.weights import DecoderWeights, LayerWeights
from skote.runtime import batch_closure, batch_step, gemm_chain, kernel_sets, packed_prefill, prompt_ops, token_choice
from skote.runtime.batch_closure import BatchClosure
from skote.runtime.plain_closure import PlainClosure
from skote.runtime.serving import ListDesk
from skote.runtime.tier_choice import KERNEL_SWITCHES
from skote.types import Emit, EngineError, Request, Sampling

SPEC = DecoderSpec(97, 32, 48, 2, 4, 2, 16, 1e-5, 1024, RopeSpec(10000.0), False, ())
CAPACITY = 700


class Ring:
    """A `TokenRing` without a device."""

    def __init__(self, rows: int) -> None:
        self._sent: list[list[int]] = []

    def send(self, tokens: torch.Tensor) -> int:
        self._sent.append(tokens.tolist())
        return len(self._sent) - 1

    def read(self, mark: int) -> list[int]:
        return self._sent[mark]


class Immediate:
    """`Captures` that run what they captured."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, run: Callable[[], Any]) -> Any:
        self.count += 1
        return SimpleNamespace(replay=run, launched=run())


def flash_decode_in_place(
    q: Any,
    k: Any,
    v: Any,
    position: Any,
    table: Any,
    out: Any,
    *_: Any,
    cut: Any,
    positions: int,
    pdl: bool,
    **more: Any,
) -> None:
    out.copy_(flash_decode_reference(q, k, v, position, table, page=cut.page, **more))


def head_gemm_in_tiles(
    normed: Any, weight: Any, logits: Any, best: Any, first: Any, *, tile: Any, pdl: bool, **more: Any
) -> None:
    head_gemm_reference(normed, weight, logits, **more)
    for program, part in enumerate(logits.split(tile.rows, dim=1)):
        best[:, program], argmax = part.max(1)
        first[:, program] = argmax + program * tile.rows


def split_gemm_in_parts(h: torch.Tensor, weight: torch.Tensor, partials: torch.Tensor, *, tile: Any, pdl: bool) -> None:
    for columns, part in zip(torch.arange(h.shape[1]).chunk(tile.splits), partials, strict=True):
        part.copy_(split_gemm_reference(h[:, columns], weight[:, columns]))


def expert_gemm_of_groups(x: Any, weight: Any, groups: Groups, *, out_dtype: torch.dtype, **more: Any) -> torch.Tensor:
    chosen = torch.full_like(groups.order, -1)
    for expert, first, end in zip(*(each.tolist() for each in groups[1:4]), strict=True):
        if expert >= 0:
            chosen[groups.order[first : min(first + groups.rows, end)].long()] = expert
    assert (chosen >= 0).all()
    return expert_gemm_reference(x, weight, chosen, **more).to(out_dtype)


def flash_prefill_like_the_kernel(q: Any, k: Any, v: Any, **more: Any) -> torch.Tensor:
    return flash_prefill_reference(q, k, v, **more).contiguous()


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch, door: Callable[..., Any]) -> None:
    norm = door(add_rms_norm, add_rms_norm_reference, "pdl")
    for module, launchers in {
        kernel_sets: {
            "flash_decode": door(flash_decode, flash_decode_in_place),
            "head_gemm": door(head_gemm, head_gemm_in_tiles),
        },
        gemm_chain: {
            "add_rms_norm": norm,
            "qkv_gemm": door(qkv_gemm, qkv_gemm_reference, "pdl", "tile"),
            "head_norm": door(head_norm, head_norm_reference, "pdl"),
            "split_gemm": door(split_gemm, split_gemm_in_parts),
            "gate_up_gemm": door(gate_up_gemm, gate_up_gemm_reference, "pdl", "tile"),
            "head_gemm": door(head_gemm, head_gemm_in_tiles),
        },
        packed_prefill: {"add_rms_norm": norm, "rope_write": door(rope_write, rope_write_reference)},
        prompt_ops: {
            "expert_gemm": door(expert_gemm, expert_gemm_of_groups),
            "silu_mul_triton": door(silu_mul_triton, partial(activated, gated=True)),
            "flash_prefill": door(flash_prefill, flash_prefill_like_the_kernel),
        },
        token_choice: {
            "gumbel_best": door(gumbel_best, gumbel_best_reference, "pdl"),
            "greedy_token": door(greedy_token, greedy_token_reference, "pdl"),
        },
        batch_step: {"TokenRing": Ring},
        batch_closure: {"Captures": Immediate, "allocations": lambda _: 0},
    }.items():
        for name, launcher in launchers.items():
            monkeypatch.setattr(module, name, launcher)
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)


@pytest.fixture(scope="module")
def weights() -> DecoderWeights:
    with torch.random.fork_rng():
        torch.manual_seed(5)
        heads = SPEC.heads * SPEC.head_dim

        def matrix(rows: int, columns: int) -> torch.Tensor:
            return torch.randn(rows, columns) / columns**0.5

        layers = tuple(
            LayerWeights(
                torch.rand(SPEC.hidden) + 0.5,
                matrix(heads + 2 * SPEC.kv_heads * SPEC.head_dim, SPEC.hidden),
                matrix(SPEC.hidden, heads),
                torch.rand(SPEC.hidden) + 0.5,
                matrix(2 * SPEC.intermediate, SPEC.hidden),
                matrix(SPEC.hidden, SPEC.intermediate),
            )
            for _ in range(SPEC.layers)
        )
        return DecoderWeights(torch.randn(SPEC.vocab, SPEC.hidden), layers, torch.rand(SPEC.hidden) + 0.5,
                              matrix(SPEC.vocab, SPEC.hidden))  # fmt: skip


def build(weights: DecoderWeights, max_batch: int, spec: DecoderSpec = SPEC, **options: Any) -> BatchClosure:
    options = {"capacity": CAPACITY, "prefill_chunk": 512} | options
    with torch.no_grad():
        return BatchClosure(Decoder(spec, weights, options["capacity"]), max_batch=max_batch, **options)


def prompt(length: int) -> tuple[int, ...]:
    return tuple(torch.randint(0, SPEC.vocab, (length,), generator=torch.Generator().manual_seed(length)).tolist())


def generated(closure: Any, requests: list[Request]) -> list[list[int]]:
    out: list[list[int]] = [[] for _ in requests]
    with torch.no_grad():
        reasons = closure.generate(requests, lambda row, new: out[row].extend(new))
    assert reasons == ["length"] * len(requests)
    return out


LENGTHS = (3, 128, 129, 40, 300, 650, 1, 256, 257, 127, 16, 500)
GREEDY = [Request(f"r{length}", prompt(length), 3 + length % 11, ignore_eos=True) for length in LENGTHS]


def test_tokens_equal_those_of_the_plain_closure(weights: DecoderWeights) -> None:
    """Pages, packs of one and of several prompts, and of prompts that go on; rows that move when others end."""
    plain = PlainClosure(Decoder(SPEC, weights, CAPACITY), capacity=CAPACITY, compiled=False)
    expected = [generated(plain, [request])[0] for request in GREEDY]
    assert len({tuple(each[:3]) for each in expected}) > 8
    for rows in (2, 5, 20):
        closure = build(weights, rows)
        assert generated(closure, GREEDY) == expected
        assert generated(closure, GREEDY[::-1]) == expected[::-1]


SWITCHES: dict[str, dict[str, Any]] = {
    "biases": {"qkv_bias": True},
    "qwen3": {"attention_scale": 0.6, "qk_norm": "head"},
    "gemma": {
        "norm_plus_one": True,
        "post_norms": True,
        "attention_softcap": 1.0,
        "logits_softcap": 2.0,
        "windows": (70, None),
        "embedding_scale": 3.0,
        "activation": "gelu_tanh",
    },
    "mixtral": {"experts": ExpertSpec(5, 2, normalised=True)},
    "granite": {"embedding_scale": 3.0, "residual_scale": 0.4, "logits_scale": 0.3},
    "smollm3": {"ropes": (None, RopeSpec(500.0)), "windows": (None, 130)},
}


def test_every_switch_that_the_kernels_know_is_tried() -> None:
    assert {switch for switches in SWITCHES.values() for switch in switches} == KERNEL_SWITCHES


@pytest.mark.parametrize("switches", SWITCHES.values(), ids=SWITCHES)
def test_switches_reach_packs_and_steps(weights: DecoderWeights, switches: dict[str, Any]) -> None:
    spec = replace(SPEC, **switches)
    generator = torch.Generator().manual_seed(3)
    drawn = {
        part: torch.randn(shape, generator=generator)
        for part, shape in spec.layer_shapes().items()
        if shape != SPEC.layer_shapes().get(part)
    }
    switched = replace(weights, layers=tuple(layer._replace(**drawn) for layer in weights.layers))
    plain = PlainClosure(Decoder(spec, switched, CAPACITY), capacity=CAPACITY, compiled=False)
    requests = GREEDY[:6]
    expected = [generated(plain, [request])[0] for request in requests]

    assert generated(build(switched, 5, spec), requests) == expected
    assert generated(build(weights, 5), requests) != expected


def test_small_packs_and_chunks_change_no_token(weights: DecoderWeights) -> None:
    expected = generated(build(weights, 4), GREEDY)
    for chunk in (1, 200, 2000):
        assert generated(build(weights, 4, prefill_chunk=chunk), GREEDY) == expected


def test_a_draw_depends_on_its_request_alone(weights: DecoderWeights) -> None:
    samplings = [
        Sampling(0.8, top_k=20, top_p=0.9, seed=11),
        Sampling(1.3, seed=-5),
        Sampling(),
        Sampling(0.9, seed=2**63),
    ]
    requests = [
        Request(f"r{index}", prompt(20 + 70 * index), 12, samplings[index % 4], ignore_eos=True) for index in range(8)
    ]
    closure = build(weights, 3)
    alone = [generated(closure, [request])[0] for request in requests]
    assert generated(closure, requests) == alone
    assert generated(build(weights, 8), requests[::-1]) == alone[::-1]
    assert generated(closure, [Request("r", requests[0].input_ids, 12, ignore_eos=True)])[0] != alone[0]


def test_scores_are_what_the_tokens_are_chosen_from(weights: DecoderWeights) -> None:
    closure, plain = (
        build(weights, 3),
        PlainClosure(Decoder(SPEC, weights, CAPACITY), capacity=CAPACITY, compiled=False),
    )
    for length in (5, 128, 300):
        request, forced = Request("r", prompt(length), 9, ignore_eos=True), prompt(9)
        with torch.no_grad():
            torch.testing.assert_close(
                closure.score(request, forced), plain.score(request, forced), rtol=1e-4, atol=1e-4
            )
            tokens = generated(closure, [request])[0]
            assert closure.score(request, tokens).argmax(-1).tolist() == tokens
    assert closure.score(request, forced[:1]).shape == (1, SPEC.vocab)


def test_the_last_slot_of_the_cache_is_used(weights: DecoderWeights) -> None:
    requests = [Request(f"r{length}", prompt(length), 151 - length, ignore_eos=True) for length in (150, 149, 130, 100)]
    plain = PlainClosure(Decoder(SPEC, weights, 150), capacity=150, compiled=False)
    expected = [generated(plain, [request])[0] for request in requests]
    assert generated(build(weights, 2, capacity=150), requests) == expected


def test_weights_that_are_not_numbers_fail_each_request(weights: DecoderWeights) -> None:
    damaged = replace(weights, norm=torch.full_like(weights.norm, torch.nan))
    with pytest.raises(EngineError, match="logits of position 2 are not numbers"):
        generated(build(damaged, 2), [Request("r", prompt(3), 4)])


def test_what_ran_is_described(weights: DecoderWeights) -> None:
    closure = build(weights, 3)
    captures = closure.describe()["captures_after_warmup"]
    generated(closure, GREEDY[:4])
    described = closure.describe()
    assert captures == described["captures_after_warmup"] == 0
    assert described["kernel_set"] == "multi-row"
    assert described["cache_positions"] == 3 * 768
    assert "packs of 4 x 128 tokens" in described["tier_reason"]
    assert described["paths"]["qkv_gemm"]["triton"] > 0


class CountingDesk(ListDesk):
    """Notes what came from earlier prompts."""

    def __init__(self, requests: Sequence[Request], emit: Emit) -> None:
        super().__init__(requests, emit)
        self.cached_tokens: dict[int, int] = {}

    def keeps(self, tokens: int) -> None:
        pass

    def cached(self, key: int, tokens: int) -> None:
        assert key not in self.cached_tokens
        self.cached_tokens[key] = tokens


def served(closure: BatchClosure, requests: list[Request]) -> tuple[list[list[int]], dict[int, int]]:
    """Each request's tokens and how many of its prompt's were cached."""
    out: list[list[int]] = [[] for _ in requests]
    desk = CountingDesk(requests, lambda row, new: out[row].extend(new))
    with torch.no_grad():
        closure.serve(desk, lambda _: None)
    return out, desk.cached_tokens


HEAD = prompt(300)
CUTS = ((300, 1), (300, 40), (256, 1), (256, 129), (255, 1), (255, 2), (128, 200), (127, 90), (300, 300), (100, 5))
SHARING = [
    Request(f"s{cut}-{tail}", HEAD[:cut] + prompt(1000 + tail)[:tail], 5,
            Sampling(0.9, seed=tail) if tail % 2 else Sampling(), ignore_eos=True)
    for cut, tail in CUTS
]  # fmt: skip


class TestPrefixCache:
    def test_tokens_are_those_of_a_run_without_it(self, weights: DecoderWeights) -> None:
        expected = generated(build(weights, 4), SHARING)
        for rows, chunk in ((4, 512), (2, 128), (10, 512)):
            closure = build(weights, rows, prefill_chunk=chunk, prefix_cache=True)
            tokens, cached = served(closure, SHARING)
            assert tokens == expected
            assert cached == {0: 0, 1: 256, 2: 256, 3: 256, 4: 128, 5: 128, 6: 128, 7: 0, 8: 256, 9: 0}
            tokens, cached = served(closure, SHARING[::-1])
            assert tokens == expected[::-1]
            if rows > 2:  # whose pages are enough to keep all
                assert [cached[9 - row] for row in range(10)] == [256, 256, 256, 384, 128, 256, 256, 128, 512, 0]

    def test_scores_are_the_same_bits(self, weights: DecoderWeights) -> None:
        closure, plain = build(weights, 4, prefix_cache=True), build(weights, 4)
        with torch.no_grad():
            for request in SHARING * 2:
                assert torch.equal(closure.score(request, prompt(4)), plain.score(request, prompt(4)))
        assert served(closure, SHARING[:1])[1] == {0: 256}

    def test_salts_part_what_is_kept(self, weights: DecoderWeights) -> None:
        closure = build(weights, 4, prefix_cache=True)
        salted = replace(SHARING[0], cache_salt="a")
        assert [served(closure, [each])[1][0] for each in (SHARING[0], salted, salted)] == [0, 0, 256]

    def test_off_it_counts_nothing(self, weights: DecoderWeights) -> None:
        assert served(build(weights, 4), SHARING[:2])[1] == {}

    def test_pages_are_forgotten_where_others_wrote_or_a_run_was_broken_off(
        self, weights: DecoderWeights, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def no_times(run: Callable[[], object], *, repeats: int) -> list[object]:
            run()
            return []

        monkeypatch.setattr(batch_closure, "kernel_times", no_times)
        closure = build(weights, 4, prefix_cache=True)
        expected, cached = served(closure, SHARING[:1])
        with torch.no_grad():
            closure.profile_step()
        assert served(closure, SHARING[:1]) == (expected, cached)

        def enough(row: int, new: Sequence[int]) -> None:
            raise EngineError("enough")

        with torch.no_grad(), pytest.raises(EngineError, match="enough"):
            closure.generate(SHARING[:1], enough)
        assert served(closure, SHARING[:1]) == (expected, cached)
        assert served(closure, SHARING[:1]) == (expected, {0: 256})

    def test_it_says_that_it_is_on(self, weights: DecoderWeights) -> None:
        assert "shared prefixes once" in build(weights, 2, prefix_cache=True).describe()["tier_reason"]
        assert "prefix" not in build(weights, 2).describe()["tier_reason"]
