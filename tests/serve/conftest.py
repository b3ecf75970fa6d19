"""A server in a thread of the test's process, over a router whose replica echoes prompts byte by byte."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import openai
import pytest

from skote.runtime.router import Router
from skote.serve.app import build_app
from skote.serve.metrics import Metrics
from skote.serve.server import Server, bind
from skote.serve.service import Served, Service
from skote.serve.settings import Limits
from skote.types import EngineSpec, RequestError

WAIT_S = 30.0
CONTEXT = 4096
ENGINE = '''
"""Says its prompt again and again, a token every `token_ms`; 0 is the end of sequence, 1 breaks it, 2 ends it."""

import os
import time

class Echo:
    def __init__(self, *, token_ms=0.0, **options):
        self.token_s = token_ms / 1000

    def generate(self, requests, emit):
        reasons = []
        for row, request in enumerate(requests):
            ids = request.input_ids
            reasons.append("length")
            for index in range(request.max_new_tokens):
                token = ids[index % len(ids)]
                if token == 1:
                    raise RuntimeError("told to break")
                if token == 2:
                    os._exit(70)
                emit(row, [token])
                if token == 0 and not request.ignore_eos:
                    reasons[-1] = "stop"
                    break
                time.sleep(self.token_s)
        return reasons

    def describe(self):
        return {}
'''


class ByteCodec:
    """A token a byte; 0 is no text."""

    pad_id = 0
    has_chat_template = True

    def encode(self, text: str) -> tuple[int, ...]:
        return tuple(text.encode())

    encode_chat = encode

    def encode_messages(self, messages: Sequence[Mapping[str, str]]) -> tuple[int, ...]:
        if messages[0]["role"] == "assistant":
            raise RequestError("The model's chat template refuses a conversation: a user speaks first.")
        return self.encode("".join(turn["content"] for turn in messages))

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(token for token in ids if 0 < token < 256).decode("utf-8", errors="replace")


@dataclass
class Live:
    """A server that runs."""

    url: str
    port: int
    service: Service
    server: Server
    router: Router
    clients: ExitStack

    def client(self, key: str = "none") -> openai.OpenAI:
        client = openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=WAIT_S)
        return self.clients.enter_context(client)


@pytest.fixture(scope="session")
def echo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The import path of the echoing engine."""
    folder = tmp_path_factory.mktemp("engines")
    (folder / "echo_engine.py").write_text(ENGINE, encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        yield "echo_engine.Echo"


@contextmanager
def running(
    router: Router, limits: Limits, *, keys: Sequence[str] = (), drain_s: float = 30.0, **options: Any
) -> Iterator[Live]:
    service = Service(router, ByteCodec(), Served("echo", CONTEXT, 256), limits, Metrics(router), **options)
    server = Server(build_app(service, keys=keys), service, drain_s=drain_s)
    with bind("127.0.0.1", 0) as listener:
        listener.listen()  # so that whoever connects before the thread is there waits for it
        port = listener.getsockname()[1]
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        try:
            with ExitStack() as clients:
                yield Live(f"http://127.0.0.1:{port}", port, service, server, router, clients)
        finally:
            server.should_exit = True
            thread.join(WAIT_S)
            assert not thread.is_alive()


@pytest.fixture(scope="module")
def start(echo: str) -> Iterator[Callable[..., Live]]:
    """`start(limits=, keys=, token_ms=, engine=, ...)`: a server that lives as long as the module's tests."""
    with ExitStack() as stack:

        def open_server(
            *,
            limits: Limits | None = None,
            keys: Sequence[str] = (),
            token_ms: float = 0.0,
            drain_s: float = 30.0,
            devices: Sequence[str] = ("cpu",),
            log_prompts: bool = False,
            engine: EngineSpec | None = None,
            **options: Any,
        ) -> Live:
            spec = engine or EngineSpec(echo, {"token_ms": token_ms})
            router = stack.enter_context(Router(".", list(devices), engine=spec, codec=ByteCodec(), **options))
            return stack.enter_context(
                running(router, limits or Limits(), keys=keys, drain_s=drain_s, log_prompts=log_prompts)
            )

        yield open_server


@pytest.fixture(scope="module")
def live(start: Callable[..., Live]) -> Live:
    """A server without delays."""
    return start()
