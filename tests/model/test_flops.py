from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from skote.model.adapters import load_spec
from skote.model.facts import ModuleFacts
from skote.model.flops import prefill_flops

PROMPT = 7


def test_what_a_whole_prefill_of_transformers_takes_less_what_it_need_not(
    make_checkpoint: Callable[..., Path],
) -> None:
    """torch's own counter over Transformers' prefill, which runs the last layer for every token, and all pairs.

    So it computes more than our count, by: attention over P x P pairs instead of the P (P + 1) / 2 that are not masked
    (and in the last layer instead of the last token's P), q, o and the feed-forward of the last layer for P - 1 tokens.
    """
    from transformers import LlamaForCausalLM

    directory = make_checkpoint()
    spec = load_spec(directory)
    model = LlamaForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(torch.arange(PROMPT)[None], logits_to_keep=1)
    q = spec.heads * spec.head_dim
    unmasked = PROMPT * (PROMPT + 1) // 2
    more = 4 * q * ((spec.layers - 1) * (PROMPT**2 - unmasked) + PROMPT**2 - PROMPT)
    more += 2 * (PROMPT - 1) * (2 * q * spec.hidden + 3 * spec.hidden * spec.intermediate)
    flops = prefill_flops(spec)

    assert flops is not None
    ours = flops["fixed"] + flops["per_token"] * PROMPT + flops["per_pair"] * unmasked
    assert ours == counter.get_total_flops() - more


def test_a_model_without_adapter_is_not_counted() -> None:
    facts = ModuleFacts("no adapter", 8, 8, (), 8, 8, 8)

    assert prefill_flops(facts) is None


@pytest.mark.parametrize("layers", [1, 2])
def test_a_token_more(make_checkpoint: Callable[..., Path], layers: int) -> None:
    """One layer: a token more costs its k and v, and one pair of the last token's attention."""
    spec = load_spec(make_checkpoint()).with_layers(layers)
    flops = prefill_flops(spec)

    assert flops is not None
    keys_values = 4 * spec.kv_heads * spec.head_dim * spec.hidden
    pair = 4 * spec.heads * spec.head_dim
    if layers == 1:
        assert (flops["per_token"], flops["per_pair"]) == (keys_values + pair, 0)
    else:
        assert flops["per_pair"] == pair
