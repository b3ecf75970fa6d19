"""Prefill for a batch on CUDA: pieces of several prompts, a page each, in products of one fixed shape.

Whatever shares a pack, and wherever a piece of a prompt lies in it, each product has the same shape, attention is a
piece's own, and padding is a page that nobody reads: what a position becomes depends on nothing but the tokens up to
the end of its page. (The last token of a prompt takes the decode step's kernels in the last layer.)

A pack of first pieces is one captured graph: their attention is a batch of equal lengths. Where a piece goes on, the
pack runs uncaptured, and its attention is over a copy of the keys and values of its prompt so far. Of the last layer
only keys and values of all tokens are needed; the last tokens alone go on to the logits, as rows of a step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial

import torch
import torch.nn.functional as F

from skote.kernels.add_rms_norm_triton import add_rms_norm
from skote.kernels.rope_write_triton import rope_write
from skote.model.decoder import Decoder
from skote.runtime.batch_step import BatchStep
from skote.runtime.cuda_layers import CudaLayer
from skote.runtime.gemm_chain import head_norms, projection
from skote.runtime.paged_cache import PagedCache
from skote.runtime.prompt_ops import causal_attention, feed_forward, feed_forward_rows
from skote.runtime.scheduler import Piece, Seat, sizes_for
from skote.runtime.step_state import pinned
from skote.runtime.token_choice import Choice, Launched
from skote.types import Request

PIECES = 4
"""Of a pack, at most: with 128 positions a page, products of 512 rows."""


class PackedPrefill:
    """Pieces of prompts -> the cache's pages; of those that end, logits and the token after them.

    Args:
        ends: the step whose row i is where piece i ends; its only size has a row for each piece.
        pieces: of a pack, always: those that are not there are padding.
        spare: a page that no request holds, for the padding's keys and values.
    """

    def __init__(self, decoder: Decoder, cache: PagedCache, ends: BatchStep, *, pieces: int, spare: int) -> None:
        self.ends = ends
        self._decoder = decoder
        self._cache = cache
        self._pieces = pieces
        self._spare = spare
        self._size = end_rows(pieces)
        self._most = feed_forward_rows(decoder)
        device, tokens = decoder.device, pieces * cache.page
        self._ids = torch.zeros(tokens, dtype=torch.int64, device=device)
        self._places = torch.zeros(tokens, dtype=torch.int64, device=device)  # positions in their prompts
        self._pages = torch.full((pieces,), spare, dtype=torch.int32, device=device)
        self._last = torch.zeros(self._size, dtype=torch.int64, device=device)  # where in the pack a prompt ends
        self._x = torch.zeros(tokens, decoder.spec.hidden, device=device)
        self._first_pieces = ends.captured(lambda: self._run(()))
        self._end = ends.captured(self._run_end)

    def __call__(self, pieces: Sequence[Piece]) -> int:
        """Queue a pack of at most as many pieces as were said; the mark that the step's `tokens` takes, by piece."""
        self._load(pieces)
        going_on = [(index, piece) for index, piece in enumerate(pieces) if piece.start]
        if going_on:
            size = self._cache.page
            pages = [
                (index, pinned(seat.pages[: start // size + 1], self._ids).to(self._ids.device, non_blocking=True))
                for index, (seat, start, _) in going_on
            ]
            self._decoder.paths.update(self._run(pages))
        else:
            self._first_pieces.replay()
            self._decoder.paths.update(self._first_pieces.launched)
        choices = [Choice.of(seat.request.sampling) for seat, *_ in (piece for piece in pieces if piece.ends)]
        if not choices:
            return self.ends.send()
        self._end.replay()
        self._decoder.paths.update(self._end.launched)
        return self.ends.launch_choice(self._size, max(choices))

    def warm_up(self) -> None:
        """Run the end of the longest prompt: nothing later has to allocate or compile."""
        cache = self._cache
        request = Request("warm-up", (0,) * cache.capacity, 1)
        seat = Seat(0, request, tuple(range(cache.pages_per_row)))
        starts = range(0, cache.capacity, cache.page)[-self._pieces :]
        self([Piece(seat, start, min(start + cache.page, cache.capacity)) for start in starts])

    def _load(self, pieces: Sequence[Piece]) -> None:
        """Set what the graphs read, without waiting for the device."""
        page, width = self._cache.page, self._cache.pages_per_row
        ids, places = [0] * len(self._ids), [0] * len(self._ids)
        pages = [self._spare] * self._pieces
        last, positions = [0] * self._size, [-1] * self._size
        table = [[0] * width for _ in range(self._size)]
        for index, piece in enumerate(pieces):
            seat, start, stop = piece
            base = index * page
            ids[base : base + stop - start] = seat.request.input_ids[start:stop]
            places[base : base + page] = range(start, start + page)
            pages[index] = seat.pages[start // page]
            if piece.ends:
                last[index], positions[index] = base + stop - start - 1, stop - 1
                table[index][: len(seat.pages)] = seat.pages
        state = self.ends.state
        for target, values in (
            (self._ids, ids),
            (self._places, places),
            (self._pages, pages),
            (self._last, last),
            (state.position[: self._size], positions),
            (state.table[: self._size], table),
        ):
            target.copy_(pinned(values, target), non_blocking=True)
        state.choose_by([piece.seat.request.sampling for piece in pieces])

    def _run(self, going_on: Sequence[tuple[int, torch.Tensor]]) -> Launched:
        """Launch all layers but the last one's end; `going_on`: the pages of each piece that is not a first one."""
        decoder, state, x = self._decoder, self.ends.state, self._x
        spec, weights = decoder.spec, decoder.weights
        launched: Launched = Counter()
        x.copy_(state.embedded(self._ids))
        normed = torch.empty_like(x, dtype=weights.embed.dtype)
        delta: torch.Tensor | None = None
        post: torch.Tensor | None = None
        tables = {id(cos): (cos[self._places], sin[self._places]) for cos, sin in state.ropes}
        *earlier, final = self.ends.layers
        for each in earlier:
            layer, rope = each.weights, tables[id(each.rope[0])]
            add_rms_norm(x, delta, layer.attn_norm, normed, eps=spec.norm_eps, pdl=False, post=post)
            qkv = self._projected(normed, each, 0, rope)
            attended = self._attended(qkv, each, going_on)
            delta, post = F.linear(attended, layer.o), layer.attn_post_norm
            add_rms_norm(x, delta, layer.mlp_norm, normed, eps=spec.norm_eps, pdl=False, post=post)
            delta, post = feed_forward(normed, layer, self._most, spec), layer.mlp_post_norm
            between = "silu_mul" if spec.experts is None else "expert_gemm"
            launched.update((op, "triton") for op in ("add_rms_norm", "rope_write", "add_rms_norm", between))
        add_rms_norm(x, delta, final.weights.attn_norm, normed, eps=spec.norm_eps, pdl=False, post=post)
        self._projected(normed, final, spec.heads * spec.head_dim, tables[id(final.rope[0])])
        launched.update((op, "triton") for op in ("add_rms_norm", "rope_write"))
        return launched

    def _run_end(self) -> Launched:
        """Launch the last layer and the head for the last tokens alone."""
        self.ends.state.x[: self._size].copy_(self._x.index_select(0, self._last))
        return self.ends.run_layers(self._size, self._cache.capacity, self._decoder.spec.layers - 1)

    def _projected(
        self,
        normed: torch.Tensor,
        layer: CudaLayer,
        first: int,
        rope: tuple[torch.Tensor, torch.Tensor],
    ) -> torch.Tensor:
        """The heads of `layer` from row `first` on, `[tokens, heads, head_dim]`, rotated; keys and values are cached.

        To the kernel the pack is one prompt, in the pack's pages, whose positions have the angles of their own prompts.
        """
        weights, spec = layer.weights, self._decoder.spec
        heads = F.linear(normed, *projection(weights, first)).view(len(normed), -1, spec.head_dim)
        norms, eps = head_norms(weights), spec.norm_eps
        rope_write(heads, *rope, self._pages, *layer.pool, page=self._cache.page, norms=norms, eps=eps)
        return heads

    def _attended(
        self, qkv: torch.Tensor, layer: CudaLayer, going_on: Sequence[tuple[int, torch.Tensor]]
    ) -> torch.Tensor:
        """Each piece's attention, `[tokens, heads * head_dim]`."""
        spec, page = self._decoder.spec, self._cache.page
        by_piece = qkv.view(self._pieces, page, -1, spec.head_dim)
        q, k, v = torch.split(by_piece, [spec.heads, spec.kv_heads, spec.kv_heads], dim=2)
        attend = partial(
            causal_attention, scale=spec.attention_scale, window=layer.window, softcap=spec.attention_softcap
        )
        attended = attend(q, k.transpose(1, 2), v.transpose(1, 2), planned=True)
        for index, pages in going_on:
            keys, values = (self._cache.gathered(each, pages)[None] for each in layer.pool)
            piece = attend(q[index : index + 1], keys, values, planned=False)
            attended[index * page : (index + 1) * page] = piece
        return attended


def end_rows(pieces: int) -> int:
    """The size of the step that a pack of `pieces` pieces ends in."""
    return sizes_for(pieces)[-1]
