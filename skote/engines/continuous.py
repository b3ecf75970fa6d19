"""Transformers' continuous batching: its paged cache, its scheduler, its generation loop in a thread of its own."""

from __future__ import annotations

import asyncio
import itertools
import threading
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import ContinuousBatchingConfig, GenerationConfig

from skote.engines.streaming import Answered, EmitRow, StreamingEngine
from skote.flags import TORCH_DTYPES, flags_record
from skote.model.causal_lm import add_token, load_module
from skote.model.fingerprint import fingerprint
from skote.types import EngineError, Request, RequestError, UsageError

_PAGE = 256  # Transformers' own size of a page, which has another name in each of its versions
_LONGEST = 8192  # positions of a request where the run does not say


class ContinuousEngine(StreamingEngine):
    """`init_continuous_batching` behind the `Engine` protocol; the arguments are those of `SkotergyEngine`.

    Its cache has pages for `max_requests` requests of `max_model_len` positions, and shares none between prompts.
    Greedy requests alone: it draws for all requests with one temperature and one seed.

    Raises:
        UsageError: no row.
        CheckpointError: Transformers cannot load the directory, or would fill a tensor that it lacks with chance.
    """

    @torch.no_grad()
    def __init__(
        self,
        *,
        local_dir: str,
        device: str,
        dtype: str,
        threads: int | None = None,
        random_seed: int | None = None,
        layers: int | None = None,
        pad_id: int | None = None,
        max_model_len: int | None = None,
        max_requests: int = 16,
        attention: str | None = None,
    ) -> None:
        del threads  # the process's flags see to it
        if max_requests < 2:
            raise UsageError(
                f"engine.max_requests must be at least 2 for a batch that requests join, got {max_requests}."
            )
        super().__init__()
        torch_dtype: torch.dtype = getattr(torch, TORCH_DTYPES[dtype])
        self._model = load_module(
            Path(local_dir),
            dtype=torch_dtype,
            device=torch.device(device),
            random_seed=random_seed,
            layers=layers,
            attention=attention,
        )
        resized = pad_id is not None and add_token(self._model, pad_id)
        self._notes = ["The embeddings were extended by a row for the padding token."] if resized else []
        self._fingerprint = fingerprint(self._model.named_parameters())
        eos = self._model.generation_config.eos_token_id
        self._eos_ids = [] if eos is None else eos if isinstance(eos, list) else [eos]
        self._max_requests = max_requests
        self._names = itertools.count()
        pages = -(-(max_model_len or _LONGEST) // _PAGE) + 1
        settings = GenerationConfig(do_sample=False, eos_token_id=-1)  # type: ignore[no-untyped-call]
        self._manager = self._model.init_continuous_batching(
            generation_config=settings,
            continuous_batching_config=ContinuousBatchingConfig(
                num_blocks=max_requests * pages, allow_block_sharing=False
            ),
        )
        self._manager.warmup()
        self._manager.start()
        # Its thread is no daemon: without this the process would wait for it at its end, and it for requests.
        threading.Thread(target=_stop_at_exit, args=(self._manager,), name="continuous-stop").start()

    @property
    def rows(self) -> int:
        """How many requests its batch is made for."""
        return self._max_requests

    async def answer_one(self, request: Request, emit: EmitRow) -> Answered:
        """As `StreamingEngine.answer_one`.

        Raises:
            RequestError: it is to be sampled.
            EngineError: the generation loop failed on it, or has ended.
        """
        if not request.sampling.greedy:
            raise RequestError("transformers_continuous is greedy alone: set workload.temperature=0.")
        name = f"r{next(self._names)}"
        heard: asyncio.Queue[Any] = asyncio.Queue()
        self._manager.register_result_handler(name, heard.put_nowait)
        eos_ids = [] if request.ignore_eos else self._eos_ids
        if (
            self._manager.add_request(
                list(request.input_ids),
                request_id=name,
                max_new_tokens=request.max_new_tokens,
                streaming=True,
                eos_token_id=eos_ids or -1,
            )
            is None
        ):
            raise EngineError("Transformers' generation loop has ended, and takes no further request.")
        sent = 0
        try:
            while True:
                output = await heard.get()
                if output.error is not None:
                    raise EngineError(f"Transformers failed on the request: {str(output.error).rstrip('.')}.")
                new = output.generated_tokens[sent:]
                if new:
                    emit(new)
                sent += len(new)
                if output.is_finished():
                    return Answered("stop" if output.generated_tokens[-1] in eos_ids else "length")
        except asyncio.CancelledError:
            self._manager.cancel_request(name)
            raise

    @torch.no_grad()
    def describe(self) -> dict[str, Any]:
        """As `Engine.describe`."""
        pages = self._manager.continuous_batching_config.num_blocks
        return {
            "tier": None,
            "tier_reason": f"continuous batching of Transformers {transformers.__version__}, "
            f"{self._model.config._attn_implementation} attention, {pages} pages of {_PAGE} positions",
            "weights_fingerprint": self._fingerprint,
            "parameters": sum(tensor.numel() for tensor in self._model.parameters()),
            "compile_s": None,
            "notes": self._notes,
            "paths": {},
            "flags": flags_record(),
            "scores": False,
        }


def _stop_at_exit(manager: Any) -> None:  # noqa: ANN401 (Transformers' own)
    threading.main_thread().join()
    manager.stop(block=True, hard_stop=True)
