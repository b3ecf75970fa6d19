"""Any server that speaks the OpenAI API, as an arm: its answers are streamed, and stamped as they arrive.

Nothing is ever sent twice: what fails is a failed request. A connection is kept for the next request, as clients do.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from skote.engines.endpoint_body import BodyWriter
from skote.engines.endpoint_events import EventLines, TokenCount, error_text, read_event
from skote.engines.endpoint_key import read_key
from skote.engines.endpoint_notes import Notes
from skote.engines.endpoint_server import ServerProcess
from skote.types import Emit, EngineError, FinishReason, Request, UsageError

if TYPE_CHECKING:
    import aiohttp
    import numpy as np
    from numpy.typing import NDArray

_READ_BUFFER = 2**20
_KEEP_ALIVE_S = 2.0  # shorter than servers keep an idle connection: uvicorn 5 s, others more
_ASK_AGAIN_S = 0.1


class EndpointEngine:
    """A server behind the `Engine` protocol. Of the common arguments only `local_dir` is read, to send prompts as text.

    Args:
        url: the base of the API, such as http://127.0.0.1:8000/v1.
        model: what the server calls it; None where it serves one alone.
        api, prompt, extensions, extra_body: as `BodyWriter`.
        key_file, key_variable: where the key is: a file, or an environment variable.
        headers: sent with every request, beside the key's.
        ca_file: certificates to trust, in place of the system's.
        connect_s: seconds that a connection may take to be made.
        silence_s: seconds without a byte after which a request has failed.
        command: a server to start, and to end with the replica; a line, or a list of words.
        ready_s: seconds that such a server may take to answer.

    Raises:
        UsageError: an option that is wrong, or no aiohttp.
        EngineError: no server answers, or it does not serve the model.
    """

    def __init__(
        self,
        *,
        url: str,
        local_dir: str | None = None,
        device: str = "cpu",
        dtype: str = "fp32",
        threads: int | None = None,
        random_seed: int | None = None,
        layers: int | None = None,
        pad_id: int | None = None,
        max_model_len: int | None = None,
        model: str | None = None,
        api: str = "completions",
        prompt: str = "ids",
        extensions: bool = True,
        extra_body: Mapping[str, Any] | None = None,
        key_file: str | None = None,
        key_variable: str | None = None,
        headers: Mapping[str, str] | None = None,
        ca_file: str | None = None,
        connect_s: float = 10.0,
        silence_s: float = 600.0,
        command: str | Sequence[str] | None = None,
        ready_s: float = 600.0,
    ) -> None:
        del device, dtype, threads, random_seed, layers, pad_id, max_model_len  # the server has its own
        try:
            import aiohttp
        except ModuleNotFoundError as missing:
            raise UsageError(f"engine=endpoint needs {missing.name}: pip install 'skotergy[endpoint]'.") from missing
        if not url.startswith(("http://", "https://")):
            raise UsageError(f"endpoint.url={url} must begin with http:// or https://, and end with the API's /v1.")
        if min(connect_s, silence_s, ready_s) <= 0:
            raise UsageError(f"An endpoint's times must be above 0 s, got {connect_s=}, {silence_s=}, {ready_s=}.")
        self._url = url.rstrip("/")
        self._api = api
        self._writer = BodyWriter(
            api=api, prompt=prompt, extensions=extensions, local_dir=local_dir, extra=dict(extra_body or {})
        )
        key = read_key(key_file, key_variable)
        self._silence_s = silence_s
        self._notes = Notes(extensions=extensions)
        self._runner = asyncio.Runner()
        self._session: aiohttp.ClientSession = self._runner.run(
            _open_session(
                dict(headers or {}) | ({"Authorization": f"Bearer {key}"} if key else {}),
                _trust(ca_file),
                aiohttp.ClientTimeout(total=None, sock_connect=connect_s, sock_read=silence_s),
            )
        )
        self._server: ServerProcess | None = None
        self.close = weakref.finalize(self, _close, self._runner, self._session)
        try:
            if command is not None:
                self._server = self._start(command)
            self._model = self._runner.run(self._served_model(model, ready_s))
        except BaseException:
            self.close()
            if self._server is not None:
                self._server.close()
            raise

    def generate(self, requests: Sequence[Request], emit: Emit) -> list[FinishReason]:
        """As `Engine.generate`: all of `requests` at once, each over a connection of its own.

        Raises:
            EngineError: the server refused one, broke off, or fell silent.
        """
        return self._runner.run(self._generate(requests, emit))

    def score(self, request: Request, forced_ids: Sequence[int]) -> NDArray[np.float32]:
        """Not to be had.

        Raises:
            EngineError: always: a server hands over no logits.
        """
        del request, forced_ids
        raise EngineError("A server hands over tokens and no logits: nothing can be scored there.")

    def describe(self) -> dict[str, Any]:
        """As `Engine.describe`; the notes are of all that was asked so far."""
        return {
            "tier": None,
            "tier_reason": f"{self._model} at {self._url}{self._writer.path}",
            "compile_s": None,
            "notes": self._notes.sentences(),
            "paths": {},
            "scores": False,
        }

    def _start(self, command: str | Sequence[str]) -> ServerProcess:
        if self._runner.run(self._is_answered()):
            raise UsageError(
                f"Something answers at endpoint.url={self._url} before endpoint.command was started: end it, or choose "
                "another port for both."
            )
        return ServerProcess(command)

    async def _is_answered(self) -> bool:
        import aiohttp

        try:
            async with self._session.get(f"{self._url}/models"):
                return True
        except aiohttp.ClientConnectionError:
            return False

    async def _served_model(self, model: str | None, ready_s: float) -> str:
        """The name of the model, once the server lists its models; it is waited for where this replica started it."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + ready_s
        while (answer := await self._ask_models()) is None:
            if self._server is None:
                raise EngineError(f"Nothing answers at {self._url}: start a server there, or give endpoint.command.")
            self._server.check()
            if loop.time() > deadline:
                raise EngineError(f"The server does not answer at {self._url} after {ready_s:g} s (endpoint.ready_s).")
            await asyncio.sleep(_ASK_AGAIN_S)
        if model is not None:
            return model
        if len(answer) != 1:
            listed = ", ".join(answer[:5]) or "none"
            raise UsageError(f"The server at {self._url} lists {len(answer)} models ({listed}): give endpoint.model.")
        return answer[0]

    async def _ask_models(self) -> list[str] | None:
        """The names of the served models; None where nobody answers, or the server is not ready."""
        import aiohttp

        try:
            async with self._session.get(f"{self._url}/models", allow_redirects=False) as response:
                body = await response.read()
        except (aiohttp.ClientError, TimeoutError):
            return None
        if response.status in (502, 503) and self._server is not None:
            return None
        if response.status == 404:
            return []
        if response.status != 200:
            raise EngineError(f"{self._url}/models answers with HTTP {response.status}: {error_text(body)}.")
        try:
            return [str(each["id"]) for each in json.loads(body)["data"]]
        except (ValueError, TypeError, LookupError):
            raise EngineError(f"{self._url}/models is no list of models: is this the base of an OpenAI API?") from None

    async def _generate(self, requests: Sequence[Request], emit: Emit) -> list[FinishReason]:
        await asyncio.sleep(0)  # what servers closed while nothing ran here is seen before a connection is chosen
        tasks = [
            asyncio.ensure_future(self._answer(request, partial(emit, row))) for row, request in enumerate(requests)
        ]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()

    async def _answer(self, request: Request, emit: Callable[[Sequence[int]], None]) -> FinishReason:
        """Ask, and emit what comes; why it ended."""
        import aiohttp

        body = self._writer.body(request, self._model)
        count = TokenCount()
        try:
            async with self._session.post(
                f"{self._url}{self._writer.path}", json=body, allow_redirects=False
            ) as response:
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
        self._notes.note(request, count)
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


async def _open_session(
    headers: dict[str, str], trust: ssl.SSLContext | bool, timeout: aiohttp.ClientTimeout
) -> aiohttp.ClientSession:
    import aiohttp

    connector = aiohttp.TCPConnector(ssl=trust, limit=0, keepalive_timeout=_KEEP_ALIVE_S)
    return aiohttp.ClientSession(connector=connector, headers=headers, timeout=timeout, read_bufsize=_READ_BUFFER)


def _trust(ca_file: str | None) -> ssl.SSLContext | bool:
    if ca_file is None:
        return True
    try:
        return ssl.create_default_context(cafile=Path(ca_file).expanduser())
    except (OSError, ssl.SSLError) as error:
        raise UsageError(f"endpoint.ca_file={ca_file} cannot be used: {error}.") from error


def _close(runner: asyncio.Runner, session: aiohttp.ClientSession) -> None:
    runner.run(session.close())
    runner.close()
