"""A server that plays chunks back, each after its gap, over real connections."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest


@dataclass
class Play:
    """One answer: `parts` are written one by one, each after its seconds; `cut` closes the connection in mid-answer.

    A part that is no bytes is written as the event of that JSON.
    """

    parts: Sequence[tuple[float, bytes | dict[str, Any]]]
    status: int = 200
    content_type: str = "text/event-stream"
    cut: bool = False


@dataclass
class Asked:
    """A request that came."""

    path: str
    headers: dict[str, str]
    body: dict[str, Any]


@dataclass
class FakeServer:
    """Answers its nth request with `plays[n]`, the last of them from then on.

    Attributes:
        models: what it lists; bytes are sent as they are.
        asked: the requests that came.
        connections: how many were made.
        over: the test has ended, and what is being played with it.
    """

    plays: list[Play] = field(default_factory=list)
    models: tuple[str, ...] = ("tiny",)
    models_status: int = 200
    asked: list[Asked] = field(default_factory=list)
    connections: int = 0
    over: threading.Event = field(default_factory=threading.Event)
    url: str = ""


def _handler(server: FakeServer) -> type[BaseHTTPRequestHandler]:
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def setup(self) -> None:
            super().setup()
            with lock:
                server.connections += 1

        def log_message(self, *_: Any) -> None:
            pass

        def do_GET(self) -> None:
            listed = {"data": [{"id": name} for name in server.models]}
            content = json.dumps(listed if server.models_status == 200 else {"error": {"message": "no key"}}).encode()
            self.send_response(server.models_status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with lock:
                play = server.plays[min(len(server.asked), len(server.plays) - 1)]
                server.asked.append(Asked(self.path, dict(self.headers), body))
            self.send_response(play.status)
            self.send_header("Content-Type", play.content_type)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            self.close_connection = play.cut
            with contextlib.suppress(ConnectionError):  # the reader has gone
                for gap_s, part in play.parts:
                    if server.over.wait(gap_s):
                        return
                    content = part if isinstance(part, bytes) else b"data: " + json.dumps(part).encode() + b"\n\n"
                    self.wfile.write(b"%x\r\n%s\r\n" % (len(content), content))
                if not play.cut:
                    self.wfile.write(b"0\r\n\r\n")

    return Handler


@pytest.fixture
def fake_server() -> Iterator[Callable[..., FakeServer]]:
    """`fake_server(*plays, models=)`: a server on a free port, ended with the test."""
    running: list[tuple[FakeServer, ThreadingHTTPServer, threading.Thread]] = []

    def start(*plays: Play, **options: Any) -> FakeServer:
        server = FakeServer(list(plays), **options)
        http = ThreadingHTTPServer(("127.0.0.1", 0), _handler(server))
        thread = threading.Thread(target=http.serve_forever, args=(0.01,))
        thread.start()
        running.append((server, http, thread))
        server.url = f"http://127.0.0.1:{http.server_port}/v1"
        return server

    yield start
    for server, http, thread in running:
        server.over.set()
        http.shutdown()
        thread.join()
        http.server_close()


@pytest.fixture
def play() -> type[Play]:
    """`play(parts, status=, content_type=, cut=)`: an answer."""
    return Play
