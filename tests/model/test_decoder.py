"""The lean decoder's forward pass against Transformers' LlamaForCausalLM, logits for logits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from skote.model.adapters import load_spec
from skote.model.decoder import Decoder
from skote.model.weights import load_weights
from skote.runtime.cache import StaticCache

CPU = torch.device("cpu")
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
MODELS = {
    "grouped": {},
    "one kv head a head": {"num_key_value_heads": 6},
    "one kv head": {"num_key_value_heads": 1},
    "tied": {"tie_word_embeddings": True},
    "wide heads": {"head_dim": 16},
    "llama3 rope": {"rope_parameters": LLAMA3},
    "linear rope": {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}},
    "large epsilon": {"rms_norm_eps": 0.5},
}
IDS = torch.randint(3, 96, (1, 40), generator=torch.Generator().manual_seed(6))


class Forward:
    """A decoder with a cache that it fills call by call."""

    def __init__(self, directory: Path, dtype: torch.dtype = torch.float32, batch: int = 1) -> None:
        self.spec = load_spec(directory)
        weights = load_weights(directory, self.spec, dtype=dtype, device=CPU, random_seed=None)
        self.decoder = Decoder(self.spec, weights, 64)
        self.cache = StaticCache(self.spec, batch, 64, dtype=dtype, device=CPU)
        self.length = 0

    @torch.no_grad()
    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(self.length, self.length + ids.shape[1]).expand(ids.shape)
        self.length += ids.shape[1]
        return self.decoder.forward(ids, self.cache.layers, torch.zeros(len(ids), self.length), positions)


@torch.no_grad()
def reference(directory: Path, ids: torch.Tensor) -> torch.Tensor:
    model = LlamaForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    logits: torch.Tensor = model(ids).logits
    return logits


@pytest.mark.parametrize("changes", MODELS.values(), ids=MODELS.keys())
def test_logits_equal_transformers_by_prefill_by_steps_and_by_pieces(
    make_checkpoint: Callable[..., Path], changes: dict[str, Any]
) -> None:
    directory = make_checkpoint(**changes)
    expected = reference(directory, IDS)[0]

    prefill, stepwise, pieces = Forward(directory), Forward(directory), Forward(directory)
    steps = torch.cat([stepwise(IDS[:, at : at + 1]) for at in range(40)])
    parts = torch.cat([pieces(part) for part in IDS.split((7, 1, 20, 12), dim=1)])

    torch.testing.assert_close(prefill(IDS)[0], expected[-1], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(steps, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(parts, expected[[6, 7, 27, 39]], rtol=1e-4, atol=1e-4)


def test_these_models_differ(make_checkpoint: Callable[..., Path]) -> None:
    """Otherwise the comparison above would not see that, say, a scaling is ignored."""
    plain = Forward(make_checkpoint())(IDS)

    for name in ("llama3 rope", "linear rope", "large epsilon"):
        assert (Forward(make_checkpoint(**MODELS[name]))(IDS) - plain).abs().max() > 0.01


def test_rows_of_a_batch_do_not_see_each_other(make_checkpoint: Callable[..., Path]) -> None:
    directory = make_checkpoint()
    ids = torch.cat((IDS[:, :9], IDS[:, 9:18], IDS[:, 18:27]))

    batch = Forward(directory, batch=3)(ids)

    for row in range(3):
        torch.testing.assert_close(batch[row], Forward(directory)(ids[row : row + 1])[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_no_further_from_fp32_than_transformers(
    make_checkpoint: Callable[..., Path], dtype: torch.dtype
) -> None:
    directory = make_checkpoint()
    exact = reference(directory, IDS)[0]
    model = LlamaForCausalLM.from_pretrained(directory, dtype=dtype).eval()
    with torch.no_grad():
        theirs = model(IDS).logits[0].float()

    forward = Forward(directory, dtype)
    ours = torch.cat([forward(IDS[:, at : at + 1]) for at in range(40)])

    def error(logits: torch.Tensor) -> float:
        return float(((logits - exact).norm(dim=1) / exact.norm(dim=1)).mean())

    assert ours.dtype == torch.float32
    assert 0 < error(ours) <= 1.05 * error(theirs)


def test_the_norm_is_counted(make_checkpoint: Callable[..., Path]) -> None:
    forward = Forward(make_checkpoint())
    forward(IDS)

    assert forward.decoder.paths == {("rms_norm", "reference"): 2 * 2 + 1}
