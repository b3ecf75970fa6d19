"""Prefill of one row on CUDA: matrix products by cuBLAS, attention by cuDNN or flash, the rest in fused kernels.

For the single-row set a prompt is one piece. Short prompts are bound by launches: they are padded to a bucket's length
and replay that bucket's graph. Longer ones run as they are, with flash attention, or padded by at most an eighth to a
length that was warmed up, with cuDNN's, which is faster and makes a plan for every length that it meets. The shortest
are bound by reading the weights, and may take the multi-row kernels: seven launches a layer, of which all but the
attention overlap. For the multi-row set a prompt is cut into chunks of a fixed length, the last of them padded, so that
what a position becomes depends on nothing that comes after it, the prompt's length included.

Padding changes nothing: a token sees none that come after it, and the cache's slots behind the prompt are overwritten
before they are read. Of the last layer only keys and values of all tokens are needed, and the output of the last token
alone; that token takes the decode step's own kernels.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count, takewhile

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

_UNPLANNED = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
_PLANNED = [SDPBackend.CUDNN_ATTENTION, *_UNPLANNED]
_PADDING = 1.125  # times a prompt's length that padding may make of it
BUCKETS = (32, 64, 128, 256, 512, 1024)
CHUNK = 256
SHORT = 128  # tokens up to which the multi-row kernels are faster than cuBLAS, in half precision
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
        longest = captured[-1] if captured else 1
        doubled = takewhile(lambda n: n < cache.capacity, (longest << power for power in count(1)))
        self._warm = (cache.capacity,) if chunk else (*doubled, cache.capacity)
        self._planned = {*captured, *self._warm}
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
            self._launch(row, torch.tensor(chunk), start, last=start + len(chunk) == len(input_ids))
        return self._step.mark() if choice == Choice.GREEDY else self._step.choose_again(last, choice)

    def warm_up(self) -> None:
        """Run every length that attention has a plan for, and the longest one without, the longest prompt last: no
        later one has to allocate."""
        unplanned = range(self._cache.capacity - 1, max((n for n, *_ in self._graphs), default=0), -1)
        longest = next((n for n in unplanned if self._padded(n) == n and n not in self._planned), None)
        for length in sorted((*self._warm, *(() if longest is None else (longest,)))):
            self(0, [0] * length)

    def _launch(self, row: int, ids: torch.Tensor, start: int, *, last: bool) -> None:
        length = len(ids)
        graph = next((entry for entry in self._graphs if length <= entry[0]), None) if start == 0 else None
        if graph is not None:
            self._ids[:length].copy_(ids)
            graph[1].replay()
            launched = graph[2]
        else:
            ids = F.pad(ids, (0, self._padded(length) - length))
            launched = self._run(ids.to(self._decoder.device), start, row, last=last)
        self._decoder.paths.update(launched)

    def _padded(self, length: int) -> int:
        """How long a piece of `length` tokens runs that has no graph."""
        if self._chunk < self._cache.capacity:
            return self._chunk
        return next((n for n in self._warm if length <= n <= _PADDING * length), length)

    def _run_of(self, tokens: int, short: int) -> Callable[[], Launched]:
        """What launches the prefill of a bucket of `tokens`."""
        ids = self._ids[:tokens]
        if tokens > short or tokens not in ROW_TILES:
            return partial(self._run, ids, 0, 0, last=True)
        spec, weights = self._decoder.spec, self._decoder.weights
        tiles = batch_tiles(spec.hidden, spec.intermediate, spec.head_dim, weights.norm.itemsize, tokens)
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
            keys_and_values = (self._cache.of_row(each, 0, len(ids)) for each in pool)
            attended = _attended(chain.q, *keys_and_values, planned=True)
            launched.update((op, "triton") for op in (*before, *chain.mlp(x, attended, layer)))
        layer, pool = last
        weight = layer.qkv[spec.heads * spec.head_dim :]  # of keys and values
        before = chain.qkv(x, layer.attn_norm, weight, rope, positions, state.table, pool)
        launched.update((op, "triton") for op in before)
        return launched + self._end(x, 0)

    def _run(self, ids: torch.Tensor, start: int, row: int, *, last: bool) -> Launched:
        """Launch everything for `ids` [tokens] from position `start` on; the step's position names the last in use.

        `last`: the prompt ends there, and the token after it is wanted.
        """
        spec, weights = self._decoder.spec, self._decoder.weights
        launched: Launched = Counter()
        x = weights.embed[ids].float()
        normed = torch.empty_like(x, dtype=weights.embed.dtype)
        delta: torch.Tensor | None = None
        *earlier, final = zip(weights.layers, self._cache.layers, strict=True)
        for layer, pool in earlier:
            add_rms_norm(x, delta, layer.attn_norm, normed, eps=spec.norm_eps, pdl=False)
            qkv = self._projected(normed, layer.qkv, pool, start)
            q, k, v = torch.split(qkv, [spec.heads, spec.kv_heads, spec.kv_heads], dim=1)
            if start:
                k, v = (self._cache.of_row(each, row, start + len(ids)) for each in pool)
            else:
                k, v = k.transpose(0, 1), v.transpose(0, 1)
            attended = _attended(q, k, v, planned=start == 0 and len(ids) in self._planned)
            del qkv, q, k, v
            add_rms_norm(x, F.linear(attended, layer.o), layer.mlp_norm, normed, eps=spec.norm_eps, pdl=False)
            del attended
            delta = self._mlp(normed, layer)
            launched.update((op, "triton") for op in ("add_rms_norm", "rope_write", "add_rms_norm", "silu_mul"))
        layer, pool = final
        add_rms_norm(x, delta, layer.attn_norm, normed, eps=spec.norm_eps, pdl=False)
        self._projected(normed, layer.qkv[spec.heads * spec.head_dim :], pool, start)
        launched.update((op, "triton") for op in ("add_rms_norm", "rope_write"))
        return launched + self._end(x, start) if last else launched

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


def _attended(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, planned: bool) -> torch.Tensor:
    """Causal attention of queries `[tokens, heads, head_dim]` that are the last of keys and values `[kv_heads, keys,
    head_dim]`: `[tokens, heads * head_dim]`. `planned`: this length is one of those that cuDNN has met.
    """
    tokens, keys, shared = q.shape[0], k.shape[1], q.shape[1] // k.shape[0]
    if q.dtype == torch.float32 and shared > 1:
        # Neither cuDNN nor flash takes fp32, and what does without a matrix of scores wants a key head a query head.
        k, v, shared = k.repeat_interleave(shared, 0), v.repeat_interleave(shared, 0), 1
    with sdpa_kernel(_PLANNED if planned else _UNPLANNED, set_priority=True):
        out = F.scaled_dot_product_attention(
            q.transpose(0, 1)[None],
            k[None],
            v[None],
            attn_mask=causal_lower_right(tokens, keys) if keys > tokens else None,
            is_causal=keys == tokens,
            enable_gqa=shared > 1,
        )
    return out[0].transpose(0, 1).reshape(tokens, -1)


def _mlp_rows(decoder: Decoder) -> int:
    """Tokens that the feed-forward takes at once, a power of two."""
    spec = decoder.spec
    fitting = _MLP_SHARE * spec.parameters / (3 * spec.intermediate)  # gate, up and their product; in elements
    return max(_MLP_ROWS, 1 << int(math.log2(max(fitting, 1))))
