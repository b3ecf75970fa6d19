"""The baseline: Transformers' own `generate`, as a user would call it (sdpa attention, dynamic cache)."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from transformers.generation.logits_process import LogitsProcessor, LogitsProcessorList
from transformers.generation.streamers import BaseStreamer

from skote.flags import TORCH_DTYPES, flags_record
from skote.model.causal_lm import add_token, load_module
from skote.model.fingerprint import fingerprint
from skote.model.split import TransferCounter, split_module
from skote.types import Emit, EngineError, FinishReason, Request, UsageError, device_parts

CACHES = ("dynamic", "static")


class TransformersEngine:
    """`AutoModelForCausalLM.generate` behind the `Engine` protocol; the arguments are those of `SkotergyEngine`.

    With `cache="static"` Transformers allocates the cache in advance and, on an accelerator, compiles the step by
    itself: the strongest form that it offers. With `split` the device is several, "cuda:0+cuda:1", and each holds a run
    of the layers, as with `device_map="auto"`.

    Raises:
        UsageError: an unknown cache, or one that does not go with `split`.
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
        attention: str | None = None,
        cache: str = "dynamic",
        score_at_once: bool = False,
        split: bool = False,
    ) -> None:
        del threads, max_model_len  # the process's flags and the dynamic cache see to both
        if cache not in CACHES:
            raise UsageError(f"engine.cache={cache} is not known; choose one of {', '.join(CACHES)}.")
        if split and cache != "dynamic":
            raise UsageError(f"engine.split goes with engine.cache=dynamic, got {cache}.")
        self._cache = cache
        self._score_at_once = score_at_once
        self._devices = [torch.device(part) for part in device_parts(device)]
        self._device = self._devices[0]
        torch_dtype: torch.dtype = getattr(torch, TORCH_DTYPES[dtype])
        started = time.monotonic()
        self._model = load_module(
            Path(local_dir),
            dtype=torch_dtype,
            device=self._device,
            random_seed=random_seed,
            layers=layers,
            attention=attention,
        )
        resized = pad_id is not None and add_token(self._model, pad_id)
        self._eos_ids = self._model.generation_config.eos_token_id
        self._pad_id = pad_id if pad_id is not None else 0
        if split:
            split_module(self._model, self._devices)
        self._load_s = time.monotonic() - started
        self._fingerprint = fingerprint(self._model.named_parameters())
        self._notes = ["The embeddings were extended by a row for the padding token."] if resized else []
        self._transfers = self._count_transfers() if split else None

    @torch.no_grad()
    def generate(self, requests: Sequence[Request], emit: Emit) -> list[FinishReason]:
        """As `Engine.generate`; several requests are left-padded with an explicit mask."""
        streamer = _Streamer(requests, self._eos_set(), emit)
        self._run(requests, max(request.max_new_tokens for request in requests), streamer=streamer)
        return streamer.reasons()

    @torch.no_grad()
    def score(self, request: Request, forced_ids: Sequence[int]) -> NDArray[np.float32]:
        """As `Engine.score`, through `generate` with a processor that leaves no choice, or in one forward pass."""
        if self._score_at_once:
            ids = torch.tensor([(*request.input_ids, *forced_ids[:-1])], device=self._device)
            logits: torch.Tensor = self._model(ids, use_cache=False, logits_to_keep=len(forced_ids)).logits
            return logits[0].float().cpu().numpy()
        processors = LogitsProcessorList([_Forced(len(request.input_ids), forced_ids)])
        output = self._run(
            [request],
            len(forced_ids),
            logits_processor=processors,
            output_logits=True,
            return_dict_in_generate=True,
        )
        return torch.cat(output.logits).float().cpu().numpy()

    @torch.no_grad()
    def describe(self) -> dict[str, Any]:
        """As `Engine.describe`."""
        model = self._model
        return {
            "tier": None,
            "tier_reason": f"{type(model).__name__}.generate of Transformers {transformers.__version__}, "
            f"{model.config._attn_implementation} attention, {self._cache} cache",
            "weights_fingerprint": self._fingerprint,
            "parameters": sum(tensor.numel() for tensor in model.parameters()),
            "load_s": self._load_s,
            "compile_s": None,
            "notes": self._notes,
            "paths": {},
            "flags": flags_record(),
            **({} if self._transfers is None else {"device_transfers": self._transfers}),
        }

    def _count_transfers(self) -> dict[str, Any]:
        """What a decode step of one request moves between the devices: what a third token adds to a second."""
        counters = []
        for tokens in (2, 3):
            with TransferCounter(self._devices) as counter:
                self.generate([Request("transfers", (0,) * 8, tokens, ignore_eos=True)], lambda *_: None)
            counters.append(counter)
        two, three = counters
        tensors, moved = three.tensors - two.tensors, three.bytes - two.bytes
        self._notes.append(
            f"{self._layout()}; a token of one request moves {tensors} tensors, {moved} bytes, between them."
        )
        return {"tensors_per_token": tensors, "bytes_per_token": moved}

    def _layout(self) -> str:
        """Which modules lie where: "cuda:0 holds model.embed_tokens to model.layers.15 (8.03 GB), cuda:1 ..."."""
        held: dict[str, list[str]] = {}
        for name, device in self._model.hf_device_map.items():
            held.setdefault(str(device), []).append(name)
        sizes = dict.fromkeys(held, 0)
        for tensor in self._model.parameters():
            sizes[str(tensor.device)] += tensor.nbytes
        return ", ".join(
            f"{device} holds {names[0]} to {names[-1]} ({sizes[device] / 1e9:.2f} GB)" for device, names in held.items()
        )

    def _eos_set(self) -> frozenset[int]:
        eos = self._eos_ids
        return frozenset() if eos is None else frozenset(eos if isinstance(eos, list) else [eos])

    def _run(self, requests: Sequence[Request], max_new_tokens: int, **options: Any) -> Any:  # noqa: ANN401
        width = max(len(request.input_ids) for request in requests)
        rows = [[self._pad_id] * (width - len(request.input_ids)) + list(request.input_ids) for request in requests]
        ids = torch.tensor(rows, device=self._device)
        padding = torch.tensor([width - len(request.input_ids) for request in requests], device=self._device)
        mask = (torch.arange(width, device=self._device)[None] >= padding[:, None]).long()
        sampling = requests[0].sampling
        chosen: dict[str, Any] = {"do_sample": not sampling.greedy}
        if not sampling.greedy:
            torch.manual_seed(sampling.seed)
            chosen |= {"temperature": sampling.temperature, "top_k": sampling.top_k, "top_p": sampling.top_p}
        # Only the model's own generation config can switch the end-of-sequence token off: a null in an argument of
        # `generate` is filled in from there.
        # One row that ignores it keeps the batch going; the streamer drops what the others get beyond theirs.
        ignore_eos = any(request.ignore_eos for request in requests)
        self._model.generation_config.eos_token_id = None if ignore_eos else self._eos_ids
        return self._model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=max_new_tokens,
            pad_token_id=self._pad_id,
            use_cache=True,
            cache_implementation=None if self._cache == "dynamic" else self._cache,
            **chosen,
            **options,
        )


