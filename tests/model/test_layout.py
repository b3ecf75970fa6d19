"""What families store differently, by hand, and that loading it loses nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from skote.model.layout import Place, file_places, module_places, rotary_order
from skote.model.names import LLAMA
from skote.model.spec import DecoderSpec, ExpertSpec, RopeSpec
from skote.model.weights import DecoderWeights, LayerWeights

SPEC = DecoderSpec(5, 3, 4, 1, 4, 2, 4, 1e-5, 8, RopeSpec(10000.0), True, ())
PACKED = LLAMA._replace(qkv=("qkv",))


def weights_of(spec: DecoderSpec) -> DecoderWeights:
    """Weights that are all zeros."""
    absent = dict.fromkeys(("attn_norm", "mlp_norm"), torch.empty(0))
    parts = {name: torch.zeros(shape) for name, shape in spec.layer_shapes().items()}
    beside = {name: torch.zeros(shape) for name, shape in spec.model_shapes().items()}
    return DecoderWeights(layers=(LayerWeights(**absent | parts),), **{"lm_head": beside["embed"]} | beside)


def numbered(place: Place) -> torch.Tensor:
    """A tensor of the place's shape whose rows, or columns where it is transposed, hold their number."""
    count = place.shape[-1 if place.transposed else 0]
    numbers = torch.arange(float(count))
    if len(place.shape) == 1:
        return numbers
    return numbers.expand(place.shape) if place.transposed else numbers[:, None].expand(place.shape)


@pytest.mark.parametrize(
    ("rotated", "interleaved", "order"),
    [
        (8, False, [0, 1, 2, 3, 4, 5, 6, 7]),
        (8, True, [0, 2, 4, 6, 1, 3, 5, 7]),
        (4, False, [0, 1, 4, 5, 2, 3, 6, 7]),  # pairs (0, 2), (1, 3); 4 to 7 stay as they are
        (4, True, [0, 2, 4, 5, 1, 3, 6, 7]),
    ],
)
def test_pairs_lie_half_a_head_apart(rotated: int, interleaved: bool, order: list[int]) -> None:
    assert rotary_order(8, rotated, interleaved=interleaved).tolist() == order


@pytest.mark.parametrize(
    ("changes", "rows"),
    [
        # q heads 0 to 3, k heads 0 and 1, v heads 0 and 1, of four rows each.
        ({"qkv_order": "parts"}, list(range(32))),
        # Group 0: q heads 0 and 1, k, v, in rows 0 to 15.
        (
            {"qkv_order": "groups"},
            [*range(8), *range(16, 24), *range(8, 12), *range(24, 28), *range(12, 16), *range(28, 32)],
        ),
        # Head 0: q, k, v in rows 0 to 11.
        (
            {"qkv_order": "heads", "kv_heads": 4},
            [
                row
                for part in range(3)
                for head in range(4)
                for row in range(12 * head + 4 * part, 12 * head + 4 * part + 4)
            ],
        ),
        # In each head of q and k the rows 0, 2, 1, 3; v as it is.
        (
            {"rope_interleaved": True},
            [row for head in range(6) for row in (4 * head, 4 * head + 2, 4 * head + 1, 4 * head + 3)]
            + list(range(24, 32)),
        ),
    ],
)
@pytest.mark.parametrize("transposed", [False, True])
def test_rows_of_a_packed_projection(changes: dict[str, Any], rows: list[int], transposed: bool) -> None:
    spec = replace(SPEC, names=PACKED, qkv_bias=True, transposed=transposed, **changes)
    weights = weights_of(spec)
    places = module_places(spec, weights)
    for name in ("model.layers.0.qkv.weight", "model.layers.0.qkv.bias"):
        places[name].put(numbered(places[name]))
    layer = weights.layers[0]
    assert layer.qkv_bias is not None

    assert layer.qkv[:, 0].tolist() == rows
    assert layer.qkv[:, 2].tolist() == rows
    assert layer.qkv_bias.tolist() == rows


EVERY_LAYOUT: list[dict[str, Any]] = [
    {},
    {"qkv_bias": True, "o_bias": True, "mlp_bias": True, "rope_interleaved": True, "rotary_dim": 2},
    {"names": PACKED, "qkv_order": "groups", "transposed": True, "gated": False, "positions_offset": 2},
    {"qk_norm": "heads", "layer_norm": True, "norm_bias": True, "rope_interleaved": True},
    {"qk_norm": "heads", "names": LLAMA._replace(q_norm="q.{}", k_norm="k.{}"), "rotary_dim": 2},
    {"qk_norm": "width", "pre_norms": False, "post_norms": True, "tied_embeddings": False},
    {"qk_norm": "head", "experts": ExpertSpec(3, 2, normalised=True)},
]


@pytest.mark.parametrize("changes", EVERY_LAYOUT, ids=str)
@pytest.mark.parametrize("kind", [module_places, file_places])
def test_every_tensor_comes_back_as_it_was_put_and_fills_all_weights(changes: dict[str, Any], kind: Any) -> None:
    spec = replace(SPEC, **changes)
    weights = weights_of(spec)
    generator = torch.Generator().manual_seed(1)
    places = kind(spec, weights)
    given = {name: torch.randn(place.shape, generator=generator) for name, place in places.items()}
    for name, place in places.items():
        place.put(given[name])

    assert all(place.get().equal(given[name]) for name, place in places.items())
    assert sum(tensor.numel() for tensor in given.values()) == spec.parameters
    parts = [*weights.layers[0], weights.embed, weights.norm, weights.lm_head, weights.positions, weights.norm_bias]
    assert all(part.count_nonzero() == part.numel() for part in parts if part is not None)


def test_what_lies_there_as_it_is_is_a_view() -> None:
    weights = weights_of(SPEC)

    assert all(place.as_it_is for place in module_places(SPEC, weights).values())
    name = "model.layers.0.self_attn.k_proj.weight"
    assert module_places(SPEC, weights)[name].get().data_ptr() == weights.layers[0].qkv[16:].data_ptr()
