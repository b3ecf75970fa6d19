"""A decoder with fewer switches that computes the same: what can be moved into norms and constants, is.

- A norm that multiplies by 1 + w multiplies by a weight that is 1 + w, in fp32 so that nothing is rounded.
- The logits' scale goes into the last norm, which the head follows without a bias.
- The residual stream's scale s goes into the norms of what is added to it, where there are such norms. Elsewhere the
  stream is carried divided by s: x = s x' turns x += s y into x' += y, and a norm of x with eps is one of x' with
  eps / s^2.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from skote.model.decoder import Decoder
from skote.model.spec import DecoderSpec
from skote.model.weights import DecoderWeights, LayerWeights

FOLDED = frozenset({"norm_plus_one", "residual_scale", "logits_scale"})
"""Switches that `folded` takes away."""
_NORMS = ("attn_norm", "mlp_norm", "q_norm", "k_norm", "attn_post_norm", "mlp_post_norm")


def foldable(spec: DecoderSpec) -> bool:
    """Whether all of `FOLDED` can go. Norms of q and k would get the eps that the stream's scale changes, and the bias
    of a LayerNorm would miss the logits' scale."""
    scaled_heads = spec.residual_scale != 1.0 and spec.qk_norm is not None and not spec.post_norms
    return not scaled_heads and not spec.layer_norm


def folded(decoder: Decoder) -> Decoder:
    """`decoder`, which is `foldable`, without the switches of `FOLDED`; it counts its paths where `decoder` does.

    Its embedding scale is one that nothing has to round, and its norms may be fp32 whatever the other weights are.
    """
    spec, weights = decoder.spec, decoder.weights
    scale = 1.0 if spec.post_norms else spec.residual_scale
    spec = replace(
        spec,
        norm_plus_one=False,
        residual_scale=1.0,
        logits_scale=1.0,
        norm_eps=spec.norm_eps / scale**2,
        embedding_scale=decoder.embedding_scale / scale,
    )
    if spec == decoder.spec:
        return decoder
    result = Decoder(spec, _folded_weights(decoder.spec, weights), decoder.positions)
    result.paths = decoder.paths
    return result


def _folded_weights(spec: DecoderSpec, weights: DecoderWeights) -> DecoderWeights:
    def factor(field: str) -> float:
        return spec.residual_scale if field.endswith("post_norm") else 1.0

    def layer(each: LayerWeights) -> LayerWeights:
        norms = {field: getattr(each, field) for field in _NORMS}
        return each._replace(
            **{name: _norm(spec, norm, factor(name)) for name, norm in norms.items() if norm is not None}
        )

    return replace(
        weights,
        layers=tuple(layer(each) for each in weights.layers),
        norm=_norm(spec, weights.norm, spec.logits_scale),
    )


def _norm(spec: DecoderSpec, weight: torch.Tensor, factor: float) -> torch.Tensor:
    if not spec.norm_plus_one and factor == 1.0:
        return weight
    wide = weight.float()
    return (wide + 1.0 if spec.norm_plus_one else wide) * factor
