"""What the endpoints serve: bodies made requests of the router, within the limits, and their answers."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from skote.runtime.lane import ReplicaLoad
from skote.serve.bodies import Body, ChatBody, CompletionBody
from skote.serve.errors import ApiError
from skote.serve.generation import Asked, Generation, TokenRouter
from skote.serve.metrics import Metrics, Replicas
from skote.serve.replies import Kind, Reply
from skote.serve.responses import Answering, Events, Whole
from skote.serve.settings import Limits
from skote.types import Completion, RequestError, Sampling

COMPLETION_TOKENS = 16
"""Of a completion where max_tokens is not given, as OpenAI has it; an answer in a chat may take what is left."""
LOG = logging.getLogger("skote.serve")


class ChatCodec(Protocol):
    """What a server needs of a tokenizer (`skote.runtime.text.TextCodec`)."""

    def encode(self, text: str) -> tuple[int, ...]:
        """The token ids of a prompt."""

    def encode_messages(self, messages: Sequence[Mapping[str, str]]) -> tuple[int, ...]:
        """The token ids of a conversation; raises RequestError where the template refuses it."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids."""


class ServedRouter(TokenRouter, Replicas, Protocol):
    """What a server needs of a router (`skote.runtime.router.Router`)."""


@dataclass(frozen=True, slots=True)
class Served:
    """The model: what clients call it, the positions that a request may take, its vocabulary's size."""

    name: str
    context: int
    vocab: int


@dataclass(slots=True, eq=False)
class Service:
    """A router behind limits. `draining` says that the server is ending and takes nothing new."""

    router: ServedRouter
    codec: ChatCodec
    served: Served
    limits: Limits
    metrics: Metrics
    log_prompts: bool = False
    draining: bool = False
    _open: set[Generation] = field(default_factory=set)

    @property
    def loads(self) -> list[ReplicaLoad]:
        """What each replica has to do now."""
        return self.router.loads

    @property
    def open(self) -> int:
        """Requests that the router has been given and has not answered."""
        return len(self._open)

    async def complete(self, body: CompletionBody) -> Answering:
        """The answer to a prompt.

        Raises:
            ApiError: the request does not fit; further ones come when it is run.
        """
        prompt = body.one_prompt
        ids = await self._encode(partial(self.codec.encode, prompt)) if isinstance(prompt, str) else tuple(prompt)
        most = COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
        return self._answer("completion", body, ids, most, continued=ids)

    async def chat(self, body: ChatBody) -> Answering:
        """The answer to a conversation; errors as those of `complete`."""
        turns = [message.turn for message in body.messages]
        ids = await self._encode(partial(self.codec.encode_messages, turns))
        most = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
        return self._answer("chat", body, ids, most)

    def break_off(self, sentence: str) -> None:
        """End all requests with an error that says why."""
        for generation in list(self._open):
            generation.break_off(sentence)

    async def _encode(self, encode: Callable[[], tuple[int, ...]]) -> tuple[int, ...]:
        """In a thread: a long text takes a while, and all streams wait for the loop."""
        try:
            return await asyncio.to_thread(encode)
        except RequestError as refused:
            raise ApiError(400, str(refused), param="messages") from refused

    def _answer(
        self, kind: Kind, body: Body, ids: tuple[int, ...], most: int | None, continued: tuple[int, ...] = ()
    ) -> Answering:
        if body.model not in (None, self.served.name):
            raise ApiError(
                404, f"There is no such model here: {self.served.name!r} is.", param="model", code="model_not_found"
            )
        options = body.stream_options
        if options is not None and not body.stream:
            raise ApiError(
                400, "stream_options are for a stream: set stream, or leave them out.", param="stream_options"
            )
        asked = Asked(
            input_ids=ids,
            max_new_tokens=self._max_new_tokens(ids, most),
            sampling=_sampling(body),
            stops=body.stops,
            stop_ids=tuple(body.stop_token_ids or ()),
            ignore_eos=bool(body.ignore_eos),
            continued=continued,
        )
        reply = Reply(
            kind,
            self.served.name,
            ids,
            token_ids=bool(body.return_token_ids),
            usage=options is not None and bool(options.include_usage),
            running_usage=options is not None and bool(options.continuous_usage_stats),
        )
        answering = Events if body.stream else Whole
        return answering(partial(self._begin, asked, reply.id), reply, self.limits.stalled_s)

    def _max_new_tokens(self, ids: tuple[int, ...], asked: int | None) -> int:
        """How many tokens may come, checked against the limits and the context."""
        if not ids:
            raise ApiError(400, "The prompt has no token: give it a text.", param="prompt")
        if not 0 <= min(ids) <= max(ids) < self.served.vocab:
            raise ApiError(400, f"A token id lies outside the vocabulary of {self.served.vocab}.", param="prompt")
        limits = self.limits
        if limits.prompt_tokens is not None and len(ids) > limits.prompt_tokens:
            raise ApiError(400, f"The prompt has {len(ids)} tokens, this server takes {limits.prompt_tokens}.")
        if asked is not None and limits.output_tokens is not None and asked > limits.output_tokens:
            raise ApiError(400, f"max_tokens is {asked}, this server gives {limits.output_tokens}.", param="max_tokens")
        room = self.served.context - len(ids) + 1  # the last token is returned and never fed back
        if room < (asked or 1):
            raise ApiError(
                400,
                f"The prompt has {len(ids)} tokens and max_tokens is {asked or 1}; the context holds "
                f"{self.served.context}: shorten the prompt or ask for fewer tokens.",
                code="context_length_exceeded",
            )
        return asked or min(room, limits.output_tokens or room)

    def _begin(self, asked: Asked, name: str) -> Generation:
        if self.draining:
            raise ApiError(503, "The server is ending and takes no more requests.")
        if len(self._open) >= self.limits.concurrent_requests:
            raise ApiError(429, f"{len(self._open)} requests run or wait, as many as this server takes.")
        generation = Generation(
            self.router,
            self.codec.decode,
            asked,
            settled=partial(self._settled, name),
            queue_s=self.limits.queue_s,
        )
        self._open.add(generation)
        return generation

    def _settled(self, name: str, generation: Generation, completion: Completion) -> None:
        self._open.discard(generation)
        self.metrics.ended(completion, generation.outcome)
        LOG.info(
            "%s: %d prompt tokens, %d new ones, %s, replica %d",
            name,
            completion.input_tokens,
            len(completion.output_ids),
            generation.outcome,
            completion.replica,
        )
        if self.log_prompts:
            prompt, answer = self.codec.decode(generation.asked.input_ids), self.codec.decode(completion.output_ids)
            LOG.info("%s: %r was answered by %r", name, prompt, answer)


def _sampling(body: Body) -> Sampling:
    """As the body says; a seed that it does not name is drawn."""
    seed = secrets.randbits(63) if body.seed is None else body.seed
    temperature = 1.0 if body.temperature is None else body.temperature
    return Sampling(temperature, max(body.top_k or 0, 0), 1.0 if body.top_p is None else body.top_p, seed)
