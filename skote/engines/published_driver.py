"""The other side of `published`: runs as a script inside the published package's own environment.

It imports nothing of this project, whose package has the same name. It serves the socket whose number is its first
argument; the second is the folder of the environment, the third a JSON object: local_dir, device, dtype, method,
threads. Messages are pickled: `(operation, dict)` in, `("ok", result)` or `("error", sentence)` out, the first answer
before any question; the end of the file ends it.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

Ids = list[int]


class Tokenizer:
    """The package's own tokenizer, except for a prompt whose ids it would not give back for their text.

    Such a prompt (the harness warms up with random ids) is handed over as the ids that were asked for.
    """

    def __init__(self, own: Any) -> None:  # noqa: ANN401 (Transformers is untyped)
        self._own = own
        self._given: Ids | None = None

    def text_of(self, prompt_ids: Sequence[int]) -> str:
        """The text to submit for `prompt_ids`; what is tokenised next is taken to be this text."""
        ids = list(prompt_ids)
        text: str = self._own.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        self._given = None if self._own(text)["input_ids"] == ids else ids
        return text

    def __call__(self, texts: list[str], **options: Any) -> Any:  # noqa: ANN401
        """As the package's own, of one text."""
        import torch

        if self._given is None:
            return self._own(texts, **options)
        ids = torch.tensor([self._given])
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

    def batch_decode(self, rows: Any, **options: Any) -> list[str]:  # noqa: ANN401
        """As the package's own."""
        texts: list[str] = self._own.batch_decode(rows, **options)
        return texts


class Method(Protocol):
    """A way to run the published code, with the model module that it computes with."""

    module: Any

    def submit(self, prompt_ids: Sequence[int], max_new_tokens: int, *, ignore_eos: bool) -> Ids:
        """The token ids that follow `prompt_ids`."""


class RouterMethod:
    """The package's public interface: `Router.submit`.

    It returns text, prompt included. The ids come from an observer around the module's `generate`, which changes
    nothing but what `extra` says.
    """

    def __init__(self, local_dir: str, device: str, dtype: str) -> None:
        router = importlib.import_module("skote.runtime.router")
        self._router = router.Router(local_dir=local_dir, devices=[device], dtype=dtype)
        worker = self._router.workers[0]
        self.module = worker.mod
        self._tokenizer = worker.tok = Tokenizer(worker.tok)
        self.extra: dict[str, Any] = {}
        self.raw: Any = None
        self._eos_ids = self.module.generation_config.eos_token_id
        generate: Callable[..., Any] = self.module.generate

        def observed(**options: Any) -> Any:  # noqa: ANN401
            self.raw = generate(**options, **self.extra, return_dict_in_generate=True)
            return self.raw.sequences

        self.module.generate = observed

    def submit(self, prompt_ids: Sequence[int], max_new_tokens: int, *, ignore_eos: bool) -> Ids:
        """As `Method.submit`."""
        self.module.generation_config.eos_token_id = None if ignore_eos else self._eos_ids
        self._router.submit(self._tokenizer.text_of(prompt_ids), max_new_tokens=max_new_tokens, greedy=True)
        ids: Ids = self.raw.sequences[0, len(prompt_ids) :].tolist()
        return ids


class RunnerMethod:
    """What the package's own benchmark times as "skote": one adapter for all prompts, as `run_experiment` builds it."""

    def __init__(self, local_dir: str, device: str, dtype: str) -> None:
        del device  # its loader chooses the device by itself
        runner = importlib.import_module("skote.eval.runner")
        adapter = importlib.import_module("skote.runtime.decode_graph_adapter")
        self.module, own, _ = runner._load_hf_model(local_dir, dtype_str=dtype, trust_remote_code=True)
        self._tokenizer = Tokenizer(own)
        self._device = runner._primary_device_for_inputs(self.module)
        self._adapter = adapter.GraphDecodeAdapter(
            model=self.module,
            tok=self._tokenizer,
            eos_token_id=own.eos_token_id,
            greedy_default=True,
        )
        for _ in range(2):  # its own warm-up
            self.submit(own("warmup prompt")["input_ids"], 1, ignore_eos=True)

    def submit(self, prompt_ids: Sequence[int], max_new_tokens: int, *, ignore_eos: bool) -> Ids:
        """As `Method.submit`."""
        text = self._tokenizer.text_of(prompt_ids)
        ids = self._tokenizer([text], return_tensors="pt", padding=True, truncation=True)["input_ids"]
        output = self._adapter.generate(
            input_ids=ids.to(self._device, non_blocking=True),
            max_new_tokens=max_new_tokens,
            greedy=True,
            stop_at_eos=not ignore_eos,
            return_text=True,
        )
        new: Ids = output["input_ids"][0, len(prompt_ids) :].tolist()
        return new


