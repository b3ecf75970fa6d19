"""The decode closure of one request on CUDA: captured prefill, captured steps, tokens read one step behind."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import torch

from skote.kernels.flash_decode_triton import MIN_HEAD_DIM
from skote.kernels.launch import MAX_COLUMNS
from skote.model.decoder import Decoder
from skote.model.spec import DecoderSpec
from skote.runtime.cache import StaticCache
from skote.runtime.cuda_graph import CudaStep
from skote.runtime.cuda_prefill import CudaPrefill
from skote.runtime.sampling import next_token, request_generator
from skote.types import Request


class CudaClosure:
    """Prompt ids -> token ids, for a cache of one row. `capture_s` is what compiling and capturing took."""

    def __init__(self, decoder: Decoder, cache: StaticCache) -> None:
        self._device = decoder.device
        started = time.monotonic()
        with torch.cuda.device(self._device):
            self._step = CudaStep(decoder, cache)
            self._prefill = CudaPrefill(decoder, cache, self._step)
            torch.cuda.synchronize()
        self.capture_s = time.monotonic() - started

    @staticmethod
    def refusal(spec: DecoderSpec) -> str | None:
        """Why the kernels cannot run this model, or None."""
        if spec.head_dim & (spec.head_dim - 1) or spec.head_dim < MIN_HEAD_DIM:
            return f"head_dim {spec.head_dim} is not a power of two of at least {MIN_HEAD_DIM}"
        longest = max(spec.hidden, spec.intermediate, spec.heads * spec.head_dim)
        return f"rows of {longest} weights are longer than {MAX_COLUMNS}" if longest > MAX_COLUMNS else None

    def tokens(self, request: Request) -> Iterator[int]:
        """The request's `max_new_tokens` tokens as the host comes to hold them; whoever reads them may stop before.

        Greedy tokens are fed back on the device: while one is read, the step after it already runs. A sampled token is
        drawn by the host's generator and fed from there.
        """
        step, sampling = self._step, request.sampling
        start = len(request.input_ids)
        last = start + request.max_new_tokens - 1
        generator = request_generator(sampling, self._device)
        with torch.cuda.device(self._device):
            self._prefill(request.input_ids)
        for position in range(start, last + 1):
            if sampling.greedy:
                if position < last:
                    self._launch(position)
                yield step.token(position)
                continue
            token = next_token(step.logits, sampling, generator)
            yield token
            if position < last:
                step.feed(token, position)
                self._launch(position)

    def score(self, request: Request, forced_ids: Sequence[int]) -> torch.Tensor:
        """Logits `[len(forced_ids), vocab]`, fp32, as `Engine.score` wants: each token through prefill and step."""
        with torch.cuda.device(self._device):
            self._prefill(request.input_ids)
        rows = [self._step.logits.clone()]
        for position, token in enumerate(forced_ids[:-1], len(request.input_ids)):
            self._step.feed(token, position)
            self._launch(position)
            rows.append(self._step.logits.clone())
        return torch.stack(rows)

    def _launch(self, position: int) -> None:
        with torch.cuda.device(self._device):
            self._step.launch(position)
