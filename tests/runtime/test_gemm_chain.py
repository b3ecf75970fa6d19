"""The chain of multi-row kernels, each in place of its launcher's reference, against a layer in framework ops."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from skote.kernels.add_rms_norm_triton import add_rms_norm_reference
from skote.kernels.attention import prefill_attention
from skote.kernels.experts import many_rows_experts
from skote.kernels.gate_up_gemm_triton import gate_up_gemm_reference
from skote.kernels.qkv_gemm_triton import qkv_gemm_reference
from skote.kernels.rms_norm import rms_norm_reference
from skote.kernels.rope import inverse_frequencies, rope_table
from skote.kernels.split_gemm_triton import split_gemm_reference
from skote.kernels.tiles import batch_tiles
from skote.model.decoder import Ops, layer_forward
from skote.model.spec import DecoderSpec, RopeSpec
from skote.model.weights import DecoderWeights, LayerWeights
from skote.runtime import gemm_chain
from skote.runtime.gemm_chain import GemmChain

SPEC = DecoderSpec(31, 24, 40, 3, 4, 2, 8, 1e-5, 64, RopeSpec(10000.0), False, ())
GEMMA = replace(SPEC, post_norms=True, activation="gelu_tanh")
ROWS, PAGE = 16, 4


@pytest.fixture(params=[SPEC, GEMMA], ids=["llama", "gemma"])
def spec(request: pytest.FixtureRequest) -> DecoderSpec:
    of: DecoderSpec = request.param
    return of


@pytest.fixture
def chain(monkeypatch: pytest.MonkeyPatch, spec: DecoderSpec) -> GemmChain:
    def qkv_gemm(*tensors: torch.Tensor, page: int, tile: Any, pdl: bool, **options: Any) -> None:
        qkv_gemm_reference(*tensors, page=page, **options)

    def split_gemm(h: torch.Tensor, weight: torch.Tensor, partials: torch.Tensor, *, tile: Any, pdl: bool) -> None:
        assert len(partials) == tile.splits
        for columns, part in zip(torch.arange(h.shape[1]).chunk(tile.splits), partials, strict=True):
            part.copy_(split_gemm_reference(h[:, columns], weight[:, columns]))

    def gate_up_gemm(*tensors: torch.Tensor, tile: Any, pdl: bool, activation: str) -> None:
        gate_up_gemm_reference(*tensors, activation=activation)

    def add_rms_norm(*tensors: Any, eps: float, pdl: bool, post: torch.Tensor | None) -> None:
        add_rms_norm_reference(*tensors, eps=eps, post=post)

    for launcher in (qkv_gemm, split_gemm, gate_up_gemm, add_rms_norm):
        monkeypatch.setattr(gemm_chain, launcher.__name__, launcher)
    tiles = batch_tiles(SPEC.hidden, SPEC.intermediate, SPEC.head_dim, 4)
    return GemmChain(spec, drawn(spec), ROWS, tiles=tiles, page=PAGE, pdl=False)


def drawn(spec: DecoderSpec) -> DecoderWeights:
    torch.manual_seed(5)
    heads = SPEC.heads * SPEC.head_dim

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns) / columns**0.5

    layers = tuple(
        LayerWeights(
            torch.rand(SPEC.hidden) + 0.5,
            matrix(heads + 2 * SPEC.kv_heads * SPEC.head_dim, SPEC.hidden),
            matrix(SPEC.hidden, heads),
            torch.rand(SPEC.hidden) + 0.5,
            matrix(2 * SPEC.intermediate, SPEC.hidden),
            matrix(SPEC.hidden, SPEC.intermediate),
            attn_post_norm=torch.randn(SPEC.hidden) if spec.post_norms else None,
            mlp_post_norm=torch.randn(SPEC.hidden) if spec.post_norms else None,
        )
        for _ in range(SPEC.layers)
    )
    embed = torch.randn(SPEC.vocab, SPEC.hidden)
    return DecoderWeights(embed, layers, torch.rand(SPEC.hidden) + 0.5, embed)


def test_a_pass_through_the_layers_twice(chain: GemmChain, spec: DecoderSpec) -> None:
    """The rows are a prompt; its pages follow each other. A second pass starts with nothing owed."""
    weights, rope = drawn(spec), rope_table(ROWS, inverse_frequencies(SPEC.head_dim, SPEC.rope.theta))
    positions, table = torch.arange(ROWS, dtype=torch.int32), torch.arange(ROWS // PAGE, dtype=torch.int32)[None]
    start = torch.randn(ROWS, SPEC.hidden)
    mask = torch.zeros(1, ROWS)
    ops = Ops(
        norm=lambda x, weight, _: rms_norm_reference(x, weight, SPEC.norm_eps),
        linear=lambda x, weight: x @ weight.T,
        attention=prefill_attention,
        experts=many_rows_experts,
    )
    for _ in range(2):
        x, expected = start.clone(), start[None]
        for layer in weights.layers:
            k, v, wanted_k, wanted_v = (torch.zeros(SPEC.kv_heads, ROWS, SPEC.head_dim) for _ in range(4))
            launched = chain.qkv(x, layer, rope, positions, table, (k, v))
            attended = prefill_attention(chain.q.transpose(0, 1)[None], k[None], v[None], mask)
            launched += chain.mlp(x, attended[0].transpose(0, 1).flatten(1), layer)
            assert launched == ("add_rms_norm", "qkv_gemm", "split_gemm", "add_rms_norm", "gate_up_gemm", "split_gemm")
            cache = wanted_k[None], wanted_v[None]
            expected = layer_forward(expected, layer, cache, *(each[None, None] for each in rope), mask, spec, ops)
            torch.testing.assert_close((k, v), (wanted_k, wanted_v), rtol=1e-5, atol=1e-5)
        assert chain.norm(x, weights.norm) == ("add_rms_norm",)
        torch.testing.assert_close(x, expected[0], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(chain.normed, ops.norm(x, weights.norm, None), rtol=1e-5, atol=1e-5)


def test_without_query_heads_keys_and_values_alone_are_written(chain: GemmChain, spec: DecoderSpec) -> None:
    layer, rope = drawn(spec).layers[0], rope_table(ROWS, inverse_frequencies(SPEC.head_dim, SPEC.rope.theta))
    positions, table = torch.arange(ROWS, dtype=torch.int32), torch.arange(ROWS // PAGE, dtype=torch.int32)[None]
    x, pools = torch.randn(ROWS, SPEC.hidden), []
    for queries in (True, False):
        pool = torch.zeros(SPEC.kv_heads, ROWS, SPEC.head_dim), torch.zeros(SPEC.kv_heads, ROWS, SPEC.head_dim)
        chain.q.fill_(7.0)
        chain.qkv(x, layer, rope, positions, table, pool, queries=queries)
        pools.append(pool)
    torch.testing.assert_close(pools[1], pools[0])
    assert chain.q.eq(7.0).all()
