"""Text to token ids and back, by the tokenizer that a checkpoint directory carries."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import TemplateError

from skote.types import CheckpointError, RequestError

_ANSWER = "An answer that stands for any other."
PAD_TOKEN = "<|pad|>"  # noqa: S105 (a token of text)


class TextCodec:
    """A tokenizer with a padding token guaranteed.

    `pad_added` says that there was none and that the model's embeddings must reach `pad_id`; `notes` are sentences
    about what the directory lacked.
    """

    def __init__(self, tokenizer: Any, sha256: str) -> None:  # noqa: ANN401 (Transformers' tokenizers are untyped)
        self._tokenizer = tokenizer
        self.sha256 = sha256
        self.notes: list[str] = []
        self.pad_added = tokenizer.pad_token_id is None
        if self.pad_added:
            tokenizer.add_special_tokens({"pad_token": PAD_TOKEN})
            self.notes.append(f"The tokenizer has no padding token: {PAD_TOKEN} was added.")
        self.has_chat_template = bool(getattr(tokenizer, "chat_template", None))
        if not self.has_chat_template:
            self.notes.append("The tokenizer has no chat template: prompts are used as plain text.")
        self.pad_id: int = tokenizer.pad_token_id

    def encode(self, text: str) -> tuple[int, ...]:
        """Token ids of plain `text`, with the special tokens that the tokenizer puts around one."""
        return tuple(self._tokenizer(text)["input_ids"])

    def encode_chat(self, text: str) -> tuple[int, ...]:
        """Token ids of `text` as a user's turn, up to where the answer starts; plain where there is no template."""
        if not self.has_chat_template:
            return self.encode(text)
        return self.encode_messages([{"role": "user", "content": text}])

    def encode_messages(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()
    ) -> tuple[int, ...]:
        """Token ids of a conversation in the OpenAI chat format, and of its tools, up to where the answer starts.

        Raises:
            RequestError: the tokenizer has no chat template, or its template refuses the conversation.
        """
        if not self.has_chat_template:
            raise RequestError("The model has no chat template, which messages need: give plain prompts instead.")
        try:
            ids = self._tokenizer.apply_chat_template(
                [dict(each) for each in messages],
                tools=[dict(each) for each in tools] or None,
                add_generation_prompt=True,
                tokenize=True,
                return_dict=False,
            )
        except (TemplateError, TypeError, ValueError, KeyError) as error:
            reason = str(error).strip().partition("\n")[0].rstrip(".")
            raise RequestError(f"The model's chat template refuses a conversation: {reason}.") from error
        return tuple(ids)

    def encode_next_turn(self, messages: Sequence[Mapping[str, Any]]) -> tuple[int, ...]:
        """Token ids of what follows an answer: its end, the `messages` behind it, up to where the next answer starts.

        Without a chat template, what they say on lines of its own.

        Raises:
            RequestError: the chat template changes an answer, or refuses several turns.
        """
        if not self.has_chat_template:
            lines = "\n".join(str(each.get("content") or "") for each in messages)
            return tuple(self._tokenizer(f"\n{lines}\n", add_special_tokens=False)["input_ids"])
        before = [{"role": "user", "content": "Hello."}, {"role": "assistant", "content": _ANSWER}]
        try:
            whole = self._tokenizer.apply_chat_template(
                [*before, *map(dict, messages)],
                add_generation_prompt=True,
                tokenize=False,
            )
        except (TemplateError, TypeError, ValueError, KeyError) as error:
            raise RequestError(f"The model's chat template refuses several turns: {str(error).rstrip('.')}.") from error
        _, answer, rest = str(whole).partition(_ANSWER)
        if not answer:
            raise RequestError("The model's chat template changes what an assistant said: it takes single turns alone.")
        return tuple(self._tokenizer(rest, add_special_tokens=False)["input_ids"])

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`, special tokens left out."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))

    def prompt_text(self, ids: Sequence[int]) -> str:
        """The text that `encode` makes `ids` of, where there is one: without special tokens that it puts in front."""
        added = self.encode("")
        start = len(added) if tuple(ids[: len(added)]) == added else 0
        return str(self._tokenizer.decode(list(ids[start:]), skip_special_tokens=False))


def load_tokenizer(local_dir: str | Path) -> TextCodec:
    """The tokenizer of a checkpoint directory.

    Raises:
        CheckpointError: there is none, or it cannot be loaded.
    """
    from transformers import AutoTokenizer
    from transformers.utils import logging

    directory = Path(local_dir)
    if not directory.is_dir():
        raise CheckpointError(f"There is no model directory {directory}.")
    files = sorted(
        path for path in directory.iterdir() if re.match(r"tokenizer|vocab|merges|special_tokens", path.name)
    )
    if not files:
        raise CheckpointError(f"{directory} has no tokenizer (tokenizer.json or the like).")
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    try:
        tokenizer = AutoTokenizer.from_pretrained(directory)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        reason = str(error).strip().splitlines()[0]
        raise CheckpointError(f"The tokenizer in {directory} cannot be loaded: {reason}") from error
    digest = hashlib.sha256()
    for path in files:
        digest.update(path.name.encode() + path.read_bytes())
    return TextCodec(tokenizer, digest.hexdigest())
