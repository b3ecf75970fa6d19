"""Where each tensor of a checkpoint lies in the fused weights, and in which order.

Loading undoes what families store differently, so that a step need not know of it: packed projections come apart into
q, k and v, transposed matrices are turned, and the rows of each q and k head are put in an order in which element i is
rotated with element i + head_dim / 2, whichever pairs the family rotates and however many of them (q . k does not
depend on the order of both).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from skote.model.spec import DecoderSpec

if TYPE_CHECKING:
    from skote.model.weights import DecoderWeights, LayerWeights


@dataclass(frozen=True, slots=True)
class Place:
    """A tensor of the checkpoint of `shape`, whose rows lie in `view` in the order `rows`; None is as they are.

    `transposed`: the checkpoint has columns for rows.
    """

    view: torch.Tensor
    shape: tuple[int, ...]
    rows: torch.Tensor | None = None
    transposed: bool = False

    @property
    def as_it_is(self) -> bool:
        """Whether the view is the checkpoint's tensor, element for element."""
        return self.rows is None and not self.transposed

    def put(self, tensor: torch.Tensor) -> None:
        """Write the checkpoint's `tensor`, of any dtype and on any device."""
        values = tensor.t() if self.transposed else tensor
        if self.rows is not None:
            values = values.reshape(len(self.rows), -1)[self.rows.to(values.device)]
        self.view.copy_(values.reshape(self.view.shape))

    def get(self) -> torch.Tensor:
        """The checkpoint's tensor: a view where it lies there as it is, else a copy."""
        values = self.view
        if self.rows is not None:
            values = torch.empty_like(self.view).view(len(self.rows), -1)
            values[self.rows.to(values.device)] = self.view.reshape(values.shape)
        return (values.view(self.view.shape).t() if self.transposed else values).reshape(self.shape)


def module_places(spec: DecoderSpec, weights: DecoderWeights) -> dict[str, Place]:
    """The place of each tensor by its name in Transformers' module."""
    return dict(_places(spec, weights, by_expert=False))


def file_places(spec: DecoderSpec, weights: DecoderWeights) -> dict[str, Place]:
    """The place of each tensor of a checkpoint's files: as in the module, but that each expert has its own."""
    return dict(_places(spec, weights, by_expert=True))


def rotary_order(head_dim: int, rotary_dim: int, *, interleaved: bool) -> torch.Tensor:
    """Which of a head's elements in the checkpoint lies where: `[head_dim]`.

    The first elements of all rotated pairs come first, then half of what is not rotated; their partners after them.
    """
    rotated = torch.arange(rotary_dim)
    first, second = (rotated[0::2], rotated[1::2]) if interleaved else rotated.chunk(2)
    rest = torch.arange(rotary_dim, head_dim).chunk(2) if rotary_dim < head_dim else (rotated[:0], rotated[:0])
    return torch.cat((first, rest[0], second, rest[1]))


def _places(spec: DecoderSpec, weights: DecoderWeights, *, by_expert: bool) -> Iterator[tuple[str, Place]]:
    names = spec.names
    for part, name in (("embed", names.embed), ("positions", names.positions), ("norm", names.norm)):
        if (view := getattr(weights, part)) is not None:
            yield f"{name}.weight", _whole(view)
    if weights.norm_bias is not None:
        yield f"{names.norm}.bias", _whole(weights.norm_bias)
    if not spec.tied_embeddings:
        yield f"{names.lm_head}.weight", _whole(weights.lm_head)
    for index, layer in enumerate(weights.layers):
        prefix = names.layer.format(index)
        for name, place in (
            *_norms(spec, layer),
            *_attention(spec, layer),
            *(_experts(spec, layer, by_expert=by_expert) if spec.experts else _feed_forward(spec, layer)),
        ):
            yield prefix + name, place


def _norms(spec: DecoderSpec, layer: LayerWeights) -> Iterator[tuple[str, Place]]:
    for part in ("attn_norm", "attn_post_norm", "mlp_norm", "mlp_post_norm"):
        for field, suffix in ((part, "weight"), (f"{part}_bias", "bias")):
            if field in spec.layer_shapes():
                yield f"{getattr(spec.names, part)}.{suffix}", _whole(getattr(layer, field))


