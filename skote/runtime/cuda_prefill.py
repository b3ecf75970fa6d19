"""Prefill of one row on CUDA: matrix products by cuBLAS, attention by cuDNN or flash, the rest in fused kernels.

For the single-row set a prompt is one piece. Short prompts are bound by launches: they are padded to a bucket's length
and replay that bucket's graph. For the multi-row set a prompt is cut into chunks of a fixed length, the last of them
padded, so that what a position becomes depends on nothing that comes after it, the prompt's length included.

Padding changes nothing: a token sees none that come after it, and the cache's slots behind the prompt are overwritten
before they are read. Of the last layer only keys and values of all tokens are needed, and the output of the last token
alone; that token takes the decode step's own kernels.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

from skote.kernels.add_rms_norm_triton import add_rms_norm
from skote.kernels.rope_write_triton import rope_write
from skote.kernels.silu_mul_triton import silu_mul_triton
from skote.model.decoder import Decoder
from skote.model.weights import LayerWeights
from skote.runtime.cuda_graph import Choice, CudaStep, Launched
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
    """

    def __init__(
        self, decoder: Decoder, cache: PagedCache, step: CudaStep, *, buckets: Sequence[int], chunk: int | None = None
    ) -> None:
        self._decoder = decoder
        self._cache = cache
        self._step = step
        self._mlp_rows = _mlp_rows(decoder)
        self._chunk = chunk or cache.capacity
        captured = (chunk,) if chunk else tuple(bucket for bucket in buckets if bucket <= cache.capacity)
        self._ids = torch.zeros(max(captured, default=1), dtype=torch.int64, device=decoder.device)
        self._graphs = [(n, *step.captured(partial(self._run, self._ids[:n], 0, 0))) for n in captured]

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

    def _run(self, ids: torch.Tensor, start: int, row: int) -> Launched:
        """Launch everything for `ids` [tokens] from position `start` on; the step's position names the last in use."""
        spec, weights, state = self._decoder.spec, self._decoder.weights, self._step.state
        launched: Launched = Counter()
        x = weights.embed[ids].float()
        normed = torch.empty_like(x, dtype=weights.embed.dtype)
        delta: torch.Tensor | None = None
        *earlier, last = zip(weights.layers, self._cache.layers, strict=True)
        for layer, pool in earlier:
            add_rms_norm(x, delta, layer.attn_norm, normed, eps=spec.norm_eps)
            qkv = self._projected(normed, layer.qkv, pool, start)
            attended = self._attended(qkv, pool, start, row)
            del qkv
            add_rms_norm(x, F.linear(attended, layer.o), layer.mlp_norm, normed, eps=spec.norm_eps)
            del attended
            delta = self._mlp(normed, layer)
            launched.update((op, "triton") for op in ("add_rms_norm", "rope_write", "add_rms_norm", "silu_mul"))
        layer, pool = last
        add_rms_norm(x, delta, layer.attn_norm, normed, eps=spec.norm_eps)
        self._projected(normed, layer.qkv[spec.heads * spec.head_dim :], pool, start)
        state.x.copy_(x.index_select(0, (state.position - start).long()))
        launched.update((op, "triton") for op in ("add_rms_norm", "rope_write"))
        newest = min(start + len(ids), self._cache.capacity) - 1
        return launched + self._step.end(spec.layers - 1, self._step.covering(newest))

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

    def _attended(self, qkv: torch.Tensor, pool: Pool, start: int, row: int) -> torch.Tensor:
        """Causal attention of all heads' queries over everything up to them: `[tokens, heads * head_dim]`."""
        spec, tokens = self._decoder.spec, len(qkv)
        q, k, v = (each.transpose(0, 1) for each in torch.split(qkv, [spec.heads, spec.kv_heads, spec.kv_heads], dim=1))
        if start:
            k, v = (self._cache.of_row(each, row, start + tokens) for each in pool)
        with sdpa_kernel(_BACKENDS, set_priority=True):
            out = F.scaled_dot_product_attention(
                q[None],
                k[None],
                v[None],
                attn_mask=_lower_right(q, start + tokens) if start else None,
                is_causal=start == 0,
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
