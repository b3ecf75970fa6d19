"""The HTTP side of a server as an arm: asks, reads the stream as it comes, and says in a sentence what went wrong.

Nothing is ever sent twice: what fails is a failed request. A connection is kept for the next request, as clients do.
"""

from __future__ import annotations

import json
import ssl
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from skote.engines.endpoint_events import EventLines, TokenCount, error_text, read_event
from skote.types import EngineError, FinishReason, UsageError

if TYPE_CHECKING:
    import aiohttp

_READ_BUFFER = 2**20
_KEEP_ALIVE_S = 2.0  # shorter than servers keep an idle connection: uvicorn 5 s, others more
_PLAIN = {"Accept-Encoding": "identity"}  # a compressor gathers chunks before it gives any away


class Client:
    """Speaks to one server; made, used and closed in one event loop.

    Args:
        url: the base of its API.
        headers: sent with every request.
        trust: as `read_trust` gives it.
        connect_s, silence_s: seconds to make a connection, and without a byte.
    """

    def __init__(
        self,
        url: str,
        headers: Mapping[str, str],
        *,
        trust: ssl.SSLContext | bool,
        connect_s: float,
        silence_s: float,
    ) -> None:
        import aiohttp

        self._url = url
        self._silence_s = silence_s
        connector = aiohttp.TCPConnector(ssl=trust, limit=0, keepalive_timeout=_KEEP_ALIVE_S)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=connect_s, sock_read=silence_s)
        self._session = aiohttp.ClientSession(
            connector=connector, headers=_PLAIN | dict(headers), timeout=timeout, read_bufsize=_READ_BUFFER
        )

    async def close(self) -> None:
        """Close its connections."""
        await self._session.close()

    async def is_answered(self) -> bool:
        """Whether anybody answers there, whatever it says."""
        import aiohttp

        try:
            async with self._session.get(f"{self._url}/models", allow_redirects=False):
                return True
        except aiohttp.ClientConnectionError:
            return False

    async def models(self) -> list[str] | None:
        """The names of the served models, none where it lists none; None where nobody answers, or it is not ready.

        Raises:
            EngineError: it refuses, or answers with something else.
        """
        import aiohttp

        try:
            async with self._session.get(f"{self._url}/models", allow_redirects=False) as response:
                body = await response.read()
        except (aiohttp.ClientError, TimeoutError):
            return None
        if response.status in (502, 503):
            return None
        if response.status == 404:
            return []
        if response.status != 200:
            raise EngineError(f"{self._url}/models answers with HTTP {response.status}: {error_text(body)}.")
        try:
            return [str(each["id"]) for each in json.loads(body)["data"]]
        except (ValueError, TypeError, LookupError):
            raise EngineError(f"{self._url}/models is no list of models: is this the base of an OpenAI API?") from None

    async def stream(
        self, path: str, body: dict[str, Any], count: TokenCount, emit: Callable[[Sequence[int]], None]
    ) -> FinishReason:
        """Ask, and emit tokens as they come, which `count` counts; why the answer ended.

        Raises:
            EngineError: the server refused, broke off, or fell silent.
        """
        import aiohttp

        try:
            async with self._session.post(f"{self._url}{path}", json=body, allow_redirects=False) as response:
                if response.status != 200:
                    text = error_text(await response.read())
                    raise EngineError(f"The server answered with HTTP {response.status}: {text}.")
                if response.content_type != "text/event-stream":
                    raise EngineError(f"The server answered with {response.content_type}, and not with a stream.")
                reason = await _read(response.content, count, emit)
        except TimeoutError as error:  # before ClientError, some of which are both
            raise EngineError(
                f"The server was silent for {self._silence_s:g} s after {count.total} tokens, or took no connection."
            ) from error
        except aiohttp.ClientError as error:
            why = str(error).strip() or type(error).__name__
            raise EngineError(f"The connection broke after {count.total} tokens: {why.rstrip('.')}.") from error
        if not count.total:
            raise EngineError("The server ended the answer without a token.")
        return reason


async def _read(stream: aiohttp.StreamReader, count: TokenCount, emit: Callable[[Sequence[int]], None]) -> FinishReason:
    lines = EventLines()
    reason: FinishReason | None = None
    while received := await stream.readany():
        for data in lines.feed(received):
            if data == b"[DONE]":
                break
            event = read_event(data)
            ids = count.new_tokens(event)
            if ids:
                emit(ids)
            reason = event.finish_reason or reason
    if reason is None:
        raise EngineError(f"The stream ended after {count.total} tokens, and did not say why.")
    return reason


def read_trust(ca_file: str | None) -> ssl.SSLContext | bool:
    """Which certificates a server's is held against: those of `ca_file`, or True for the system's.

    Raises:
        UsageError: `ca_file` holds no certificates.
    """
    if ca_file is None:
        return True
    try:
        return ssl.create_default_context(cafile=Path(ca_file).expanduser())
    except (OSError, ssl.SSLError) as error:
        raise UsageError(f"endpoint.ca_file={ca_file} cannot be used: {error}.") from error