METHODS: dict[str, Callable[[str, str, str], Method]] = {"router": RouterMethod, "runner": RunnerMethod}


class Driver:
    """Answers the engine's questions with one method."""

    def __init__(
        self, environment: Path, *, local_dir: str, device: str, dtype: str, method: str, threads: int | None
    ) -> None:
        import torch
        import transformers

        if threads is not None:
            torch.set_num_threads(threads)
        package = importlib.import_module("skote")
        for module in (package, transformers):
            if environment not in Path(str(module.__file__)).resolve().parents:
                raise RuntimeError(f"{module.__name__} was imported from {module.__file__}, not from {environment}")
        self._method = METHODS[method](local_dir, device, dtype)
        self._transformers = transformers.__version__
        self._fingerprint = _load_fingerprint()(self._method.module.named_parameters())

    def describe(self) -> dict[str, Any]:
        """What was loaded, in JSON values."""
        import torch

        module = self._method.module
        return {
            "transformers": self._transformers,
            "weights_fingerprint": self._fingerprint,
            "attention": module.config._attn_implementation,
            "parameters": sum(parameter.numel() for parameter in module.parameters()),
            "matmul_precision": torch.get_float32_matmul_precision(),
        }

    def generate(self, prompt_ids: Sequence[int], max_new_tokens: int, *, ignore_eos: bool) -> Ids:
        """The answer's ids, without the prompt's."""
        return self._method.submit(prompt_ids, max_new_tokens, ignore_eos=ignore_eos)

    def score(self, prompt_ids: Sequence[int], forced_ids: Sequence[int]) -> Any:  # noqa: ANN401 (a numpy array)
        """Logits [len(forced_ids), vocab], fp32, with the forced tokens fed one by one by the package's own generate.

        Raises:
            ValueError: the runner's method, whose loop offers no place to force a token.
        """
        import torch

        method = self._method
        if not isinstance(method, RouterMethod):
            raise ValueError("the runner's method cannot be forced; compare its outputs in fp32")

        def force(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            only = torch.full_like(scores, -torch.inf)
            only[:, forced_ids[input_ids.shape[1] - len(prompt_ids)]] = 0.0
            return only

        method.extra = {"logits_processor": [force], "output_logits": True}
        try:
            self.generate(prompt_ids, len(forced_ids), ignore_eos=True)
            return torch.cat(method.raw.logits).float().cpu().numpy()
        finally:
            method.extra, method.raw = {}, None


def _load_fingerprint() -> Callable[..., str]:
    """The function that every arm's weights go through, from its file."""
    path = Path(__file__).parent.parent / "model" / "fingerprint.py"
    spec = importlib.util.spec_from_file_location("skotergy_fingerprint", path)
    if spec is None or spec.loader is None:
        raise RuntimeError(f"{path} cannot be loaded")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    fingerprint: Callable[..., str] = module.fingerprint
    return fingerprint


def serve(connection: Connection, driver: Driver) -> None:
    """Answer until the other side closes."""
    operations: dict[str, Callable[..., Any]] = {
        "describe": driver.describe,
        "generate": driver.generate,
        "score": driver.score,
    }
    while True:
        try:
            operation, arguments = connection.recv()
        except EOFError:
            return
        try:
            answer = ("ok", operations[operation](**arguments))
        except (RuntimeError, ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
            answer = ("error", f"{type(error).__name__}: {error}")
        connection.send(answer)


def main() -> None:
    """Build the method and serve; what keeps it from being built is the first answer."""
    connection = Connection(int(sys.argv[1]))
    environment = Path(sys.argv[2]).resolve()
    sys.path.insert(0, str(environment))
    try:
        driver = Driver(environment, **json.loads(sys.argv[3]))
    except (ImportError, RuntimeError, OSError, ValueError, TypeError, AttributeError) as error:
        connection.send(("error", f"{type(error).__name__}: {error}"))
        return
    connection.send(("ok", driver.describe()))
    serve(connection, driver)


if __name__ == "__main__":
    main()
