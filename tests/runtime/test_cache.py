"""The static cache: its shape and its bytes."""

from __future__ import annotations

import torch

from skote.model.spec import DecoderSpec, RopeSpec
from skote.runtime.cache import StaticCache

SPEC = DecoderSpec(
    vocab=10,
    hidden=6,
    intermediate=5,
    layers=3,
    heads=4,
    kv_heads=2,
    head_dim=4,
    norm_eps=1e-5,
    max_positions=32,
    rope=RopeSpec(theta=10000.0),
    tied_embeddings=True,
    eos_ids=(),
)


def cache(capacity: int, dtype: torch.dtype = torch.float32) -> StaticCache:
    return StaticCache(SPEC, 2, capacity, dtype=dtype, device=torch.device("cpu"))


def test_one_pair_of_tensors_a_layer_with_a_slot_to_spare() -> None:
    made = cache(9, torch.bfloat16)

    assert len(made.layers) == 3
    for keys, values in made.layers:
        assert keys.shape == values.shape == (2, 2, 10, 4)
        assert keys.dtype == values.dtype == torch.bfloat16
        assert keys.data_ptr() != values.data_ptr()
    a_row = sum(keys[0].nbytes + values[0].nbytes for keys, values in made.layers)
    assert a_row == SPEC.kv_bytes_per_token(2) * 10
