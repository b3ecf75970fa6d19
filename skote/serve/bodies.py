"""What clients may ask: the bodies of the two endpoints, strict about every field.

A field that has no effect here may be sent with the value that means so. A field that would have one, and is not built,
is refused, and so is one that nobody knows: an answer that ignores half of its question is a wrong one.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

MOST_STOPS = 16
_INT64 = 2**63


def _check_characters(text: str) -> str:
    """JSON can spell half a character, which no tokenizer takes."""
    if any("\ud800" <= letter <= "\udfff" for letter in text):
        raise ValueError("a text must not have half a surrogate pair")
    return text


_Text = Annotated[str, AfterValidator(_check_characters)]
_Stop = Annotated[_Text, Field(min_length=1, max_length=256)]
_Id = Annotated[int, Field(ge=0, lt=_INT64)]
_Zero = Annotated[float, Field(ge=0.0, le=0.0)]
_One = Annotated[float, Field(ge=1.0, le=1.0)]
_Empty = Annotated[list[Any], Field(max_length=0)]
_NOT_BUILT = "It is not built: leave it out."
_NO_PROBABILITIES = "The engine hands over tokens without their probabilities: leave it out."


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class StreamOptions(_Strict):
    """What a stream tells beside text."""

    include_usage: bool | None = Field(default=None, description="A last chunk with the counts of tokens.")
    continuous_usage_stats: bool | None = Field(default=None, description="Counts in every chunk, as vLLM has them.")
    include_obfuscation: bool | None = Field(default=None, description="No effect.")


class Body(_Strict):
    """What both endpoints take."""

    model: str | None = Field(default=None, max_length=1024, description="The served model, as /v1/models names it.")
    stream: bool | None = Field(default=None, description="Server-sent events, one for what each step gives.")
    stream_options: StreamOptions | None = Field(default=None, description="For a stream alone.")
    max_tokens: int | None = Field(default=None, ge=1, lt=_INT64, description="The most tokens of the answer.")
    temperature: float | None = Field(
        default=None, ge=0.0, le=2.0, description="From 0 (greedy) to 2; 1 where it is not given."
    )
    top_p: float | None = Field(default=None, gt=0.0, le=1.0, description="Above 0, and at most 1.")
    top_k: int | None = Field(default=None, ge=-1, lt=2**31, description="0 and -1 are no limit.")
    seed: int | None = Field(
        default=None, ge=-_INT64, lt=_INT64, description="A whole number of 64 bits; drawn where not given."
    )
    stop: _Stop | Annotated[list[_Stop], Field(max_length=MOST_STOPS)] | None = Field(
        default=None, description=f"A text of 1 to 256 characters that ends the answer, or up to {MOST_STOPS} of them."
    )
    stop_token_ids: Annotated[list[_Id], Field(max_length=MOST_STOPS)] | None = Field(
        default=None, description=f"Up to {MOST_STOPS} token ids that end the answer, as vLLM has them."
    )
    ignore_eos: bool | None = Field(default=None, description="Go on until max_tokens.")
    return_token_ids: bool | None = Field(default=None, description="Token ids beside the text, as vLLM has them.")
    n: Literal[1] | None = Field(default=None, description="One answer a request: ask again for another.")
    presence_penalty: _Zero | None = Field(default=None, description=_NOT_BUILT)
    frequency_penalty: _Zero | None = Field(default=None, description=_NOT_BUILT)
    repetition_penalty: _One | None = Field(default=None, description=_NOT_BUILT)
    min_p: _Zero | None = Field(default=None, description=_NOT_BUILT)
    logit_bias: Annotated[dict[str, Any], Field(max_length=0)] | None = Field(default=None, description=_NOT_BUILT)
    user: str | None = Field(default=None, description="No effect.")
    metadata: dict[str, Any] | None = Field(default=None, description="No effect.")

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings."""
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)


_Ids = Annotated[list[_Id], Field(min_length=1)]


class CompletionBody(Body):
    """Of /v1/completions: a text to go on with."""

    prompt: (
        _Text
        | _Ids
        | Annotated[list[_Text], Field(min_length=1, max_length=1)]
        | Annotated[list[_Ids], Field(min_length=1, max_length=1)]
    ) = Field(description="A text, or its token ids, or a list of one of these: one prompt a request.")
    best_of: Literal[1] | None = Field(default=None, description=_NOT_BUILT)
    echo: Literal[False] | None = Field(default=None, description=_NOT_BUILT)
    suffix: Literal[""] | None = Field(default=None, description=_NOT_BUILT)
    logprobs: None = Field(default=None, description=_NO_PROBABILITIES)

    @property
    def one_prompt(self) -> str | list[int]:
        """The prompt, out of the list that it may stand in."""
        if isinstance(self.prompt, str):
            return self.prompt
        first = self.prompt[0]
        return [each for each in self.prompt if isinstance(each, int)] if isinstance(first, int) else first


class TextPart(_Strict):
    """A part of a message."""

    type: Literal["text"] = Field(description="Text alone.")
    text: _Text


class Message(_Strict):
    """A turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant"]
    content: _Text | list[TextPart]
    name: str | None = Field(default=None, description="No effect.")
    refusal: None = Field(default=None, description="No effect; clients send back what they were answered.")

    @property
    def turn(self) -> dict[str, str]:
        """As a chat template takes it."""
        content = self.content
        text = content if isinstance(content, str) else "\n".join(part.text for part in content)
        return {"role": self.role, "content": text}


class ResponseFormat(_Strict):
    """The form of an answer."""

    type: Literal["text"]


class ChatBody(Body):
    """Of /v1/chat/completions: a conversation to answer."""

    messages: list[Message] = Field(
        min_length=1, description="Turns of a role (system, developer, user or assistant) and a text."
    )
    max_completion_tokens: int | None = Field(
        default=None, ge=1, lt=_INT64, description="As max_tokens, and wins over it."
    )
    logprobs: Literal[False] | None = Field(default=None, description=_NO_PROBABILITIES)
    top_logprobs: Literal[0] | None = Field(default=None, description=_NO_PROBABILITIES)
    tools: _Empty | None = Field(default=None, description=_NOT_BUILT)
    tool_choice: Literal["none", "auto"] | None = Field(default=None, description=_NOT_BUILT)
    parallel_tool_calls: bool | None = Field(default=None, description="No effect.")
    response_format: ResponseFormat | None = Field(default=None, description="Text alone.")
    modalities: Annotated[list[Literal["text"]], Field(max_length=1)] | None = Field(
        default=None, description="Text alone."
    )
    store: bool | None = Field(default=None, description="No effect: nothing is kept.")
    service_tier: Literal["auto", "default"] | None = Field(default=None, description="No effect.")


DESCRIPTIONS = {
    name: field.description or "" for body in (CompletionBody, ChatBody) for name, field in body.model_fields.items()
}
"""What each field must be, for sentences."""
