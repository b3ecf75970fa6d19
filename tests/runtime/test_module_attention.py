"""What our attention function is asked for by hand: it computes it, or refuses in a sentence."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from skote.runtime.module_attention import attention
from skote.runtime.module_cache import ModuleCache
from skote.types import EngineError


def unused(*_: torch.Tensor) -> torch.Tensor:
    raise AssertionError("a prompt needs no attention of one token")


def ask(width: int = 2, **options: Any) -> torch.Tensor:
    """Attention of two positions, two query heads and one kv head of `width`, with one-hot values."""
    cache = ModuleCache(4, device=torch.device("cpu"), decode_attention=unused)
    module: Any = SimpleNamespace(layer_idx=0, is_causal=True)
    query = torch.tensor([[[[9.0, 9.0], [1.0, 0.0]], [[9.0, 9.0], [0.0, 2.0]]]])
    key = torch.tensor([[[[3.0, 0.0], [0.0, 3.0]]]])
    value = torch.eye(2)[None, None, :, :width]
    given = {"attention_mask": None, "skotergy_cache": cache} | options
    out, weights = attention(module, query, key, value, **given)
    assert weights is None
    return out


def test_it_is_causal_scaled_and_in_rows() -> None:
    out = ask(scaling=0.5, position_ids=torch.zeros(1, 2), use_cache=False, dropout=0.0)

    assert out.shape == (1, 2, 2, 2)
    torch.testing.assert_close(out[0, 0], torch.tensor([[1.0, 0.0], [1.0, 0.0]]))  # the first sees itself alone
    high, low = math.exp(1.5) / (math.exp(1.5) + 1), math.exp(3.0) / (math.exp(3.0) + 1)
    torch.testing.assert_close(out[0, 1], torch.tensor([[high, 1 - high], [1 - low, low]]))


def test_without_a_scale_it_is_the_root_of_head_dim() -> None:
    torch.testing.assert_close(ask(), ask(scaling=1 / math.sqrt(2)))


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"skotergy_cache": None}, "do not hand arguments on"),
        ({"attention_mask": torch.zeros(1, 1, 2, 2)}, "builds an attention mask of its own"),
        ({"dropout": 0.1}, "dropout=0.1"),
        ({"sliding_window": 3}, "sliding window of 3"),
        ({"is_causal": False}, "not causal"),
        ({"softcap": 50.0}, "asks its attention for softcap"),
        ({"s_aux": torch.zeros(2)}, "asks its attention for s_aux"),
        ({"position_bias": torch.zeros(1)}, "asks its attention for position_bias"),
        ({"width": 1}, "differ in head_dim"),
    ],
)
def test_what_it_does_not_apply_is_refused(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(EngineError, match=sentence):
        ask(**options)


def test_what_is_switched_off_is_not() -> None:
    torch.testing.assert_close(ask(sliding_window=4, softcap=None, output_attentions=False, is_causal=True), ask())
