"""What tier 1 has to show before it serves: the logits of Transformers' own module, over the same weights.

An adapter may read a config.json in another way than Transformers, and a checkpoint be of a kind that nobody has tried.
A model is never computed wrongly: where the two differ, the first layer that does is named, and another tier runs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from skote.model.checkpoint import added_rows
from skote.model.decoder import Decoder
from skote.runtime.cache import StaticCache
from skote.runtime.module_check import apart, check_ids
from skote.types import Request

TOLERANCE = {torch.float32: 1e-3, torch.float16: 3e-2, torch.bfloat16: 1e-1}
"""Of the norm of a row of logits. In half precision the eager module rounds after every operation, and we do not: it is
its distance from exact logits that these leave room for."""
TF32 = 3e-2


@dataclass(frozen=True, slots=True)
class Verdict:
    """How far the logits lie apart, as a share of their norm, what was allowed, and how long it took to find out.

    `difference` says what differs, and is None where nothing does.
    """

    distance: float
    allowed: float
    seconds: float
    difference: str | None


class SelfCheck:
    """Logits of Transformers' eager module over a decoder's weights, for a short prompt and tokens after it, always the
    same; made before the closure that is held against them, so that its captures have the device to themselves.

    Raises:
        CheckpointError: Transformers does not know the model.
    """

    @torch.no_grad()
    def __init__(self, decoder: Decoder, local_dir: Path, layers: int | None) -> None:
        from skote.model.causal_lm import module_over

        started = time.monotonic()
        self._decoder = decoder
        spec, device = decoder.spec, decoder.device
        self._vocab = spec.vocab - spec.added_tokens
        own = ((name, tensor[: len(tensor) - added_rows(spec, name)]) for name, tensor in decoder.weights.named(spec))
        module = module_over(local_dir, own, device=device, layers=layers)
        self._prompt, self._forced = check_ids(self._vocab, decoder.positions)
        self._ids = torch.tensor([[*self._prompt, *self._forced[:-1]]], device=device)
        self._streams: list[torch.Tensor] = []
        # Compared on the host: nothing is to be allocated on a device whose closure counts what is.
        self._expected = _watched(module, decoder, self._ids, self._streams)[len(self._prompt) - 1 :].cpu()
        self._seconds = time.monotonic() - started

    @torch.no_grad()
    def __call__(self, score: Callable[[Request, Sequence[int]], torch.Tensor]) -> Verdict:
        """Hold a closure's `score` against them: prefill, then a step for each token."""
        started = time.monotonic()
        paths = self._decoder.paths.copy()
        found = score(Request("self-check", tuple(self._prompt), len(self._forced)), self._forced)
        distance = apart(found.cpu()[:, : self._vocab], self._expected)
        dtype = self._decoder.weights.norm.dtype
        exact = dtype != torch.float32 or torch.get_float32_matmul_precision() == "highest"
        allowed = TOLERANCE[dtype] if exact else TF32
        difference = None
        if not distance <= allowed:  # what is not a number is not a small distance either
            difference = (
                f"its logits came out {distance:.1e} of their norm away from those of Transformers, {allowed:.0e} is "
                f"allowed; {self._first_difference(allowed)}"
            )
        self._decoder.paths.clear()
        self._decoder.paths.update(paths)
        return Verdict(distance, allowed, self._seconds + time.monotonic() - started, difference)

    def _first_difference(self, allowed: float) -> str:
        """Where the lean decoder, on framework ops, first leaves the module's residual stream."""
        decoder, tokens = self._decoder, self._ids.shape[1]
        cache = StaticCache(decoder.spec, 1, tokens, dtype=decoder.weights.norm.dtype, device=decoder.device)
        no_padding = torch.zeros(1, tokens, device=decoder.device)
        positions = torch.arange(tokens, device=decoder.device)[None]
        own = decoder.streams(self._ids, cache.layers, no_padding, positions)
        for index, (ours, theirs) in enumerate(zip(own, self._streams, strict=True)):
            if not apart(ours[0], theirs.view_as(ours)[0].float()) <= allowed:
                return "the embeddings differ" if index == 0 else f"layer {index - 1} is the first that differs"
        return "on framework ops no layer differs, so that the head or a kernel does"


def _watched(module: Any, decoder: Decoder, ids: torch.Tensor, streams: list[torch.Tensor]) -> torch.Tensor:  # noqa: ANN401
    """The module's logits `[tokens, vocab]`; its residual stream before the first layer and after each in `streams`."""

    def before(_: torch.nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        streams.append(args[0] if args else named["hidden_states"])

    def after(_: torch.nn.Module, args: tuple[Any, ...], output: Any) -> None:  # noqa: ANN401
        del args
        streams.append(output if isinstance(output, torch.Tensor) else output[0])

    name, count = decoder.spec.names.layer, decoder.spec.layers
    parts = [module.get_submodule(name.format(index).removesuffix(".")) for index in range(count)]
    parts[0].register_forward_pre_hook(before, with_kwargs=True)
    for part in parts:
        part.register_forward_hook(after)
    logits: torch.Tensor = module(ids, use_cache=False).logits[0]
    return logits.float()
