"""How an answer goes out: whole or as events, watched so that a reader who is gone or stuck holds up nobody."""

from __future__ import annotations

import asyncio
import json
from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from skote.serve.errors import ApiError
from skote.serve.generation import Generation, Piece, ReaderGoneError
from skote.serve.replies import Reply, usage_of

Begin = Callable[[], Generation]
"""Hands the request to the router, or raises `ApiError`."""
_DONE = b"data: [DONE]\n\n"


class Answering(Response):
    """Runs a request while its answer is sent.

    Nothing is sent before there is something to say, so that a failure until then has its own status. A reader that
    goes, or that takes nothing for `stalled_s` seconds while there is more for it than buffers hold, is dropped, and
    its request with it.
    """

    def __init__(self, begin: Begin, reply: Reply, stalled_s: float) -> None:
        super().__init__()
        self._begin = begin
        self._reply = reply
        self._stalled_s = stalled_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """As ASGI 3."""
        generation = self._begin()
        watch = asyncio.create_task(_watch(receive, generation))
        try:
            await self._answer(generation, _Pipe(scope, send, self._reply.id, self._stalled_s))
        except _StalledError:
            await watch  # the connection is being cut: it ends
        except ReaderGoneError:
            pass
        finally:
            watch.cancel()
            generation.close()

    @abstractmethod
    async def _answer(self, generation: Generation, pipe: _Pipe) -> None: ...

    def _usage(self, generation: Generation) -> dict[str, Any]:
        completion = generation.completion
        cached = None if completion is None else completion.cached_tokens
        return usage_of(len(generation.asked.input_ids), generation.output_tokens, cached)


class Whole(Answering):
    """The answer as one JSON object."""

    async def _answer(self, generation: Generation, pipe: _Pipe) -> None:
        pieces = [piece async for piece in generation.pieces()]
        await pipe.start("application/json")
        await pipe.write(_json(self._reply.whole(pieces, self._usage(generation))), more=False)


class Events(Answering):
    """The answer as server-sent events; a failure after the first one is an event, too, and the last."""

    async def _answer(self, generation: Generation, pipe: _Pipe) -> None:
        pieces = generation.pieces()
        first = await anext(pieces)
        await pipe.start("text/event-stream; charset=utf-8")
        try:
            await self._send(generation, pipe, first, first=True)
            async for piece in pieces:
                await self._send(generation, pipe, piece, first=False)
        except ApiError as error:
            await pipe.write(_event(error.content), more=False)

    async def _send(self, generation: Generation, pipe: _Pipe, piece: Piece, *, first: bool) -> None:
        last = piece.finish_reason is not None
        if not (piece.text or first or last or self._reply.counts_tokens):
            return
        usage = self._usage(generation)
        events = [self._reply.chunk(piece, usage, first=first)]
        if last and self._reply.usage:
            events.append(self._reply.last_chunk(usage))
        await pipe.write(b"".join(map(_event, events)) + (_DONE if last else b""), more=not last)


class _StalledError(Exception):
    """A reader takes nothing; its connection has been cut."""


class _Pipe:
    """Writes a response, and cuts the connection of a reader that takes nothing."""

    def __init__(self, scope: Scope, send: Send, name: str, stalled_s: float) -> None:
        self._cut: Callable[[], None] = scope["state"]["cut"]
        self._send = send
        self._name = name
        self._stalled_s = stalled_s

    async def start(self, media_type: str) -> None:
        headers = [
            (b"content-type", media_type.encode()),
            (b"cache-control", b"no-store"),
            (b"x-request-id", self._name.encode()),
        ]
        await self._put({"type": "http.response.start", "status": 200, "headers": headers})

    async def write(self, body: bytes, *, more: bool) -> None:
        await self._put({"type": "http.response.body", "body": body, "more_body": more})

    async def _put(self, message: Message) -> None:
        try:
            async with asyncio.timeout(self._stalled_s):
                await self._send(message)
        except TimeoutError:
            self._cut()
            raise _StalledError from None


async def _watch(receive: Receive, generation: Generation) -> None:
    """Tell the generation when its reader is gone. The body has been read: nothing else can come."""
    while (await receive())["type"] != "http.disconnect":
        pass
    generation.leave()


def _json(content: Mapping[str, Any]) -> bytes:
    return json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode()


def _event(content: Mapping[str, Any]) -> bytes:
    return b"data: " + _json(content) + b"\n\n"
