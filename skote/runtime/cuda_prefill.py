"""Prefill of one row on CUDA: matrix products by cuBLAS, attention by cuDNN or flash, the rest in fused kernels.

For the single-row set a prompt is one piece. Short prompts are bound by launches: they are padded to a bucket's length
and replay that bucket's graph. The shortest are bound by reading the weights, and may take the multi-row kernels: seven
launches a layer, of which all but the attention overlap. For the multi-row set a prompt is cut into chunks of a fixed
length, the last of them padded, so that what a position becomes depends on nothing that comes after it, the prompt's
length included.

Padding changes nothing: a token sees none that come after it, and the cache's slots behind the prompt are overwritten
before they are read. Of the last layer only keys and values of all tokens are needed, and the output of the last token
alone; that token takes the decode step's own kernels.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

from skote.kernels.add_rms_norm_triton import add_rms_norm
from skote.kernels.launch import ROW_TILES
from skote.kernels.rope_write_triton import rope_write
from skote.kernels.silu_mul_triton import silu_mul_triton
from skote.kernels.tiles import batch_tiles
from skote.model.decoder import Decoder
from skote.model.weights import LayerWeights
from skote.runtime.cuda_graph import Choice, CudaStep, Launched
from skote.runtime.gemm_chain import GemmChain
from skote.runtime.paged_cache import PagedCache, Pool

_BACKENDS = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]
BUCKETS = (32, 64, 128, 256, 512, 1024)
CHUNK = 256
_MLP_SHARE = 0.02  # of the weights' bytes, for the results of the widest products, which would outgrow all others
_MLP_ROWS = 512  # at least: fewer would not keep the device busy


class CudaPrefill:
    """Prompt ids -> the cache's slots, the last token's logits, and the token after it.

    Args:
        step: a single-row step; its state is where the prefill ends.
        buckets: prompt lengths to capture, ascending; those beyond the cache's capacity are left out.
        chunk: cut prompts into chunks of this many tokens, of which the first is captured; it divides a row's slots.
        short: buckets of up to this many tokens take the multi-row kernels, where these have as many rows.

    Raises:
        ValueError: `short` with a cache of several rows.
    """

    def __init__(
        self,
        decoder: Decoder,
        cache: PagedCache,
        step: CudaStep,
        *,
        buckets: Sequence[int],
        chunk: int | None = None,
        short: int = 0,
    ) -> None:
        if short and cache.rows > 1:
            raise ValueError(f"CudaPrefill: short={short} with a cache of {cache.rows} rows; set short=0.")
        self._decoder = decoder
        self._cache = cache
        self._step = step
        self._mlp_rows = _mlp_rows(decoder)
        self._chunk = chunk or cache.capacity
        captured = (chunk,) if chunk else tuple(bucket for bucket in buckets if bucket <= cache.capacity)
        self._ids = torch.zeros(max(captured, default=1), dtype=torch.int64, device=decoder.device)
        self._runs = [self._run_of(n, short) for n in captured]  # kept: the graphs write to what they hold
        self._graphs = [(n, *step.captured(run)) for n, run in zip(captured, self._runs, strict=True)]

    def __call__(self, row: int, input_ids: Sequence[int], choice: Choice = Choice.GREEDY) -> int:
        """Queue the prefill of `input_ids`, which must fit, into a row of the cache; the mark of the token after them.

        The first row of the step's state then stands at that token. One that is drawn, is drawn as the state says.
        """
        state, last = self._step.state, len(input_ids) - 1
        if self._cache.rows > 1:
            state.table[0].copy_(self._cache.table[row])
        for start in range(0, len(input_ids), self._chunk):
            chunk = input_ids[start : start + self._chunk]
            state.position.fill_(start + len(chunk) - 1)
            self._launch(row, torch.tensor(chunk), start)
        return self._step.mark() if choice == Choice.GREEDY else self._step.choose_again(last, choice)

    def _launch(self, row: int, ids: torch.Tensor, start: int) -> None:
        length = len(ids)
        graph = next((entry for entry in self._graphs if length <= entry[0]), None) if start == 0 else None
        if graph is not None:
            self._ids[:length].copy_(ids)
            graph[1].replay()
            launched = graph[2]
        else:
            if self._chunk < self._cache.capacity:
                ids = F.pad(ids, (0, self._chunk - length))
            launched = self._run(ids.to(self._decoder.device), start, row)
        self._decoder.paths.update(launched)

    def _run_of(self, tokens: int, short: int) -> Callable[[], Launched]:
        """What launches the prefill of a bucket of `tokens`."""
        ids = self._ids[:tokens]
        if tokens > short or tokens not in ROW_TILES:
            return partial(self._run, ids, 0, 0)
        spec, weights = self._decoder.spec, self._decoder.weights
        tiles = batch_tiles(spec.hidden, spec.intermediate, spec.head_dim, tokens)
        chain = GemmChain(spec, weights, tokens, tiles=tiles, page=self._cache.page, pdl=True)
        positions = torch.arange(tokens, dtype=torch.int32, device=self._decoder.device)
        return partial(self._run_short, ids, positions, chain)

    def _run_short(self, ids: torch.Tensor, positions: torch.Tensor, chain: GemmChain) -> Launched:
        """As `_run` for `ids` at `positions` from 0 on, by the kernels of `chain`, whose rows are the tokens."""
        spec, weights, state = self._decoder.spec, self._decoder.weights, self._step.state
        launched: Launched = Counter()
        x, rope = weights.embed[ids].float(), (state.cos, state.sin)
        *earlier, last = zip(weights.layers, self._cache.layers, strict=True)
        for layer, pool in earlier:
            before = chain.qkv(x, layer.attn_norm, layer.qkv, rope, positions, state.table, pool)
            attended = _attended(chain.q, *(self._cache.of_row(each, 0, len(ids)) for each in pool))
            launched.update((op, "triton") for op in (*before, *chain.mlp(x, attended, layer)))
        layer, pool = last
        keys_and_values = layer.qkv[spec.heads * spec.head_dim :]
        before = chain.qkv(x, layer.attn_norm, keys_and_values, rope, positions, state.table, pool)
        launched.update((op, "triton") for op in before)
        return launched + self._end(x, 0)

    def _run(self, ids: torch.Tensor, start: int, row: int) -> Launched:
        """Launch everything for `ids` [tokens] from position `start` on; the step's position names the last in use."""
        spec, weights = self._decoder.spec, self._decoder.weights
        launched: Launched = Counter()
        x = weights.embed[ids].float()
        normed = torch.empty_like(x, dtype=weights.embed.dtype)
        delta: torch.Tensor | None = None
        *earlier, last = zip(weights.layers, self._cache.layers, strict=True)
        for layer, pool in earlier:
            add_rms_norm(x, delta, layer.attn_norm, normed, eps=spec.norm_eps, pdl=False)
            qkv = self._projected(normed, layer.qkv, pool, start)
            q, k, v = torch.split(qkv, [spec.heads, spec.kv_heads, spec.kv_heads], dim=1)
            if start:
                k, v = (self._cache.of_row(each, row, start + len(ids)) for each in pool)
            else:
                k, v = k.transpose(0, 1), v.transpose(0, 1)
            attended = _attended(q, k, v)
            del qkv, q, k, v
            add_rms_norm(x, F.linear(attended, layer.o), layer.mlp_norm, normed, eps=spec.norm_eps, pdl=False)
            del attended
            delta = self._mlp(normed, layer)
            launched.update((op, "triton") for op in ("add_rms_norm", "rope_write", "add_rms_norm", "silu_mul"))
        layer, pool = last
        add_rms_norm(x, delta, layer.attn_norm, normed, eps=spec.norm_eps, pdl=False)
        self._projected(normed, layer.qkv[spec.heads * spec.head_dim :], pool, start)
        launched.update((op, "triton") for op in ("add_rms_norm", "rope_write"))
        return launched + self._end(x, start)

    def _end(self, x: torch.Tensor, start: int) -> Launched:
        """Launch the last layer for the last token alone, out of the residual stream `x` of positions `start` on."""
        state = self._step.state
        state.x.copy_(x.index_select(0, (state.position - start).long()))
        newest = min(start + len(x), self._cache.capacity) - 1
        return self._step.end(self._decoder.spec.layers - 1, self._step.covering(newest))

    def _projected(self, normed: torch.Tensor, weight: torch.Tensor, pool: Pool, start: int) -> torch.Tensor:
        """The heads that `weight` projects to, `[tokens, heads, head_dim]`, rotated; keys and values are cached."""
        state = self._step.state
        heads = F.linear(normed, weight).view(len(normed), -1, self._decoder.spec.head_dim)
        rope_write(heads, state.cos, state.sin, state.table, *pool, page=self._cache.page, start=start)
        return heads

    def _mlp(self, normed: torch.Tensor, layer: LayerWeights) -> torch.Tensor:
        """The gated feed-forward of `normed` [tokens, hidden], which is overwritten with it."""
        for rows in torch.split(normed, self._mlp_rows):
            torch.mm(silu_mul_triton(F.linear(rows, layer.gate_up)), layer.down.t(), out=rows)
        return normed


