"""vLLM in process: its AsyncLLM, given token ids, on one CUDA device."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

from skote.engines.streaming import Answered, EmitRow, StreamingEngine
from skote.flags import TORCH_DTYPES
from skote.types import EngineError, FinishReason, Request, UsageError

_REASONS: dict[str, FinishReason] = {"stop": "stop", "length": "length"}


class VllmEngine(StreamingEngine):
    """`vllm.AsyncLLMEngine` behind the `Engine` protocol; the common arguments are those of `SkotergyEngine`.

    Args:
        max_requests: requests that a step of it advances at most (max_num_seqs).
        memory_share: of the GPU's memory that it takes for itself at once (gpu_memory_utilization).
        prefix_cache: whether it keeps what it computed of prompts, as it does by default where nobody asks.
        engine_args: further fields of vLLM's AsyncEngineArgs, which win.

    Raises:
        UsageError: no vLLM, no CUDA, another GPU than the first, a model that no directory holds, or an unknown field.
        EngineError: vLLM cannot load the model.
    """

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
        max_requests: int = 128,
        memory_share: float = 0.45,
        prefix_cache: bool = False,
        engine_args: Mapping[str, Any] | None = None,
    ) -> None:
        del threads, pad_id
        if not device.startswith("cuda"):
            raise UsageError(
                f"engine=vllm runs on CUDA alone, and this arm is on {device}: choose a machine with a GPU."
            )
        if device != "cuda:0":
            raise UsageError(
                f"vLLM takes the first GPU that it sees, and this arm is on {device}: set devices=cuda:0, and choose "
                "the GPU with CUDA_VISIBLE_DEVICES."
            )
        if random_seed is not None or layers is not None:
            raise UsageError(
                "vLLM reads a checkpoint, and this run's model has random weights or is cut (model.layers): choose "
                "model=smollm2_135m, or model=local model.path=DIR."
            )
        try:
            import vllm
            from vllm.sampling_params import RequestOutputKind
            from vllm.v1.engine.exceptions import EngineGenerateError
        except ModuleNotFoundError as missing:
            raise UsageError(
                f"engine=vllm needs the package {missing.name}: pip install 'skotergy[vllm]'."
            ) from missing
        super().__init__()
        asked: dict[str, Any] = {
            "model": local_dir,
            "dtype": TORCH_DTYPES[dtype],
            "max_model_len": max_model_len,
            "max_num_seqs": max_requests,
            "gpu_memory_utilization": memory_share,
            "enable_prefix_caching": prefix_cache,
            "disable_log_stats": True,
        }
        try:
            self._llm = vllm.AsyncLLMEngine.from_engine_args(vllm.AsyncEngineArgs(**asked | dict(engine_args or {})))
        except TypeError as error:
            raise UsageError(f"engine.engine_args: vLLM {vllm.__version__} does not take them ({error}).") from error
        except (ValueError, RuntimeError, OSError) as error:
            why = str(error).strip().partition("\n")[0].rstrip(".")
            raise EngineError(f"vLLM {vllm.__version__} cannot load {local_dir}: {why}.") from error
        self._closing.callback(self._llm.shutdown)
        self._failure: type[Exception] = EngineGenerateError
        self._params, self._piecewise = vllm.SamplingParams, RequestOutputKind.DELTA
        self._version: str = vllm.__version__
        self._names = itertools.count()
        self._max_requests = max_requests

    @property
    def rows(self) -> int:
        """How many requests a step advances at most."""
        return self._max_requests

    async def answer_one(self, request: Request, emit: EmitRow) -> Answered:
        """As `StreamingEngine.answer_one`; vLLM takes a request that is cancelled out of its batch by itself.

        Raises:
            EngineError: vLLM failed on it, or ended it for another reason than its length or end.
        """
        sampling = request.sampling
        params = self._params(
            max_tokens=request.max_new_tokens,
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            seed=None if sampling.greedy else sampling.seed,
            ignore_eos=request.ignore_eos,
            detokenize=False,
            output_kind=self._piecewise,
        )
        prompt = {"prompt_token_ids": list(request.input_ids)}
        cached: int | None = None
        ended: str | None = None
        try:
            async for output in self._llm.generate(prompt, params, f"r{next(self._names)}"):
                [answer] = output.outputs
                if answer.token_ids:
                    emit(list(answer.token_ids))
                cached = output.num_cached_tokens if cached is None else cached
                ended = answer.finish_reason or ended
        except (self._failure, ValueError) as error:
            why = str(error).strip().partition("\n")[0].rstrip(".") or type(error).__name__
            raise EngineError(f"vLLM failed on the request: {why}.") from error
        if ended not in _REASONS:
            raise EngineError(f"vLLM ended the request for the reason {ended!r}, and not by its length or end.")
        return Answered(_REASONS[ended], cached)

    def describe(self) -> dict[str, Any]:
        """As `Engine.describe`. Its weights lie in a process of its own, and are not verified."""
        return {
            "tier": None,
            "tier_reason": f"vLLM {self._version}, up to {self._max_requests} requests a step",
            "compile_s": None,
            "notes": [],
            "paths": {},
            "scores": False,
        }
