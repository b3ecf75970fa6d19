"""Any server that speaks the OpenAI API, as an arm: its answers are streamed, and stamped as they arrive."""

from __future__ import annotations

import asyncio
import importlib.util
import ssl
from collections.abc import Mapping, Sequence
from typing import Any

from skote.engines.endpoint_body import BodyWriter
from skote.engines.endpoint_caveats import Caveats
from skote.engines.endpoint_client import Client, NoAnswerError, read_trust
from skote.engines.endpoint_events import TokenCount
from skote.engines.endpoint_key import read_key
from skote.engines.endpoint_server import ServerProcess, command_names, with_port
from skote.engines.streaming import Answered, EmitRow, StreamingEngine
from skote.types import EngineError, Request, UsageError

_ASK_AGAIN_S = 0.1
_MOST_STREAMS = 1024
_SHOWN_MODELS = 12


class EndpointEngine(StreamingEngine):
    """A server behind the `Engine` protocol.

    Of the common arguments it reads `local_dir`, to send prompts as text; a command may name it, `device` and `dtype`.

    Args:
        url: the base of the API, such as http://127.0.0.1:8000/v1; port 0 is a free one, for a command to take.
        model: what the server calls it; None where it serves one alone.
        api, prompt, extensions, extra_body: as `BodyWriter`.
        key_file, key_variable: where the key is: a file, or an environment variable.
        headers: sent with every request, beside the key's.
        ca_file: certificates to trust, in place of the system's.
        connect_s: seconds that a connection may take to be made.
        silence_s: seconds without a byte after which a request has failed.
        command: a server to start, and to end with the replica; a line, or a list of words, in which {model}, {port},
            {python}, {device} and {dtype} stand for the run's.
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
        del threads, pad_id, max_model_len  # the server has its own
        if importlib.util.find_spec("aiohttp") is None:
            raise UsageError("engine=endpoint needs the package aiohttp: pip install 'skotergy[endpoint]'.")
        if not url.startswith(("http://", "https://")):
            raise UsageError(f"endpoint.url={url} must begin with http:// or https://, and end with the API's /v1.")
        if min(connect_s, silence_s, ready_s) <= 0:
            raise UsageError(f"An endpoint's times must be above 0 s, got {connect_s=}, {silence_s=}, {ready_s=}.")
        self._url = with_port(url.rstrip("/"), has_command=command is not None)
        self._writer = BodyWriter(
            api=api, prompt=prompt, extensions=extensions, local_dir=local_dir, extra=dict(extra_body or {})
        )
        key = read_key(key_file, key_variable)
        sent = dict(headers or {}) | ({"Authorization": f"Bearer {key}"} if key else {})
        self._texts: dict[tuple[tuple[int, ...], int], str] = {}
        self._caveats = Caveats(extensions=extensions)
        trust = read_trust(ca_file)
        super().__init__()
        self._client: Client = self._runner.run(
            _connect(self._url, sent, trust=trust, connect_s=connect_s, silence_s=silence_s)
        )
        self._server: ServerProcess | None = None
        self._closing.callback(_close, self._runner, self._client)
        try:
            if command is not None:
                whole = local_dir if random_seed is None and layers is None else None
                self._server = self._start(command, command_names(self._url, whole, device, dtype))
            self._model = self._runner.run(self._served_model(model, ready_s))
        except BaseException:
            self.close()
            if self._server is not None:
                self._server.close()
            raise

    @property
    def rows(self) -> int:
        """How many requests it can have under way; how many it gets is the router's choice."""
        return _MOST_STREAMS

    @property
    def ends_at_stops(self) -> bool:
        """As `StoppingEngine.ends_at_stops`: the server does."""
        return True

    def answer(self, request: Request) -> str:
        """The text of the last answer of that length to the prompt of `request`, whose ids the server did not tell.

        Raises:
            EngineError: there was none.
        """
        asked = request.input_ids, request.max_new_tokens  # a prompt may be asked again, for less of an answer
        if asked not in self._texts:
            raise EngineError(f"The server has given no answer without ids to request {request.request_id}.")
        return self._texts[asked]

    def describe(self) -> dict[str, Any]:
        """As `Engine.describe`; the caveats are of all that was asked so far."""
        return {
            "tier": None,
            "tier_reason": f"{self._model} at {self._url}{self._writer.path}",
            "compile_s": None,
            "notes": [],
            "caveats": self._caveats.sentences(),
            "paths": {},
            "scores": False,
        }

    def _start(self, command: str | Sequence[str], names: Mapping[str, str]) -> ServerProcess:
        if "model" not in names and "{model}" in str(command):
            raise UsageError(
                "The server's command names {model}, a checkpoint, and this run's model has random weights or is cut "
                "(model.layers): choose model=smollm2_135m, or model=local model.path=DIR."
            )
        if self._runner.run(self._client.is_answered()):
            raise UsageError(
                f"Something answers at endpoint.url={self._url} before endpoint.command was started: end it, or choose "
                "another port for both."
            )
        return ServerProcess(command, names)

    async def _served_model(self, model: str | None, ready_s: float) -> str:
        """The name of the model, once the server lists its models; it is waited for where this replica started it."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + ready_s
        while True:
            try:
                listed = await self._client.models()
                break
            except NoAnswerError as error:
                if self._server is None:
                    raise
                self._server.check()
                if loop.time() > deadline:
                    raise EngineError(
                        f"The server does not answer at {self._url} after {ready_s:g} s (endpoint.ready_s)."
                    ) from error
            await asyncio.sleep(_ASK_AGAIN_S)
        shown = f"{', '.join(listed[:_SHOWN_MODELS])}{' and others' * (len(listed) > _SHOWN_MODELS)}" or "none"
        if model is not None:
            if listed and model not in listed:
                raise UsageError(f"The server at {self._url} has no model {model} (endpoint.model): it lists {shown}.")
            return model
        if len(listed) != 1:
            raise UsageError(f"The server at {self._url} lists {len(listed)} models ({shown}): give endpoint.model.")
        return listed[0]

    async def answer_one(self, request: Request, emit: EmitRow) -> Answered:
        """As `StreamingEngine.answer_one`, over a connection of its own.

        Raises:
            EngineError: the server refused it, broke off, or fell silent.
        """
        count = TokenCount()
        reason = await self._client.stream(self._writer.path, self._writer.body(request, self._model), count, emit)
        self._caveats.note(request, count)
        if not count.ids_known:
            self._texts[request.input_ids, request.max_new_tokens] = "".join(count.pieces)
        return Answered(reason, count.cached_tokens)


async def _connect(
    url: str, headers: Mapping[str, str], *, trust: ssl.SSLContext | bool, connect_s: float, silence_s: float
) -> Client:
    return Client(url, headers, trust=trust, connect_s=connect_s, silence_s=silence_s)


def _close(runner: asyncio.Runner, client: Client) -> None:
    runner.run(client.close())
