"""The published package, skotergy 1.0.1, as an arm: its own code in its own environment, driven through a subprocess.

It takes and returns text: a prompt's ids are decoded for it, it encodes them again, and the prompt is stripped from its
output. All tokens of a request arrive as one chunk, so there is a latency and no time to first token.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from skote.engines.published_environment import VERSION, default_environment, find_environment
from skote.types import CheckpointError, Emit, EngineError, FinishReason, Request, UsageError

METHODS = {
    "router": "its own Router.submit",
    "runner": "the loop of its own benchmark, which keeps one cache for all prompts",
}
_DRIVER = Path(__file__).with_name("published_driver.py")
_OLD_TOKENIZER = {"TokenizersBackend": "PreTrainedTokenizerFast"}
"""Names that Transformers 5 writes into tokenizer_config.json, and those that the older one knows."""


class PublishedEngine:
    """skotergy 1.0.1 behind the `Engine` protocol; the common arguments are those of `SkotergyEngine`.

    Args:
        method: router (`Router.submit`), or runner (what the package's benchmark times).
        environment: the folder that `published_environment` makes; None for its default place.

    Raises:
        UsageError: an unknown method, no environment, tf32, `layers` of a real checkpoint.
        CheckpointError: the directory's files cannot be handed over.
        EngineError: the package did not load the model.
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
        method: str = "router",
        environment: str | None = None,
    ) -> None:
        del pad_id, max_model_len  # it chooses its padding, and its cache grows
        if method not in METHODS:
            raise UsageError(f"engine.method={method} is not known; choose one of {', '.join(METHODS)}.")
        if dtype == "tf32":
            raise UsageError(f"skotergy {VERSION} has no dtype tf32: it takes fp32, bf16 and fp16.")
        folder = find_environment(Path(environment).expanduser() if environment else default_environment())
        self._method = method
        files = tempfile.TemporaryDirectory(prefix="skotergy-published-")
        weakref.finalize(self, files.cleanup)
        model = Path(files.name)
        if random_seed is None:
            if layers is not None:
                raise UsageError(f"skotergy {VERSION} loads a checkpoint whole: leave model.layers out.")
            _link_checkpoint(Path(local_dir), model)
        else:
            _write_random(Path(local_dir), model, dtype, device, random_seed, layers)
        options = {"local_dir": str(model), "device": device, "dtype": dtype, "method": method, "threads": threads}
        self._connection, theirs = Pipe()
        try:
            process = subprocess.Popen(
                [sys.executable, "-P", str(_DRIVER), str(theirs.fileno()), str(folder), json.dumps(options)],
                stdin=subprocess.DEVNULL,
                stdout=sys.stderr,  # the replica's log
                pass_fds=(theirs.fileno(),),
            )
        finally:
            theirs.close()
        weakref.finalize(self, _end, self._connection, process)
        self._facts: dict[str, Any] = self._answer()

    def generate(self, requests: Sequence[Request], emit: Emit) -> list[FinishReason]:
        """As `Engine.generate`, one request after another.

        Raises:
            EngineError: the package failed.
            UsageError: a sampled request: the package takes no seed.
        """
        reasons: list[FinishReason] = []
        for row, request in enumerate(requests):
            if not request.sampling.greedy:
                raise UsageError(f"skotergy {VERSION} takes no seed, so its samples compare with nothing: be greedy.")
            ids = self._ask(
                "generate",
                prompt_ids=list(request.input_ids),
                max_new_tokens=request.max_new_tokens,
                ignore_eos=request.ignore_eos,
            )
            emit(row, ids)
            reasons.append("length" if len(ids) == request.max_new_tokens else "stop")
        return reasons

    def score(self, request: Request, forced_ids: Sequence[int]) -> NDArray[np.float32]:
        """As `Engine.score`; the runner's method has no place to force a token.

        Raises:
            EngineError: the package failed, or the method cannot be forced.
        """
        logits: NDArray[np.float32] = self._ask(
            "score", prompt_ids=list(request.input_ids), forced_ids=list(forced_ids)
        )
        return logits

    def describe(self) -> dict[str, Any]:
        """As `Engine.describe`."""
        facts = self._facts
        return {
            "tier": None,
            "tier_reason": f"skotergy {VERSION} through {METHODS[self._method]}, on Transformers "
            f"{facts['transformers']}, {facts['attention']} attention",
            "weights_fingerprint": facts["weights_fingerprint"],
            "parameters": facts["parameters"],
            "compile_s": None,
            "notes": [],
            "paths": {},
        }

    def _ask(self, operation: str, **arguments: Any) -> Any:  # noqa: ANN401 (as the driver answers)
        with suppress(OSError):  # its process has ended: the answer says so
            self._connection.send((operation, arguments))
        return self._answer()

    def _answer(self) -> Any:  # noqa: ANN401
        try:
            outcome, content = self._connection.recv()
        except (EOFError, OSError):
            raise EngineError(f"The process of skotergy {VERSION} ended; the arm's log says why.") from None
        if outcome == "error":
            raise EngineError(f"skotergy {VERSION} failed: {content}")
        return content


def _end(connection: Connection, process: subprocess.Popen[bytes]) -> None:
    """Close the driver's socket, which is what it ends by, and wait for that."""
    connection.close()
    process.wait()


def _link_checkpoint(source: Path, target: Path) -> None:
    """Links to the files of `source`, with a tokenizer_config.json that the older Transformers can read."""
    try:
        for path in source.iterdir():
            if path.name != "tokenizer_config.json":
                (target / path.name).symlink_to(path.resolve())
                continue
            config = json.loads(path.read_text(encoding="utf-8"))
            name = config.get("tokenizer_class")
            config["tokenizer_class"] = _OLD_TOKENIZER.get(name, name)
            (target / path.name).write_text(json.dumps(config), encoding="utf-8")
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{source} cannot be handed to skotergy {VERSION}: {error}") from error


def _write_random(source: Path, target: Path, dtype: str, device: str, random_seed: int, layers: int | None) -> None:
    """A checkpoint of the random weights that every arm draws, with a tokenizer whose word for token 17 is "17"."""
    import torch
    from safetensors.torch import save_file
    from tokenizers import Tokenizer, models, pre_tokenizers

    from skote.flags import TORCH_DTYPES
    from skote.model.causal_lm import load_module

    module = load_module(
        source,
        dtype=getattr(torch, TORCH_DTYPES[dtype]),
        device=torch.device(device),
        random_seed=random_seed,
        layers=layers,
    )
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in module.named_parameters()}
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    config["num_hidden_layers"] = module.config.num_hidden_layers
    (target / "config.json").write_text(json.dumps(config), encoding="utf-8")
    vocabulary = {str(token): token for token in range(config["vocab_size"])}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="0"))  # noqa: S106 (a word)
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.save(str(target / "tokenizer.json"))
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<end>"}  # without one it would add a row
    (target / "tokenizer_config.json").write_text(json.dumps(names), encoding="utf-8")
