"""The single-row set with every launcher's reference in place of its kernel, on a CPU, against the plain closure.

All that is launched goes through the launcher's checks, too, but for the one that asks for CUDA. The multi-row set's
counterpart is test_batch_closure.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from skote.kernels.expert_gemv_triton import (
    expert_down_gemv,
    expert_down_gemv_reference,
    expert_up_gemv,
    expert_up_gemv_reference,
)
from skote.kernels.flash_decode_triton import flash_decode, flash_decode_reference
from skote.kernels.gate_up_gemv_triton import gate_up_gemv, gate_up_gemv_reference
from skote.kernels.greedy_token_triton import greedy_token, greedy_token_reference
from skote.kernels.gumbel_best_triton import gumbel_best, gumbel_best_reference
from skote.kernels.head_gemv_triton import head_gemv, head_gemv_reference
from skote.kernels.head_norm_triton import head_norm, head_norm_reference
from skote.kernels.qkv_gemv_triton import qkv_gemv, qkv_gemv_reference
from skote.kernels.residual_gemv_triton import residual_gemv, residual_gemv_reference
from skote.model.decoder import Decoder
from skote.model.folding import folded
from skote.model.spec import DecoderSpec, ExpertSpec, RopeSpec
from skote.model.weights import DecoderWeights, LayerWeights
from skote.runtime import expert_row, kernel_sets, token_choice
from skote.runtime.cuda_layers import cuda_layers
from skote.runtime.kernel_sets import SingleRow
from skote.runtime.paged_cache import PagedCache
from skote.runtime.plain_closure import PlainClosure
from skote.runtime.step_state import StepState
from skote.runtime.tier_choice import KERNEL_SWITCHES
from skote.runtime.token_choice import Choice, TokenChoice
from skote.types import Request, Sampling

SPEC = DecoderSpec(97, 36, 50, 2, 4, 2, 16, 1e-5, 700, RopeSpec(10000.0), False, ())
CAPACITY = 300


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


def head_gemv_in_tiles(x: Any, norm: Any, weight: Any, logits: Any, best: Any, first: Any, *, eps: float, tile: Any,
                       pdl: bool, **more: Any) -> None:  # fmt: skip
    head_gemv_reference(x, norm, weight, logits, eps=eps, **more)
    for program, part in enumerate(logits.split(tile.rows)):
        best[program], argmax = part.max(0)
        first[program] = argmax + program * tile.rows


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch, door: Callable[..., Any]) -> None:
    for module, launchers in {
        kernel_sets: {
            "qkv_gemv": door(qkv_gemv, qkv_gemv_reference, "tile", "pdl"),
            "head_norm": door(head_norm, head_norm_reference, "pdl"),
            "flash_decode": door(flash_decode, flash_decode_in_place),
            "residual_gemv": door(residual_gemv, residual_gemv_reference, "tile", "pdl"),
            "gate_up_gemv": door(gate_up_gemv, gate_up_gemv_reference, "tile", "pdl"),
            "head_gemv": door(head_gemv, head_gemv_in_tiles),
        },
        expert_row: {
            "head_gemv": door(head_gemv, head_gemv_in_tiles),
            "expert_up_gemv": door(expert_up_gemv, expert_up_gemv_reference, "tile", "pdl"),
            "expert_down_gemv": door(expert_down_gemv, expert_down_gemv_reference, "pdl"),
        },
        token_choice: {
            "gumbel_best": door(gumbel_best, gumbel_best_reference, "pdl"),
            "greedy_token": door(greedy_token, greedy_token_reference, "pdl"),
        },
    }.items():
        for name, launcher in launchers.items():
            monkeypatch.setattr(module, name, launcher)


def drawn(spec: DecoderSpec) -> DecoderWeights:
    torch.manual_seed(5)

    def part(name: str, shape: tuple[int, ...]) -> torch.Tensor:
        if "norm" in name:
            return torch.rand(shape) + 0.5
        return torch.randn(shape) / (4 if "bias" in name else shape[-1] ** 0.5)

    def parts(shapes: dict[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
        return {name: part(name, shape) for name, shape in shapes.items()}

    layers = tuple(LayerWeights(**parts(spec.layer_shapes())) for _ in range(spec.layers))
    model = parts(spec.model_shapes())
    return DecoderWeights(model.pop("embed") * spec.hidden**0.5, layers, **model)


class Steps:
    """One row's steps in pages of no order, from an empty cache on."""

    def __init__(self, spec: DecoderSpec) -> None:
        self.plain = Decoder(spec, drawn(spec), CAPACITY)
        decoder = folded(self.plain)
        spec, self.weights = decoder.spec, decoder.weights
        self.kernels = SingleRow(spec, self.weights, CAPACITY)
        page = self.kernels.attention.page
        pages = -(-CAPACITY // page) + 1
        self.cache = PagedCache(spec, pages, CAPACITY, page=page, dtype=torch.float32, device=torch.device("cpu"))
        self.state = StepState(decoder, self.cache, 1, on_host=False)
        self.state.table[0].copy_(torch.arange(pages - 1, 0, -1)[: self.cache.pages_per_row])
        self.layers = cuda_layers(decoder, self.cache, self.state)
        self.choose = TokenChoice(decoder, 1)

    def run(self, choice: Choice) -> int:
        """A step from where the row stands; its token."""
        for layer in self.layers:
            self.kernels.layer(self.state, layer, CAPACITY)
        self.kernels.head(self.state, self.weights)
        self.choose(self.state, choice, self.kernels.best, self.kernels.first)
        return int(self.state.history[0, int(self.state.position)])

    def generate(self, ids: tuple[int, ...], count: int, choice: Choice = Choice.GREEDY) -> list[int]:
        """`count` tokens after the prompt `ids`, which is fed token by token."""
        for place, token in enumerate(ids):
            self.state.feed(0, token, place)
            last = self.run(choice)
        return [last, *(self.run(choice) for _ in range(count - 1))]


def prompt(length: int) -> tuple[int, ...]:
    return tuple(torch.randint(0, SPEC.vocab, (length,), generator=torch.Generator().manual_seed(length)).tolist())


SWITCHES: dict[str, dict[str, Any]] = {
    "llama": {},
    "biases": {"qkv_bias": True},
    "scale": {"attention_scale": 0.6},
    "qwen3": {"qk_norm": "head"},
    "norms and biases": {"qkv_bias": True, "qk_norm": "head"},
    "gemma": {
        "norm_plus_one": True,
        "post_norms": True,
        "attention_softcap": 1.0,
        "logits_softcap": 2.0,
        "windows": (20, None),
        "embedding_scale": 3.0,
        "activation": "gelu_tanh",
    },
    "mixtral": {"experts": ExpertSpec(5, 2, normalised=True)},
    "qwen3 of experts": {"experts": ExpertSpec(7, 3, normalised=False), "qk_norm": "head"},
    "granite": {"embedding_scale": 3.0, "residual_scale": 0.4, "logits_scale": 0.3},
    "smollm3": {"ropes": (None, RopeSpec(500.0)), "windows": (None, 30)},
}


def test_every_switch_that_the_kernels_know_is_tried() -> None:
    assert {switch for switches in SWITCHES.values() for switch in switches} == KERNEL_SWITCHES


@pytest.mark.parametrize("switches", SWITCHES.values(), ids=SWITCHES)
def test_greedy_tokens_equal_those_of_the_plain_closure(switches: dict[str, Any]) -> None:
    spec, ids, expected = replace(SPEC, **switches), prompt(40), []
    with torch.no_grad():
        steps = Steps(spec)
        plain = PlainClosure(steps.plain, capacity=CAPACITY, compiled=False)
        plain.generate([Request("r", ids, 30, ignore_eos=True)], lambda _, new: expected.extend(new))
        assert steps.generate(ids, 30) == expected
    assert len(set(expected)) > 3


def test_a_draw_of_top_1_is_greedy_and_another_seed_gives_other_tokens() -> None:
    ids = prompt(7)
    with torch.no_grad():
        steps = Steps(SPEC)
        greedy = steps.generate(ids, 12)
        steps.state.choose_by([Sampling(1.5, top_k=1, seed=3)])
        assert steps.generate(ids, 12, Choice.LIMITED) == greedy
        found = []
        for seed in (1, 1, 2):
            steps.state.choose_by([Sampling(1.5, seed=seed)])
            found.append(steps.generate(ids, 12, Choice.DRAWN))
    assert found[0] == found[1] != found[2]
