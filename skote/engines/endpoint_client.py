"""The HTTP side of a server as an arm: asks, reads the stream as it comes, and says in a sentence what went wrong.

Nothing is ever sent twice: what fails is a failed request. A connection is kept for the next request, as clients do.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from skote.engines.endpoint_events import EventLines, TokenCount, error_text, read_event
from skote.types import EngineError, FinishReason, UsageError

if TYPE_CHECKING:
    import aiohttp

_READ_BUFFER = 2**20
_KEEP_ALIVE_S = 2.0  # shorter than servers keep an idle connection: uvicorn 5 s, others more
_CLOSE_S = 0.05  # for a response to end after its [DONE]: servers take a fraction of a millisecond
_PLAIN = {"Accept-Encoding": "identity"}  # a compressor gathers chunks before it gives any away


class NoAnswerError(EngineError):
    """No server answers, or it is not ready: asked later it may."""


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
        self._at_once = aiohttp.ClientTimeout(total=None, sock_connect=connect_s, sock_read=connect_s)
        connector = aiohttp.TCPConnector(ssl=trust, limit=0, keepalive_timeout=_KEEP_ALIVE_S)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=connect_s, sock_read=silence_s)
        self._session = aiohttp.ClientSession(
            connector=connector, headers=_PLAIN | dict(headers), timeout=timeout, read_bufsize=_READ_BUFFER
        )

    async def close(self) -> None:
        """Close its connections."""
        await self._session.close()

    async def is_answered(self) -> bool:
        """Whether anybody listens there, whatever it says."""
        import aiohttp

        try:
            async with self._list():
                return True
        except aiohttp.ClientSSLError:
            return True
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError):
            return False
        except (aiohttp.ClientError, TimeoutError):
            return True

    async def models(self) -> list[str]:
        """The names of the served models, none where it lists none.

        Raises:
            NoAnswerError: nobody answers, or it is not ready.
            UsageError: its certificate is not trusted, or what listens there speaks another protocol.
            EngineError: it refuses, or answers with something else.
        """
        import aiohttp

        url = self._url
        try:
            async with self._list() as response:
                body = await response.read()
        except aiohttp.ClientConnectorCertificateError as error:
            found = error.certificate_error
            why = found.verify_message if isinstance(found, ssl.SSLCertVerificationError) else found
            raise UsageError(
                f"The certificate of endpoint.url={url} is not trusted ({why}): name a file with those to trust in "
                "endpoint.ca_file."
            ) from error
        except aiohttp.ClientSSLError as error:
            raise UsageError(
                f"What listens at endpoint.url={url} speaks no TLS that this client knows ({error.strerror}): try http://."
            ) from error
        except aiohttp.ClientResponseError as error:
            raise UsageError(
                f"What listens at endpoint.url={url} speaks no HTTP: give the port of an OpenAI API, and https:// "
                "where it has TLS."
            ) from error
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            raise NoAnswerError(f"Nothing answers at {url}: start a server there, or give endpoint.command.") from error
        except (aiohttp.ClientError, TimeoutError) as error:
            raise NoAnswerError(
                f"What listens at {url} takes connections and does not answer: give the port of an OpenAI API, and "
                "https:// where it has TLS."
            ) from error
        if response.status in (502, 503):
            raise NoAnswerError(f"{url}/models answers with HTTP {response.status}, not ready: {error_text(body)}.")
        if response.status == 404:
            return []
        if response.status != 200:
            raise EngineError(f"{url}/models answers with HTTP {response.status}: {error_text(body)}.")
        try:
            return [str(each["id"]) for each in json.loads(body)["data"]]
        except (ValueError, TypeError, LookupError):
            raise EngineError(f"{url}/models is no list of models: is this the base of an OpenAI API?") from None

    def _list(self) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        return self._session.get(f"{self._url}/models", allow_redirects=False, timeout=self._at_once)

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


async def _rest(stream: aiohttp.StreamReader) -> None:
    """Wait for the end of a response that has said [DONE], so that its connection can be kept; not for long."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_CLOSE_S):
            while await stream.readany():
                pass


async def _read(stream: aiohttp.StreamReader, count: TokenCount, emit: Callable[[Sequence[int]], None]) -> FinishReason:
    lines = EventLines()
    reason: FinishReason | None = None
    while received := await stream.readany():
        for data in lines.feed(received):
            if data == b"[DONE]":
                await _rest(stream)
                return _said(reason, count)
            event = read_event(data)
            ids = count.new_tokens(event)
            if ids:
                emit(ids)
            reason = event.finish_reason or reason
    return _said(reason, count)


def _said(reason: FinishReason | None, count: TokenCount) -> FinishReason:
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
