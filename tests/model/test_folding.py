"""A folded decoder computes what it was made of, with fewer switches."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from skote.model.decoder import Decoder
from skote.model.folding import FOLDED, foldable, folded
from skote.model.spec import DecoderSpec, RopeSpec
from skote.model.weights import DecoderWeights, LayerWeights
from skote.runtime.cache import StaticCache

SPEC = DecoderSpec(31, 24, 40, 2, 4, 2, 8, 1e-2, 64, RopeSpec(10000.0), False, ())
FAMILIES: dict[str, dict[str, Any]] = {
    "gemma": {"norm_plus_one": True, "embedding_scale": 4.9, "post_norms": True, "qk_norm": "head"},
    "granite": {"embedding_scale": 12.0, "residual_scale": 0.22, "logits_scale": 0.125},
    "all": {"norm_plus_one": True, "post_norms": True, "residual_scale": 0.4, "logits_scale": 3.0, "qk_norm": "head"},
}


def decoder(spec: DecoderSpec, dtype: torch.dtype = torch.float32) -> Decoder:
    torch.manual_seed(3)

    def drawn(shape: tuple[int, ...]) -> torch.Tensor:
        return (torch.randn(shape) / shape[-1] ** 0.5 if len(shape) > 1 else torch.randn(shape)).to(dtype)

    layers = tuple(
        LayerWeights(**{name: drawn(shape) for name, shape in spec.layer_shapes().items()}) for _ in range(spec.layers)
    )
    return Decoder(
        spec, DecoderWeights(layers=layers, **{name: drawn(s) for name, s in spec.model_shapes().items()}), 16
    )


def logits(of: Decoder) -> torch.Tensor:
    cache = StaticCache(of.spec, 1, 9, dtype=of.weights.embed.dtype, device=of.device)
    ids, positions = torch.arange(9)[None], torch.arange(9)[None]
    return of.forward(ids, cache.layers, torch.zeros(1, 9), positions)


@pytest.mark.parametrize("switches", FAMILIES.values(), ids=FAMILIES)
def test_the_logits_are_the_same_without_the_switches(switches: dict[str, Any]) -> None:
    before = decoder(replace(SPEC, **switches))
    after = folded(before)

    assert not FOLDED & set(after.spec.switches())
    assert after.paths is before.paths
    torch.testing.assert_close(logits(after), logits(before), rtol=1e-5, atol=1e-5)
    for name in FOLDED & set(switches):  # and each of them is one that shows
        other = decoder(replace(before.spec, **{name: getattr(SPEC, name)}))
        assert (logits(other) - logits(before)).abs().max() > 0.01


def test_half_precision_norms_are_folded_without_rounding() -> None:
    before = decoder(replace(SPEC, norm_plus_one=True), torch.bfloat16)
    norm = folded(before).weights.layers[0].attn_norm

    assert norm.dtype == torch.float32
    assert torch.equal(norm - 1.0, before.weights.layers[0].attn_norm.float())


def test_what_has_nothing_to_fold_stays_what_it_is() -> None:
    plain = decoder(replace(SPEC, post_norms=True, attention_softcap=3.0))

    assert folded(plain) is plain


def test_norms_whose_eps_a_scale_would_change_are_not_foldable() -> None:
    assert foldable(SPEC)
    assert not foldable(replace(SPEC, residual_scale=0.5, qk_norm="head"))
    assert foldable(replace(SPEC, residual_scale=0.5, qk_norm="head", post_norms=True))
    assert not foldable(replace(SPEC, layer_norm=True))
