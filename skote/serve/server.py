"""uvicorn with what it lacks: connections that bring nothing or take nothing are cut, and SIGTERM ends in time."""

from __future__ import annotations

import asyncio
import contextlib
import math
import signal
import socket
from collections.abc import Iterator
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from skote.serve.door import Door
from skote.serve.service import LOG, Service
from skote.types import UsageError

CUT_OFF_S = 5
"""From the end of the last requests to that of connections that do not go by themselves."""

SENT_AHEAD_BYTES = 2**16
"""Of further requests, that may lie there while one is answered."""


def bind(host: str, port: int) -> socket.socket:
    """A socket at an address that nobody else has, and at which nothing is answered yet.

    Raises:
        UsageError: it cannot be had.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # The protocol is named, or asyncio leaves TCP_NODELAY off: then each token after the first waits until the reader's
    # system has acknowledged the one before, which may be 40 ms.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise UsageError(f"The server cannot listen at host={host} port={port}: {error.strerror}.") from error
    return listener


class Server(uvicorn.Server):
    """Serves `app` until it is told to end; then what runs has `drain_s` seconds, and an error that says so after."""

    def __init__(self, app: Door, service: Service, *, drain_s: float) -> None:
        limits = service.limits

        class Protocol(_Watched):
            head_s, stalled_s = limits.upload_s, limits.stalled_s

        super().__init__(
            uvicorn.Config(
                app,
                http=Protocol,
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                limit_concurrency=limits.connections + 1,  # uvicorn counts the one that it refuses
                timeout_graceful_shutdown=math.ceil(drain_s) + CUT_OFF_S,
            )
        )
        self._service = service
        self._drain_s = drain_s

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn's; the log says where, once requests are taken."""
        await super().startup(sockets)
        for each in sockets or ():
            host, port = each.getsockname()[:2]
            place = f"[{host}]" if ":" in host else host
            LOG.info("%s is served at http://%s:%d", self._service.served.name, place, port)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn's; requests whose connection is open, and that have not begun, are refused from now on."""
        self._service.draining = True
        sentence = f"The server has ended, and the request had not within {self._drain_s:g} s (drain_s)."
        timer = asyncio.get_running_loop().call_later(self._drain_s, self._service.break_off, sentence)
        await super().shutdown(sockets)
        timer.cancel()


@contextlib.contextmanager
def sigterm_ends_a_server() -> Iterator[None]:
    """Within, SIGTERM is a server's to handle: uvicorn raises it again when it has, to end the process at once."""
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class _Watched(H11Protocol):
    """A connection whose request must begin and arrive in `head_s`, and that is cut where its reader takes nothing.

    The application finds `cut` in its scope's state, and uses it while it writes; what is left in the buffer when the
    answer is complete is watched here.
    """

    head_s: float
    stalled_s: float

    def connection_made(self, transport: Any) -> None:  # noqa: ANN401 - as uvicorn's
        super().connection_made(transport)
        self.app_state = {**self.app_state, "cut": transport.abort}
        self._timer: asyncio.TimerHandle | None = None
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._stop_timer()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._await_head()
        if self.conn.their_state is h11.DONE and len(self.conn.trailing_data[0]) < SENT_AHEAD_BYTES:
            self.flow.resume_reading()  # which uvicorn has paused for a request sent ahead: its reader may go, too

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._await_reader(self.transport.get_write_buffer_size())

    def _await_head(self) -> None:
        """Uvicorn watches between two requests; the first one, and one that has begun to come, are watched here."""
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop_timer()
        elif self._timer is None and not self.transport.is_closing():
            self._timer = self.loop.call_later(self.head_s, self.transport.abort)

    def _await_reader(self, left: int) -> None:
        """Cut the connection where nothing of what is `left` goes out in time."""
        if left:
            self._stop_timer()
            self._timer = self.loop.call_later(self.stalled_s, self._look_at_reader, left)

    def _look_at_reader(self, left_before: int) -> None:
        self._timer = None
        left = self.transport.get_write_buffer_size()
        if left >= left_before:
            self.transport.abort()
        else:
            self._await_reader(left)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
