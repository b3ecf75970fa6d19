"""What every HTTP request passes first: who may come in, and how much may be brought along."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
from collections.abc import Sequence
from pathlib import Path

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from skote.serve.errors import ApiError
from skote.serve.metrics import Metrics
from skote.types import UsageError

OPEN_PATHS = ("/health",)
"""Need no key: who watches a server need not be let in."""
_LOCAL_NAMES = ("localhost", "127.0.0.1", "[::1]")


def read_keys(file: Path) -> list[str]:
    """The keys of a file, one a line.

    Raises:
        UsageError: it cannot be read, or has no key.
    """
    try:
        keys = file.read_text(encoding="utf-8").split()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"api_key_file={file} cannot be read: {error}.") from error
    if not keys:
        raise UsageError(f"api_key_file={file} has no key: write one a line.")
    return keys


class Door:
    """An ASGI application around another one.

    A request comes in with one of `keys`, where there are any; without them the server is this machine's alone, and the
    name that it is called by must be, too: a page in somebody's browser may reach it by a name of its own. The body is
    read here, `body_bytes` of it in `upload_s` seconds at most, before the application sees the request.
    """

    def __init__(
        self, app: ASGIApp, *, keys: Sequence[str], body_bytes: int, upload_s: float, metrics: Metrics
    ) -> None:
        self._app = app
        self._keys = [_digest(key.encode()) for key in keys]
        self._body_bytes = body_bytes
        self._upload_s = upload_s
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """As ASGI 3, of requests alone: the server speaks no WebSocket and has no lifespan."""
        try:
            self._admit(scope["path"], Headers(scope=scope))
            body = await self._body(receive)
        except ApiError as refused:
            self._metrics.refused(refused.status)
            await refused.response(scope, receive, send)
            return
        if body is not None:
            await self._app(scope, _Replay(body, receive), send)

    def _admit(self, path: str, headers: Headers) -> None:
        declared = headers.get("content-length", "")
        if declared.isdecimal() and int(declared) > self._body_bytes:
            raise self._too_large()
        if not self._keys:
            host = headers.get("host", "localhost")
            name = host if host.endswith("]") else host.rpartition(":")[0] or host
            if name.lower() not in _LOCAL_NAMES:
                raise ApiError(403, "This server is for its own machine: call it localhost or 127.0.0.1.")
        elif path not in OPEN_PATHS:
            scheme, _, key = headers.get("authorization", "").partition(" ")
            sent = _digest(key.strip().encode("latin-1"))  # the bytes that were sent
            known = [hmac.compare_digest(sent, each) for each in self._keys]  # all of them, whichever it is
            if scheme.lower() != "bearer" or not any(known):
                raise ApiError(
                    401, "Send a key that this server knows: Authorization: Bearer KEY.", code="invalid_api_key"
                )

    async def _body(self, receive: Receive) -> bytes | None:
        """All of it; None where the client went away in the middle."""
        body = bytearray()
        try:
            async with asyncio.timeout(self._upload_s):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return None
                    body += message.get("body", b"")
                    if len(body) > self._body_bytes:
                        raise self._too_large()
                    if not message.get("more_body", False):
                        return bytes(body)
        except TimeoutError:
            raise ApiError(408, f"The request did not arrive within {self._upload_s:g} s.") from None

    def _too_large(self) -> ApiError:
        return ApiError(413, f"The body is larger than {self._body_bytes} bytes, the most that this server takes.")


class _Replay:
    """Gives the body at once, and after it what comes."""

    def __init__(self, body: bytes, receive: Receive) -> None:
        self._body: bytes | None = body
        self._receive = receive

    async def __call__(self) -> Message:
        if self._body is None:
            return await self._receive()
        body, self._body = self._body, None
        return {"type": "http.request", "body": body, "more_body": False}


def _digest(key: bytes) -> bytes:
    """Of one length, so that comparing two takes as long whatever they are."""
    return hashlib.sha256(key).digest()
