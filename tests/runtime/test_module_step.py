"""The step over our cache and attention, uncaptured, against the families' own forward pass over the whole text."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from skote.kernels.flash_decode_triton import flash_decode_reference
from skote.runtime.module_attention import module_refusal
from skote.runtime.module_cache import PAGE, ModuleCache
from skote.runtime.module_step import EagerStep, StaticStep, forced_logits
from skote.types import EngineError

Make = Callable[..., Any]

RIGHT = [
    "qwen2, biases",
    "qwen3, norms of queries and keys",
    "gpt2, learned positions",
    "phi3, fused projections",
    "olmo2, norms after",
    "granite, a scale of its own",
    "gpt_neox, partial rotary",
    "gemma, one more than the weight",
    "mixtral, experts",
]


def ids(length: int) -> list[int]:
    drawn: list[int] = torch.randint(3, 96, (length,), generator=torch.Generator().manual_seed(length)).tolist()
    return drawn


def static(module: Any, capacity: int = 64) -> tuple[StaticStep, ModuleCache]:
    attention = partial(flash_decode_reference, page=PAGE)
    cache = ModuleCache(capacity, device=torch.device("cpu"), decode_attention=attention)
    return StaticStep(module, cache), cache


def whole(module: Any, prompt: list[int], forced: list[int]) -> torch.Tensor:
    """The same logits from one forward pass without any cache."""
    logits: torch.Tensor = module(torch.tensor([prompt + forced[:-1]]), use_cache=False).logits
    return logits[0, len(prompt) - 1 :].float()


@torch.no_grad()
@pytest.mark.parametrize("name", RIGHT)
def test_prefill_and_steps_equal_one_forward_pass(make_module: Make, name: str) -> None:
    """A short prompt after a long one, the last slot of the context, a prompt of one token."""
    plain, module = make_module(name), make_module(name)
    assert module_refusal(module, 64) is None
    step, cache = static(module)

    for prompt, new in ((ids(40), 25), (ids(5), 7), (ids(1), 9)):
        forced = ids(new)
        expected = whole(plain, prompt, forced)
        torch.testing.assert_close(forced_logits(step, prompt, forced), expected, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(forced_logits(EagerStep(plain), prompt, forced), expected, rtol=1e-4, atol=1e-4)
    assert sorted(cache.layers) == [0, 1]


@torch.no_grad()
def test_tokens_are_fed_back_on_the_device(make_module: Make) -> None:
    module = make_module("qwen2, biases")
    greedy = module.generate(torch.tensor([ids(9)]), max_new_tokens=12, do_sample=False, eos_token_id=None)
    step, _ = static(module)

    tokens = [int(step.prefill(ids(9)).argmax())]
    for _ in range(11):
        step.run()
        tokens.append(int(step._token))

    assert tokens == greedy[0, 9:].tolist()
    assert len(set(tokens)) > 4


@torch.no_grad()
@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("stablelm", "StableLmForCausalLM takes no attention function from outside"),
        ("phi3, windows", "its sliding_window of 8 is shorter than the context of 64"),
        ("qwen2, dynamic rope", "rope type 'dynamic' changes with the position by a decision of the host"),
    ],
)
def test_what_a_config_tells_of_it_is_refused(make_module: Make, name: str, sentence: str) -> None:
    assert module_refusal(make_module(name), 64) == sentence


@torch.no_grad()
@pytest.mark.parametrize(
    ("name", "sentence"), [("stablelm", "do not hand arguments on"), ("phi3, windows", "sliding window of 8")]
)
def test_and_by_the_attention_function_too(make_module: Make, name: str, sentence: str) -> None:
    with pytest.raises(EngineError, match=sentence):
        static(make_module(name))[0].prefill(ids(3))


@torch.no_grad()
def test_a_window_that_covers_the_context_changes_nothing(make_module: Make) -> None:
    module = make_module("phi3, windows")
    expected = forced_logits(EagerStep(module), ids(3), ids(6))
    assert module_refusal(module, 8) is None

    torch.testing.assert_close(forced_logits(static(module, 8)[0], ids(3), ids(6)), expected, rtol=1e-4, atol=1e-4)


def test_other_layers_and_ways_to_mask_are_refused(make_module: Make) -> None:
    module = make_module("qwen2, biases")
    module.config.layer_types = ["full_attention", "linear_attention"]
    assert module_refusal(module, 64) == "its layers are of the kinds full_attention, linear_attention"

    module.config.layer_types = None
    module.config.attention_chunk_size = 16
    assert module_refusal(module, 64) == "its attention_chunk_size of 16 is shorter than the context of 64"
    assert module_refusal(module, 16) is None

    module.config.is_causal = False
    assert module_refusal(module, 16) == "its attention is not causal"
