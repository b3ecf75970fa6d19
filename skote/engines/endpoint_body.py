"""What is asked of a server: a request's body, for /completions or /chat/completions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from skote.types import Request, RequestError, UsageError

APIS = {"completions": "/completions", "chat": "/chat/completions"}
PROMPTS = ("ids", "text")


class BodyWriter:
    """Writes bodies.

    Args:
        api: completions or chat.
        prompt: what completions are sent: the prompt's token ids, or their text. A chat is sent text.
        extensions: whether the server takes `return_token_ids`, `ignore_eos`, `stop_token_ids` and `top_k`, as vLLM
            does; OpenAI's own API has none of them.
        local_dir: the model's directory, whose tokenizer turns ids into text.
        extra: further fields, which win over those that are written here.

    Raises:
        UsageError: an api or a kind of prompt that there is not.
        CheckpointError: text is to be sent, and the model has no tokenizer.
    """

    def __init__(
        self, *, api: str, prompt: str, extensions: bool, local_dir: str | None, extra: dict[str, Any]
    ) -> None:
        if api not in APIS:
            raise UsageError(f"endpoint.api={api} is not known; choose one of {', '.join(APIS)}.")
        if prompt not in PROMPTS:
            raise UsageError(f"endpoint.prompt={prompt} is not known; choose one of {', '.join(PROMPTS)}.")
        self.path = APIS[api]
        self._chat = api == "chat"
        self._extensions = extensions
        self._extra = extra
        self._text = _text_of(local_dir, chat=self._chat) if self._chat or prompt == "text" else None

    def body(self, request: Request, model: str) -> dict[str, Any]:
        """The body of `request` to the served `model`, as JSON values.

        Raises:
            RequestError: it asks for what the server has no field for.
        """
        sampling, fields = request.sampling, dict[str, Any]()
        if not sampling.greedy:
            fields = {"top_p": sampling.top_p, "seed": sampling.seed}
            if sampling.top_k and not self._extensions:
                raise RequestError("OpenAI's API has no top_k: set endpoint.extensions=true, or top_k to 0.")
        if request.stop_strings:
            fields["stop"] = list(request.stop_strings)
        if request.stop_ids and not self._extensions:
            raise RequestError("OpenAI's API has no stop_token_ids: set endpoint.extensions=true, or leave them out.")
        if self._extensions:
            fields["return_token_ids"] = True
            if request.ignore_eos:
                fields["ignore_eos"] = True
            if request.stop_ids:
                fields["stop_token_ids"] = list(request.stop_ids)
            if not sampling.greedy and sampling.top_k:
                fields["top_k"] = sampling.top_k
        return {
            "model": model,
            **self._asked(request.input_ids),
            "max_tokens": request.max_new_tokens,
            "temperature": sampling.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
            **fields,
            **self._extra,
        }

    def _asked(self, input_ids: Sequence[int]) -> dict[str, Any]:
        if self._text is None:
            return {"prompt": list(input_ids)}
        text = self._text(input_ids)
        return {"messages": [{"role": "user", "content": text}]} if self._chat else {"prompt": text}


def _text_of(local_dir: str | None, *, chat: bool) -> Callable[[Sequence[int]], str]:
    from skote.runtime.text import load_tokenizer

    if local_dir is None:
        raise UsageError(
            "A prompt's text needs the model's tokenizer: set endpoint.prompt=ids and endpoint.api=completions."
        )
    codec = load_tokenizer(local_dir)
    return codec.decode if chat else codec.prompt_text  # around a chat's text the server puts its own template