def _attention(spec: DecoderSpec, layer: LayerWeights) -> Iterator[tuple[str, Place]]:
    names, dim = spec.names, spec.head_dim
    head = rotary_order(dim, spec.rotary_dim or dim, interleaved=spec.rope_interleaved)
    for fused, suffix in ((layer.qkv, "weight"), (layer.qkv_bias, "bias")):
        if fused is None:
            continue
        rows = _qkv_rows(spec, head)
        sizes = [spec.heads * dim, spec.kv_heads * dim, spec.kv_heads * dim]
        if len(names.qkv) == 1:
            yield f"{names.qkv[0]}.{suffix}", _place(spec, fused, rows)
            continue
        start = 0
        for name, view, part in zip(names.qkv, torch.split(fused, sizes), torch.split(rows, sizes), strict=True):
            yield f"{name}.{suffix}", _place(spec, view, part - start)
            start += len(view)
    for name, norm in ((names.q_norm, layer.q_norm), (names.k_norm, layer.k_norm)):
        if norm is not None:
            yield from _head_norm(spec, name, norm, head)
    yield from _matrix(spec, names.o, layer.o, layer.o_bias)


def _head_norm(spec: DecoderSpec, name: str, norm: torch.Tensor, head: torch.Tensor) -> Iterator[tuple[str, Place]]:
    """Norms of q or k: one tensor, `[heads, head_dim]` where each head has its own, or one tensor for each."""
    heads = norm.view(-1, spec.head_dim)
    if "{}" in name:
        for index, view in enumerate(heads):
            yield f"{name.format(index)}.weight", _ordered(view, (spec.head_dim,), head)
        return
    rows = torch.cat([head + index * spec.head_dim for index in range(len(heads))])
    shape = tuple(heads.shape) if spec.qk_norm == "heads" else tuple(norm.shape)
    yield f"{name}.weight", _ordered(norm, shape, rows)


def _feed_forward(spec: DecoderSpec, layer: LayerWeights) -> Iterator[tuple[str, Place]]:
    names = spec.names.gate_up
    biases = [None] * len(names) if layer.gate_up_bias is None else layer.gate_up_bias.chunk(len(names))
    for name, view, bias in zip(names, layer.gate_up.chunk(len(names)), biases, strict=True):
        yield from _matrix(spec, name, view, bias)
    yield from _matrix(spec, spec.names.down, layer.down, layer.down_bias)


def _experts(spec: DecoderSpec, layer: LayerWeights, *, by_expert: bool) -> Iterator[tuple[str, Place]]:
    names = spec.names
    assert layer.router is not None
    yield f"{names.router}.weight", _whole(layer.router)
    if not by_expert:
        yield f"{names.experts}.gate_up_proj", _whole(layer.gate_up)
        yield f"{names.experts}.down_proj", _whole(layer.down)
        return
    for index, (gate_up, down) in enumerate(zip(layer.gate_up, layer.down, strict=True)):
        gate, up = gate_up.chunk(2)
        for name, view in zip(names.expert_files, (gate, up, down), strict=True):
            yield f"{name.format(index)}.weight", _whole(view)


def _matrix(spec: DecoderSpec, name: str, view: torch.Tensor, bias: torch.Tensor | None) -> Iterator[tuple[str, Place]]:
    yield f"{name}.weight", _place(spec, view)
    if bias is not None:
        yield f"{name}.bias", _place(spec, bias)


def _qkv_rows(spec: DecoderSpec, head: torch.Tensor) -> torch.Tensor:
    """Which row of a packed projection in the checkpoint each of our rows is."""
    heads, kv_heads, dim = spec.heads, spec.kv_heads, spec.head_dim
    rows = torch.arange(spec.qkv_rows)
    if spec.qkv_order == "parts":
        q, k, v = torch.split(rows.view(-1, dim), [heads, kv_heads, kv_heads])
    elif spec.qkv_order == "heads":
        q, k, v = rows.view(heads, 3, dim).unbind(1)
    else:
        grouped = rows.view(kv_heads, heads // kv_heads + 2, dim)
        q, k, v = grouped[:, :-2].reshape(heads, dim), grouped[:, -2], grouped[:, -1]
    return torch.cat((q[:, head].flatten(), k[:, head].flatten(), v.flatten()))


def _place(spec: DecoderSpec, view: torch.Tensor, rows: torch.Tensor | None = None) -> Place:
    turned = spec.transposed and view.ndim == 2
    shape = tuple(view.shape[::-1] if turned else view.shape)
    return _ordered(view, shape, rows, transposed=turned)


def _ordered(
    view: torch.Tensor, shape: tuple[int, ...], rows: torch.Tensor | None, *, transposed: bool = False
) -> Place:
    as_they_are = rows is None or rows.equal(torch.arange(len(rows)))
    return Place(view, shape, None if as_they_are else rows, transposed)


def _whole(view: torch.Tensor) -> Place:
    return Place(view, tuple(view.shape))
