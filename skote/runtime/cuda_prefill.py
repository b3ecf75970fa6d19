"""Prefill of one row on CUDA: matrix products by cuBLAS, attention by cuDNN or flash, the rest in fused kernels.

Short prompts are bound by launches: they are padded to a bucket's length and replay that bucket's graph. Longer ones
run as they are, with flash attention, or padded by at most an eighth to a length that was warmed up, with cuDNN's,
which is faster and makes a plan for every length that it meets. The shortest are bound by reading the weights, and may
take the multi-row kernels: seven launches a layer, of which all but the attention overlap. `packed_prefill` is a
batch's.

Padding changes nothing: a token sees none that come after it, and the cache's slots behind the prompt are overwritten
before they are read. Of the last layer only keys and values of all tokens are needed, and the output of the last token
alone; that token takes the decode step's own kernels.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count, takewhile

import torch
import torch.nn.functional as F

from skote.kernels.add_rms_norm_triton import add_rms_norm
from skote.kernels.launch import ROW_TILES
from skote.kernels.rope_write_triton import rope_write
from skote.kernels.tiles import batch_tiles
from skote.model.decoder import Decoder
from skote.runtime.cuda_graph import CudaStep
from skote.runtime.cuda_layers import CudaLayer
from skote.runtime.gemm_chain import GemmChain, head_norms, projection
from skote.runtime.paged_cache import PagedCache
from skote.runtime.prompt_ops import causal_attention, feed_forward, feed_forward_rows
from skote.runtime.token_choice import Choice, Launched

_PADDING = 1.125  # times a prompt's length that padding may make of it
BUCKETS = (32, 64, 128, 256, 512, 1024)
SHORT = 128  # tokens up to which the multi-row kernels are faster than cuBLAS, in half precision


class CudaPrefill:
    """Prompt ids -> the cache's first slots, the last token's logits, and the token after it.

    Args:
        step: its state is where the prefill ends.
        buckets: prompt lengths to capture, ascending; those beyond the cache's capacity are left out.
        short: buckets of up to this many tokens take the multi-row kernels, where these have as many rows.
    """

    def __init__(
        self,
        decoder: Decoder,
        cache: PagedCache,
        step: CudaStep,
        *,
        buckets: Sequence[int],
        short: int = 0,
    ) -> None:
        self._decoder = decoder
        self._cache = cache
        self._step = step
        self._most = feed_forward_rows(decoder)
        captured = tuple(bucket for bucket in buckets if bucket <= cache.capacity)
        self._ids = torch.zeros(max(captured, default=1), dtype=torch.int64, device=decoder.device)
        longest = captured[-1] if captured else 1
        doubled = takewhile(lambda n: n < cache.capacity, (longest << power for power in count(1)))
        self._warm = (*doubled, cache.capacity)
        self._planned = {*captured, *self._warm}
        self._runs = [self._run_of(n, short) for n in captured]  # kept: the graphs write to what they hold
        self._graphs = [(n, step.captured(run)) for n, run in zip(captured, self._runs, strict=True)]

    def __call__(self, input_ids: Sequence[int], choice: Choice = Choice.GREEDY) -> int:
        """Queue the prefill of `input_ids`, which must fit; the mark of the token after them.

        The step's row then stands at that token. One that is drawn, is drawn as its state says.
        """
        last = len(input_ids) - 1
        self._step.state.position.fill_(last)
        self._launch(torch.tensor(input_ids))
        return self._step.mark() if choice == Choice.GREEDY else self._step.choose_again(last, choice)

    def warm_up(self) -> None:
        """Run every length that attention has a plan for, and the longest one without, the longest prompt last: no
        later one has to allocate."""
        unplanned = range(self._cache.capacity - 1, max((n for n, _ in self._graphs), default=0), -1)
        longest = next((n for n in unplanned if self._padded(n) == n and n not in self._planned), None)
        for length in sorted((*self._warm, *(() if longest is None else (longest,)))):
            self([0] * length)

    def _launch(self, ids: torch.Tensor) -> None:
        length = len(ids)
        graph = next((captured for n, captured in self._graphs if length <= n), None)
        if graph is not None:
            self._ids[:length].copy_(ids)
            graph.replay()
            launched = graph.launched
        else:
            ids = F.pad(ids, (0, self._padded(length) - length))
            launched = self._run(ids.to(self._decoder.device))
        self._decoder.paths.update(launched)

    def _padded(self, length: int) -> int:
        """How long a prompt of `length` tokens runs that has no graph."""
        return next((n for n in self._warm if length <= n <= _PADDING * length), length)

    def _run_of(self, tokens: int, short: int) -> Callable[[], Launched]:
        """What launches the prefill of a bucket of `tokens`."""
        ids = self._ids[:tokens]
        spec, weights = self._decoder.spec, self._decoder.weights
        if tokens > short or tokens not in ROW_TILES or spec.experts is not None:
            return partial(self._run, ids)
        tiles = batch_tiles(spec.hidden, spec.intermediate, spec.head_dim, weights.embed.itemsize, tokens)
        chain = GemmChain(spec, weights, tokens, tiles=tiles, page=self._cache.page, pdl=True)
        positions = torch.arange(tokens, dtype=torch.int32, device=self._decoder.device)
        return partial(self._run_short, ids, positions, chain)

    def _run_short(self, ids: torch.Tensor, positions: torch.Tensor, chain: GemmChain) -> Launched:
        """As `_run` for `ids` at `positions` from 0 on, by the kernels of `chain`, whose rows are the tokens."""
        spec, state = self._decoder.spec, self._step.state
        launched: Launched = Counter()
        x = state.embedded(ids)
        *earlier, last = self._step.layers
        for layer in earlier:
            before = chain.qkv(x, layer.weights, layer.rope, positions, state.table, layer.pool)
            keys, values = (each[None, :, : len(ids)] for each in layer.pool)
            attended = causal_attention(
                chain.q[None],
                keys,
                values,
                planned=True,
                scale=spec.attention_scale,
                window=layer.window,
                softcap=spec.attention_softcap,
            )
            launched.update((op, "triton") for op in (*before, *chain.mlp(x, attended, layer.weights)))
        before = chain.qkv(x, last.weights, last.rope, positions, state.table, last.pool, queries=False)
        launched.update((op, "triton") for op in before)
        return launched + self._end(x)

    def _run(self, ids: torch.Tensor) -> Launched:
        """Launch everything for `ids` [tokens]; the step's position names the last in use."""
        spec, weights = self._decoder.spec, self._decoder.weights
        launched: Launched = Counter()
        x = self._step.state.embedded(ids)
        normed = torch.empty_like(x, dtype=weights.embed.dtype)
        delta: torch.Tensor | None = None
        post: torch.Tensor | None = None
        *earlier, final = self._step.layers
        for each in earlier:
            layer = each.weights
            add_rms_norm(x, delta, layer.attn_norm, normed, eps=spec.norm_eps, pdl=False, post=post)
            qkv = self._projected(normed, each, 0)
            q, k, v = torch.split(qkv, [spec.heads, spec.kv_heads, spec.kv_heads], dim=1)
            keys, values = k.transpose(0, 1)[None], v.transpose(0, 1)[None]
            planned = len(ids) in self._planned
            attended = causal_attention(
                q[None],
                keys,
                values,
                planned=planned,
                scale=spec.attention_scale,
                window=each.window,
                softcap=spec.attention_softcap,
            )
            del qkv, q, k, v, keys, values
            delta, post = F.linear(attended, layer.o), layer.attn_post_norm
            add_rms_norm(x, delta, layer.mlp_norm, normed, eps=spec.norm_eps, pdl=False, post=post)
            del attended, delta
            delta, post = feed_forward(normed, layer, self._most, spec), layer.mlp_post_norm
            between = "silu_mul" if spec.experts is None else "expert_gemm"
            launched.update((op, "triton") for op in ("add_rms_norm", "rope_write", "add_rms_norm", between))
        add_rms_norm(x, delta, final.weights.attn_norm, normed, eps=spec.norm_eps, pdl=False, post=post)
        self._projected(normed, final, spec.heads * spec.head_dim)
        launched.update((op, "triton") for op in ("add_rms_norm", "rope_write"))
        return launched + self._end(x)

    def _end(self, x: torch.Tensor) -> Launched:
        """Launch the last layer for the last token alone, out of the residual stream `x` of all positions."""
        state = self._step.state
        state.x.copy_(x.index_select(0, state.position.long()))
        newest = min(len(x), self._cache.capacity) - 1
        return self._step.end(self._decoder.spec.layers - 1, self._step.covering(newest))

    def _projected(self, normed: torch.Tensor, layer: CudaLayer, first: int) -> torch.Tensor:
        """Heads of `layer` from row `first` on, `[tokens, heads, head_dim]`, rotated; keys and values are cached."""
        spec, table, page = self._decoder.spec, self._step.state.table, self._cache.page
        heads = F.linear(normed, *projection(layer.weights, first)).view(len(normed), -1, spec.head_dim)
        norms = head_norms(layer.weights)
        rope_write(heads, *layer.rope, table, *layer.pool, page=page, norms=norms, eps=spec.norm_eps)
        return heads
