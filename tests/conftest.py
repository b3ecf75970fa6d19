"""A tiny Llama with real files: config, safetensors, a word-level tokenizer; made once a session, from a fixed seed."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from skote.types import Engine, FinishReason, Request

VOCAB = 96
CHAT_TEMPLATE = (
    "{% for turn in messages %}<s> {{ turn.role }} {{ turn.content }} {% endfor %}"
    "{% if add_generation_prompt %}w9{% endif %}"
)
TINY = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.2,  # large enough that logits differ and greedy outputs do not settle on one token
}


@pytest.fixture(scope="session", autouse=True)
def interrupts_arrive() -> Iterator[None]:
    """Ctrl-C reaches this process and those that it starts, also where a shell began it in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="session")
def make_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`make_checkpoint(**changes)`: a checkpoint directory of `LlamaConfig(**TINY | changes)`, seed 0; read only.

    Norms are drawn too: with ones a norm that forgets its weight would pass.
    """
    made: dict[str, Path] = {}

    def make(**changes: Any) -> Path:
        key = json.dumps(changes, sort_keys=True)
        if key not in made:
            import torch
            from transformers import LlamaConfig, LlamaForCausalLM

            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)
                model = LlamaForCausalLM(LlamaConfig(**TINY | changes))
                with torch.no_grad():
                    for parameter in model.parameters():
                        if parameter.dim() == 1:
                            parameter.uniform_(0.5, 1.5)
            made[key] = tmp_path_factory.mktemp("llama")
            model.save_pretrained(made[key])
        return made[key]

    return make


@pytest.fixture
def copy_checkpoint(make_checkpoint: Callable[..., Path], tmp_path: Path) -> Callable[..., Path]:
    """As `make_checkpoint`, in a directory of the test's own, to be damaged."""

    def copy(**changes: Any) -> Path:
        target = tmp_path / "copy"
        target.mkdir()
        for file in make_checkpoint(**changes).iterdir():
            (target / file.name).write_bytes(file.read_bytes())
        return target

    return copy


@pytest.fixture(scope="session")
def write_tokenizer() -> Callable[..., None]:
    """`write_tokenizer(directory, pad=..., chat=...)`: `<unk>` 0, `<s>` 1, `</s>` 2, `user` 3, words `w4` to `w95`.

    Padding, where there is any, is `w95`.
    """

    def write(directory: Path, *, pad: bool = True, chat: bool = False) -> None:
        from tokenizers import Tokenizer, models, pre_tokenizers
        from transformers import PreTrainedTokenizerFast

        words = ["<unk>", "<s>", "</s>", "user", *(f"w{index}" for index in range(4, VOCAB))]
        inner = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
        inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=inner,
            unk_token="<unk>",
            bos_token="<s>",
            eos_token="</s>",
            **({"pad_token": "w95"} if pad else {}),
        )
        if chat:
            tokenizer.chat_template = CHAT_TEMPLATE
        tokenizer.save_pretrained(directory)

    return write


@pytest.fixture(scope="session")
def run() -> Callable[..., tuple[list[list[int]], list[FinishReason]]]:
    """`run(engine, *requests)`: every row's tokens, and why each row ended."""

    def call(engine: Engine, *requests: Request) -> tuple[list[list[int]], list[FinishReason]]:
        rows: list[list[int]] = [[] for _ in requests]

        def emit(row: int, ids: Sequence[int]) -> None:
            rows[row].extend(ids)

        return rows, engine.generate(requests, emit)

    return call


@pytest.fixture(scope="session")
def reference_ids() -> Callable[[Path, Sequence[int], int], list[int]]:
    """`reference_ids(directory, prompt, n)`: `n` greedy tokens of a bare Transformers `generate`, without a stop."""
    loaded: dict[Path, Any] = {}

    def call(directory: Path, prompt: Sequence[int], n_tokens: int) -> list[int]:
        import torch
        from transformers import LlamaForCausalLM

        if directory not in loaded:
            loaded[directory] = LlamaForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
            loaded[directory].generation_config.eos_token_id = None
        ids = torch.tensor([list(prompt)])
        output = loaded[directory].generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=n_tokens,
            do_sample=False,
            pad_token_id=0,
        )
        ids_out: list[int] = output[0, len(prompt) :].tolist()
        return ids_out

    return call
