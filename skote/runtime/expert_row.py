"""The feed-forward of a mixture of experts for one row: the single-row kernels, and what they leave to each other."""

from __future__ import annotations

import torch
import triton

from skote.kernels.expert_gemv_triton import expert_down_gemv, expert_up_gemv, up_tile
from skote.kernels.head_gemv_triton import head_gemv
from skote.kernels.tiles import StepTiles
from skote.model.spec import DecoderSpec
from skote.model.weights import DecoderWeights, LayerWeights


class ExpertRow:
    """The router's logits are computed as a head's, whose first stage of the maximum nobody needs here."""

    def __init__(self, spec: DecoderSpec, weights: DecoderWeights, tiles: StepTiles, *, pdl: bool) -> None:
        assert spec.experts is not None
        self._eps, self._activation, self._pdl = spec.norm_eps, spec.activation, pdl
        self._normalised = spec.experts.normalised
        self._router, self._up = tiles.head, up_tile(tiles.gate_up, weights.embed.dtype)
        dtype, device = weights.embed.dtype, weights.embed.device
        count, chosen = spec.experts.count, spec.experts.chosen
        programs = triton.cdiv(count, self._router.rows)
        self._logits = torch.zeros(count, device=device)
        self._best = torch.zeros(programs, device=device)
        self._first = torch.zeros(programs, dtype=torch.int32, device=device)
        self._h = torch.zeros(chosen, spec.intermediate, dtype=dtype, device=device)
        self._chosen = torch.zeros(chosen, dtype=torch.int32, device=device)
        self._share = torch.zeros(chosen, device=device)

    def __call__(self, x: torch.Tensor, weights: LayerWeights) -> tuple[str, ...]:
        """Add the chosen experts' feed-forward to `x` [hidden]; the names of the ops that it launched."""
        assert weights.router is not None
        head_gemv(
            x,
            weights.mlp_norm,
            weights.router,
            self._logits,
            self._best,
            self._first,
            eps=self._eps,
            tile=self._router,
            pdl=self._pdl,
        )
        expert_up_gemv(
            x,
            weights.mlp_norm,
            weights.gate_up,
            self._logits,
            self._h,
            self._chosen,
            self._share,
            eps=self._eps,
            normalised=self._normalised,
            tile=self._up,
            pdl=self._pdl,
            activation=self._activation,
        )
        expert_down_gemv(x, self._h, weights.down, self._chosen, self._share, pdl=self._pdl)
        return "head_gemv", "expert_up_gemv", "expert_down_gemv"