class _Streamer(BaseStreamer):
    """Hands each row's new token to `emit` until the row has ended."""

    def __init__(self, requests: Sequence[Request], eos_ids: frozenset[int], emit: Emit) -> None:
        self._requests, self._eos_ids, self._emit = requests, eos_ids, emit
        self._generated = [0] * len(requests)
        self._reasons: list[FinishReason | None] = [None] * len(requests)
        self._prompt_seen = False

    def put(self, value: torch.Tensor) -> None:
        if not self._prompt_seen:  # `generate` streams the prompt first
            self._prompt_seen = True
            return
        for row, token in enumerate(value.tolist()):
            if self._reasons[row] is not None:
                continue
            request = self._requests[row]
            self._emit(row, (token,))
            self._generated[row] += 1
            if token in self._eos_ids and not request.ignore_eos:
                self._reasons[row] = "stop"
            elif self._generated[row] == request.max_new_tokens:
                self._reasons[row] = "length"

    def end(self) -> None:
        pass

    def reasons(self) -> list[FinishReason]:
        ended = [reason for reason in self._reasons if reason is not None]
        if len(ended) < len(self._reasons):
            raise EngineError(f"Transformers stopped before {len(self._reasons) - len(ended)} row(s) had ended.")
        return ended


class _Forced(LogitsProcessor):
    """Leaves only the next forced token to choose."""

    def __init__(self, prompt_tokens: int, forced_ids: Sequence[int]) -> None:
        self._prompt_tokens, self._forced_ids = prompt_tokens, forced_ids

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        only = torch.full_like(scores, -torch.inf)
        only[:, self._forced_ids[input_ids.shape[1] - self._prompt_tokens]] = 0.0
        return only
