"""Rotary embedding: by hand, and against Transformers' rotary for each kind of scaling."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from skote.kernels.rope import apply_rope, inverse_frequencies, rope_table
from skote.types import CapacityError

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def transformers_table(positions: torch.Tensor, head_dim: int, rope: dict[str, Any]) -> tuple[torch.Tensor, ...]:
    config = LlamaConfig(
        hidden_size=2 * head_dim, num_attention_heads=2, head_dim=head_dim, max_position_embeddings=131072,
        rope_parameters=rope,
    )  # fmt: skip
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), positions[None])
    return cos[0], sin[0]


def test_frequencies_by_hand() -> None:
    torch.testing.assert_close(inverse_frequencies(4, 10000.0), torch.tensor([1.0, 0.01]))
    torch.testing.assert_close(inverse_frequencies(4, 10000.0, kind="linear", factor=4.0), torch.tensor([0.25, 0.0025]))


@pytest.mark.parametrize(
    ("original", "expected"),
    [
        (200, 1.0),  # 200 / (2 pi) = 31.8 turns: above 4, kept
        (5, 1 / 8),  # 0.8 turns: below 2, stretched
        (20, (10 / math.pi - 2) / 2 * (1 - 1 / 8) + 1 / 8),  # 10 / pi = 3.18 turns: in between, blended
    ],
)
def test_llama3_by_the_turns_over_the_original_context(original: int, expected: float) -> None:
    frequency = inverse_frequencies(
        2, 100.0, kind="llama3", factor=8.0, low_freq_factor=2.0, high_freq_factor=4.0, original_max_positions=original
    )

    torch.testing.assert_close(frequency, torch.tensor([expected]))


@pytest.mark.parametrize("head_dim", [8, 64, 128])
@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ({"rope_type": "default", "rope_theta": 10000.0}, {"theta": 10000.0}),
        (
            {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
            {"theta": 10000.0, "kind": "linear", "factor": 4.0},
        ),
        (
            {"rope_type": "llama3", "rope_theta": 500000.0, "original_max_position_embeddings": 8192} | LLAMA3,
            {"theta": 500000.0, "kind": "llama3", "original_max_positions": 8192} | LLAMA3,
        ),
        (
            {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 2048},
            {"theta": 10000.0, "kind": "yarn", "factor": 4.0, "original_max_positions": 2048},
        ),
        (
            {"rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 4096}
            | {"beta_fast": 8.0, "beta_slow": 2.0, "truncate": False},
            {"theta": 1e6, "kind": "yarn", "factor": 16.0, "original_max_positions": 4096}
            | {"beta_fast": 8.0, "beta_slow": 2.0, "truncate": False},
        ),
    ],
    ids=["default", "linear", "llama3", "yarn", "yarn without whole ends"],
)
def test_tables_equal_transformers_also_beyond_the_original_context(
    head_dim: int, theirs: dict[str, Any], ours: dict[str, Any]
) -> None:
    positions = torch.tensor([0, 1, 2, 77, 4095, 8191, 8192, 8193, 12000])
    amplitude = 0.1 * math.log(ours["factor"]) + 1.0 if ours.get("kind") == "yarn" else 1.0
    cos, sin = rope_table(12001, inverse_frequencies(head_dim, **ours), amplitude=amplitude)

    expected_cos, expected_sin = transformers_table(positions, head_dim, theirs)

    # An angle near 12000 has a spacing of 1e-3 in fp32; both sides multiply the same two fp32 numbers.
    torch.testing.assert_close(cos[positions], expected_cos, rtol=0, atol=2e-3)
    torch.testing.assert_close(sin[positions], expected_sin, rtol=0, atol=2e-3)
    torch.testing.assert_close(cos[positions[:4]], expected_cos[:4], rtol=0, atol=2e-5)


def test_a_quarter_turn_by_hand() -> None:
    # Pairs are (x0, x2) and (x1, x3); the first turns by 90 degrees, the second not at all.
    cos, sin = torch.tensor([0.0, 1.0, 0.0, 1.0]), torch.tensor([1.0, 0.0, 1.0, 0.0])

    assert apply_rope(torch.tensor([1.0, 2.0, 3.0, 4.0]), cos, sin).tolist() == [-3.0, 2.0, 1.0, 4.0]


def test_rotation_equals_transformers() -> None:
    generator = torch.Generator().manual_seed(1)
    q, k = torch.randn(2, 6, 5, 8, generator=generator), torch.randn(2, 2, 5, 8, generator=generator)
    cos, sin = rope_table(5, inverse_frequencies(8, 10000.0))

    expected_q, expected_k = apply_rotary_pos_emb(q, k, cos[None], sin[None])

    torch.testing.assert_close(apply_rope(q, cos, sin), expected_q)
    torch.testing.assert_close(apply_rope(k, cos, sin), expected_k)


def test_scores_depend_on_the_distance_alone() -> None:
    generator = torch.Generator().manual_seed(1)
    q, k = torch.randn(8, generator=generator), torch.randn(8, generator=generator)
    cos, sin = rope_table(40, inverse_frequencies(8, 10000.0))

    def score(at: int, to: int) -> torch.Tensor:
        return apply_rope(q, cos[at], sin[at]) @ apply_rope(k, cos[to], sin[to])

    torch.testing.assert_close(score(9, 4), score(33, 28))


def test_position_zero_does_not_rotate_and_half_precision_is_rounded_once() -> None:
    cos, sin = rope_table(2, inverse_frequencies(8, 10000.0))
    x = torch.randn(8, generator=torch.Generator().manual_seed(1)).bfloat16()

    assert apply_rope(x, cos[0], sin[0]).equal(x)
    assert apply_rope(x, cos[1], sin[1]).equal(apply_rope(x.float(), cos[1], sin[1]).bfloat16())


def test_a_table_without_positions_is_refused() -> None:
    with pytest.raises(CapacityError, match="at least one position, got 0"):
        rope_table(0, inverse_frequencies(8, 10000.0))


def test_longrope_divides_each_pair_by_its_own() -> None:
    frequencies = inverse_frequencies(4, 10000.0, kind="longrope", divisors=(2.0, 5.0))

    torch.testing.assert_close(frequencies, torch.tensor([0.5, 0.002]))


def test_what_is_not_rotated_stays_as_it_is_whatever_the_amplitude() -> None:
    cos, sin = rope_table(3, torch.tensor([1.0]), head_dim=6, amplitude=2.0)

    expected = [2 * math.cos(2.0), 1.0, 1.0]
    torch.testing.assert_close(cos[2], torch.tensor([*expected, *expected]))
    torch.testing.assert_close(sin[2], torch.tensor([2 * math.sin(2.0), 0.0, 0.0] * 2))
    still = rope_table(3, torch.empty(0), head_dim=6)
    assert still[0].eq(1).all()
    assert still[1].eq(0).all()
