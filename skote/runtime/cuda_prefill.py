"""Prefill of one row on CUDA: matrix products by cuBLAS, attention by cuDNN or flash, the rest in fused kernels.

Short prompts are bound by launches: they are padded to a bucket's length on the right and replay that bucket's graph.
Padding changes nothing: a token sees none that come after it, and the cache's slots behind the prompt are overwritten
before they are read. Longer prompts run as they are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from skote.kernels.add_rms_norm_triton import add_rms_norm
from skote.kernels.rope_write_triton import rope_write
from skote.kernels.silu_mul_triton import silu_mul_triton
from skote.model.decoder import Decoder
from skote.runtime.cache import StaticCache
from skote.runtime.cuda_graph import CudaStep, captured

_BACKENDS = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]
BUCKETS = (32, 64, 128, 256, 512, 1024)


class CudaPrefill:
    """Prompt ids -> the cache's slots, the last token's logits, and the greedy token after it, through a `CudaStep`.

    Args:
        step: the decode step that goes on from there; it owns position, logits and the tokens.
        buckets: the lengths that are captured, ascending; those beyond the cache's capacity are left out.
    """

    def __init__(
        self, decoder: Decoder, cache: StaticCache, step: CudaStep, *, buckets: Sequence[int] = BUCKETS
    ) -> None:
        self._decoder = decoder
        self._cache = cache
        self._step = step
        within = [bucket for bucket in buckets if bucket <= cache.capacity]
        self._ids = torch.zeros(max(within, default=1), dtype=torch.int64, device=decoder.device)
        self._graphs: list[tuple[int, torch.cuda.CUDAGraph, Counter[tuple[str, str]]]] = []
        for bucket in within:
            step.position.zero_()  # the last token of the run before a capture
            self._graphs.append((bucket, *captured(self._run, self._ids[:bucket])))

    def __call__(self, input_ids: Sequence[int]) -> None:
        """Queue the prefill of `input_ids`, which must fit the cache; the step then stands at their length."""
        length = len(input_ids)
        self._step.position.fill_(length - 1)
        ids = torch.tensor(input_ids)
        graph = next((entry for entry in self._graphs if length <= entry[0]), None)
        if graph is None:
            launched = self._run(ids.to(self._decoder.device))
        else:
            self._ids[:length].copy_(ids)
            graph[1].replay()
            launched = graph[2]
        self._step.mark(length)
        self._decoder.paths.update(launched)

    def _run(self, ids: torch.Tensor) -> Counter[tuple[str, str]]:
        """Launch everything for `ids` [tokens], of which the step's position names the last; how often each op was."""
        spec, weights, step = self._decoder.spec, self._decoder.weights, self._step
        paths: Counter[tuple[str, str]] = Counter()
        eps, tokens = spec.norm_eps, ids.shape[0]
        x = weights.embed[ids].float()
        normed = torch.empty_like(x, dtype=weights.embed.dtype)
        delta: torch.Tensor | None = None
        for layer, (keys, values) in zip(weights.layers, self._cache.layers, strict=True):
            add_rms_norm(x, delta, layer.attn_norm, normed, eps=eps)
            qkv = F.linear(normed, layer.qkv).view(tokens, spec.heads + 2 * spec.kv_heads, spec.head_dim)
            rope_write(qkv, step.cos, step.sin, step.table, keys[0], values[0], page=step.tiles.attention.page)
            attended = _attention(*torch.split(qkv, [spec.heads, spec.kv_heads, spec.kv_heads], dim=1))
            add_rms_norm(x, F.linear(attended, layer.o), layer.mlp_norm, normed, eps=eps)
            delta = F.linear(silu_mul_triton(F.linear(normed, layer.gate_up)), layer.down)
            paths.update((op, "triton") for op in ("add_rms_norm", "rope_write", "add_rms_norm", "silu_mul"))
        last = step.position.long()
        assert delta is not None  # a model has at least one layer
        step.x.copy_((x.index_select(0, last) + delta.index_select(0, last).float())[0])
        step.finish(paths)
        return paths


def _attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Causal attention over `q` [tokens, heads, head_dim] and `k`, `v` [tokens, kv_heads, head_dim]: in rows."""
    q, k, v = (each.transpose(0, 1).unsqueeze(0) for each in (q, k, v))
    with sdpa_kernel(_BACKENDS, set_priority=True):
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return out[0].transpose(0, 1).reshape(out.shape[2], -1)