def _attended(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Causal attention of queries `[tokens, heads, head_dim]` that are the last of keys and values `[kv_heads, keys,
    head_dim]`: `[tokens, heads * head_dim]`.
    """
    tokens, keys = q.shape[0], k.shape[1]
    q = q.transpose(0, 1)
    with sdpa_kernel(_BACKENDS, set_priority=True):
        out = F.scaled_dot_product_attention(
            q[None],
            k[None],
            v[None],
            attn_mask=_lower_right(q, keys) if keys > tokens else None,
            is_causal=keys == tokens,
            enable_gqa=True,
        )
    return out[0].transpose(0, 1).reshape(tokens, -1)


def _lower_right(q: torch.Tensor, keys: int) -> torch.Tensor:
    """The mask of queries that are the last of `keys` positions; flash, which fp32 has not, does without a matrix."""
    tokens = q.shape[1]
    if q.dtype != torch.float32:
        return causal_lower_right(tokens, keys)
    return torch.ones(tokens, keys, dtype=torch.bool, device=q.device).tril(keys - tokens)


def _mlp_rows(decoder: Decoder) -> int:
    """Tokens that the feed-forward takes at once, a power of two."""
    spec = decoder.spec
    fitting = _MLP_SHARE * spec.parameters / (3 * spec.intermediate)  # gate, up and their product; in elements
    return max(_MLP_ROWS, 1 << int(math.log2(max(fitting, 1))))
