"""Attention against a loop over heads and positions that is written from the formula."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch

from skote.kernels.attention import decode_attention, prefill_attention


def drawn(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def by_loops(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, padding: list[int]) -> torch.Tensor:
    """`padding[b]` first positions of row b are invisible; rows of padding are left at NaN."""
    batch, heads, tokens, dim = q.shape
    group = heads // k.shape[1]
    out = torch.full(q.shape, torch.nan, dtype=torch.float64)
    for b in range(batch):
        for h in range(heads):
            keys, values = k[b, h // group].double(), v[b, h // group].double()
            for t in range(tokens):
                newest = k.shape[2] - tokens + t
                seen = range(padding[b], newest + 1)
                if not seen:
                    continue
                scores = [float(q[b, h, t].double() @ keys[p]) / math.sqrt(dim) for p in seen]
                weights = [math.exp(score - max(scores)) for score in scores]
                out[b, h, t] = sum(weight / sum(weights) * values[p] for weight, p in zip(weights, seen, strict=True))
    return out


def mask_of(padding: list[int], length: int) -> torch.Tensor:
    mask = torch.zeros(len(padding), length)
    for row, padded in enumerate(padding):
        mask[row, :padded] = -torch.inf
    return mask


@pytest.mark.parametrize("kv_heads", [1, 2, 6])
@pytest.mark.parametrize("length", [1, 2, 9])
def test_decode(kv_heads: int, length: int) -> None:
    q, k, v = drawn(1, 6, 1, 8, seed=1), drawn(1, kv_heads, length, 8, seed=2), drawn(1, kv_heads, length, 8, seed=3)

    out = decode_attention(q, k, v, torch.zeros(1, length))

    torch.testing.assert_close(out.double(), by_loops(q, k, v, [0]), rtol=1e-5, atol=1e-6)


def test_decode_with_padding() -> None:
    q, k, v = drawn(2, 6, 1, 8, seed=1), drawn(2, 2, 7, 8, seed=2), drawn(2, 2, 7, 8, seed=3)

    out = decode_attention(q, k, v, mask_of([0, 4], 7))

    torch.testing.assert_close(out.double(), by_loops(q, k, v, [0, 4]), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kv_heads", [1, 2, 6])
@pytest.mark.parametrize(("tokens", "length"), [(1, 1), (5, 5), (1, 6), (3, 8)])
def test_prefill(kv_heads: int, tokens: int, length: int) -> None:
    q = drawn(2, 6, tokens, 8, seed=1)
    k, v = drawn(2, kv_heads, length, 8, seed=2), drawn(2, kv_heads, length, 8, seed=3)
    expected = by_loops(q, k, v, [0, 0])

    without_mask = prefill_attention(q, k, v, None)
    with_mask = prefill_attention(q, k, v, torch.zeros(2, length))

    torch.testing.assert_close(without_mask.double(), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(with_mask.double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("tokens", "length"), [(6, 6), (1, 6), (2, 6)])
def test_prefill_with_padding_is_finite_everywhere_and_right_where_it_is_read(tokens: int, length: int) -> None:
    q, k, v = drawn(3, 6, tokens, 8, seed=1), drawn(3, 2, length, 8, seed=2), drawn(3, 2, length, 8, seed=3)
    padding = [0, 2, length - 1]
    expected = by_loops(q, k, v, padding)

    out = prefill_attention(q, k, v, mask_of(padding, length))

    assert out.isfinite().all()
    read = expected.isfinite()
    torch.testing.assert_close(out.double()[read], expected[read], rtol=1e-5, atol=1e-6)


def test_what_lies_in_the_padding_does_not_matter() -> None:
    q, k, v = drawn(1, 6, 3, 8, seed=1), drawn(1, 2, 7, 8, seed=2), drawn(1, 2, 7, 8, seed=3)
    mask = mask_of([3], 7)
    before = prefill_attention(q, k, v, mask), decode_attention(q[:, :, -1:], k, v, mask)
    k[:, :, :3], v[:, :, :3] = 1000.0, -1000.0

    assert prefill_attention(q, k, v, mask).equal(before[0])
    assert decode_attention(q[:, :, -1:], k, v, mask).equal(before[1])


def test_half_precision_caches() -> None:
    q = drawn(1, 6, 1, 8, seed=1)
    k, v = drawn(1, 2, 9, 8, seed=2).bfloat16(), drawn(1, 2, 9, 8, seed=3).bfloat16()
    expected = by_loops(q, k, v, [0])

    decode, prefill = decode_attention(q, k, v, torch.zeros(1, 9)), prefill_attention(q, k, v, None)

    assert (decode.dtype, prefill.dtype) == (torch.float32, torch.bfloat16)
    torch.testing.assert_close(decode.double(), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(prefill.double(), expected, rtol=2**-6, atol=2**-6)


def scored(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: float | int | None) -> torch.Tensor:
    """By loops in fp64, with a scale, a soft cap and a window."""
    scale, softcap, window = (options.get(name) for name in ("scale", "softcap", "window"))
    out = torch.zeros(q.shape, dtype=torch.float64)
    batch, heads, tokens, dim = q.shape
    group, length = heads // k.shape[1], k.shape[2]
    for b, h, t in itertools.product(range(batch), range(heads), range(tokens)):
        newest = length - tokens + t
        seen = range(max(0, newest - (window or length) + 1), newest + 1)
        scores = [float(q[b, h, t].double() @ k[b, h // group, p].double()) for p in seen]
        scores = [score * (dim**-0.5 if scale is None else scale) for score in scores]
        scores = scores if softcap is None else [softcap * math.tanh(score / softcap) for score in scores]
        total = sum(math.exp(score) for score in scores)
        for p, score in zip(seen, scores, strict=True):
            out[b, h, t] += math.exp(score) / total * v[b, h // group, p].double()
    return out


OPTIONS = [{"scale": 0.7}, {"softcap": 0.5}, {"window": 3}, {"window": 20}, {"scale": 0.7, "softcap": 0.5, "window": 1}]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize(("tokens", "length"), [(5, 5), (1, 6), (3, 8)])
def test_prefill_with_scales_caps_and_windows(options: dict[str, Any], tokens: int, length: int) -> None:
    q = drawn(2, 6, tokens, 8, seed=1)
    k, v = drawn(2, 2, length, 8, seed=2), drawn(2, 2, length, 8, seed=3)
    expected = scored(q, k, v, **options)

    for key_mask in (None, torch.zeros(2, length)):
        out = prefill_attention(q, k, v, key_mask, **options)
        torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("options", OPTIONS[:2], ids=str)
def test_decode_with_a_scale_and_a_cap(options: dict[str, Any]) -> None:
    q, k, v = drawn(1, 6, 1, 8, seed=1), drawn(1, 2, 7, 8, seed=2), drawn(1, 2, 7, 8, seed=3)

    out = decode_attention(q, k, v, torch.zeros(1, 7), **options)

    torch.testing.assert_close(out.double(), scored(q, k, v, **options), rtol=1e-5, atol=1e-6)


def test_a_window_counts_columns_where_there_is_padding() -> None:
    q, k, v = drawn(1, 2, 4, 8, seed=1), drawn(1, 2, 7, 8, seed=2), drawn(1, 2, 7, 8, seed=3)

    padded = prefill_attention(q, k, v, mask_of([3], 7), window=2)

    torch.testing.assert_close(padded.double(), scored(q, k[:, :, 3:], v[:, :, 3:], window=2), rtol=1e-5, atol=1e-6)
