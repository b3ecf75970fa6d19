"""Readers who go or get stuck, and senders who never finish: nothing of theirs is left within a second."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import openai
import pytest

from skote.serve.settings import Limits

WAIT_S = 30.0
SOON_S = 1.0


@pytest.fixture(scope="module")
def slow(start: Callable[..., Any]) -> Any:
    """20 ms a token, three requests at a time in all."""
    return start(token_ms=20.0, limits=Limits(concurrent_requests=3, stalled_s=0.3, upload_s=0.5))


@pytest.fixture
def connect() -> Iterator[Callable[..., socket.socket]]:
    """`connect(live, head, body)`: a connection on which a request has been sent."""
    opened: list[socket.socket] = []

    def open_connection(live: Any, data: bytes = b"", buffer: int | None = None) -> socket.socket:
        connection = socket.socket()
        if buffer is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
        connection.settimeout(WAIT_S)
        connection.connect(("127.0.0.1", live.port))
        connection.sendall(data)
        opened.append(connection)
        return connection

    yield open_connection
    for connection in opened:
        connection.close()


def post(body: dict[str, Any], path: str = "/v1/completions", length: int | None = None) -> bytes:
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: "
    return f"{head}{len(content) if length is None else length}\r\n\r\n".encode() + content


def rest(connection: socket.socket) -> bytes:
    """What comes until the other side hangs up, one way or the other."""
    got = bytearray()
    with contextlib.suppress(ConnectionResetError):
        while data := connection.recv(2**20):
            got += data
    return bytes(got)


def read_to(connection: socket.socket, end: bytes) -> bytes:
    """What comes until `end` is among it."""
    got = bytearray()
    while end not in got:
        data = connection.recv(10_000)
        assert data, f"the other side hung up after {bytes(got)!r}"
        got += data
    return bytes(got)


def until(condition: Callable[[], bool], seconds: float) -> bool:
    """Whether the condition comes true in time; it is looked at again and again."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.002)
    return True


def nothing_runs(live: Any) -> bool:
    return live.service.open == 0 and all(load.running == load.waiting == 0 for load in live.router.loads)


@pytest.mark.parametrize("stream", [False, True])
def test_the_slot_of_a_reader_who_goes_is_free_within_a_second(slow: Any, connect: Any, stream: bool) -> None:
    connection = connect(slow, post({"prompt": "abc", "max_tokens": 2000, "stream": stream}))
    assert until(lambda: slow.router.loads[0].running == 1, WAIT_S)
    if stream:
        assert connection.recv(100).startswith(b"HTTP/1.1 200 OK")
    connection.close()
    assert until(lambda: nothing_runs(slow), SOON_S)


def test_a_reader_who_goes_while_he_waits_is_dropped_too(slow: Any, connect: Any) -> None:
    first, second = (connect(slow, post({"prompt": "abc", "max_tokens": 2000})) for _ in range(2))
    assert until(lambda: slow.router.loads[0].waiting == 1, WAIT_S)
    second.close()
    assert until(lambda: slow.router.loads[0].waiting == 0, SOON_S)
    assert slow.router.loads[0].running == 1
    first.close()
    assert until(lambda: nothing_runs(slow), SOON_S)


@pytest.mark.parametrize("size", [1, 100, 30_000])
def test_a_reader_who_has_sent_ahead_may_go_too(slow: Any, connect: Any, size: int) -> None:
    connection = connect(slow, post({"prompt": "abc", "max_tokens": 2000}))
    assert until(lambda: slow.router.loads[0].running == 1, WAIT_S)
    connection.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\nx: ".ljust(size, b"x"))
    connection.close()
    assert until(lambda: nothing_runs(slow), SOON_S)


def test_what_was_sent_ahead_is_answered_in_its_turn(slow: Any, connect: Any) -> None:
    health = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"
    connection = connect(slow, post({"prompt": "abc", "max_tokens": 5}) + health)
    connection.sendall(health)
    answers = b""
    while answers.count(b'"replicas":1}') < 2:
        answers += connection.recv(10_000)
    assert answers.index(b'"completion_tokens":5') < answers.index(b'"replicas":1}')
    assert answers.count(b"HTTP/1.1 200") == 3


def test_openais_client_frees_the_slot_by_leaving_the_stream(slow: Any) -> None:
    with slow.client().completions.create(model="echo", prompt="abc", max_tokens=2000, stream=True) as stream:
        next(iter(stream))
    assert until(lambda: nothing_runs(slow), SOON_S)


def test_what_comes_beyond_the_limit_is_told_to_come_again(slow: Any, connect: Any) -> None:
    connections = [connect(slow, post({"prompt": "abc", "max_tokens": 2000})) for _ in range(3)]
    assert until(lambda: slow.service.open == 3, WAIT_S)
    with pytest.raises(openai.RateLimitError, match="3 requests run or wait, as many as this server takes") as refused:
        slow.client().completions.create(model="echo", prompt="a")
    assert refused.value.response.headers["retry-after"] == "1"
    for connection in connections:
        connection.close()
    assert until(lambda: nothing_runs(slow), SOON_S)
    assert slow.client().completions.create(model="echo", prompt="a", max_tokens=1).choices[0].text == "a"


def test_connections_beyond_the_limit_are_refused(start: Callable[..., Any], connect: Any) -> None:
    live = start(limits=Limits(connections=2))
    health = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"
    for _ in range(2):
        assert connect(live, health).recv(1000).startswith(b"HTTP/1.1 200")
    assert rest(connect(live, health)).startswith(b"HTTP/1.1 503")


def test_a_server_that_ends_takes_nothing_new(slow: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slow.service, "draining", True)
    with pytest.raises(openai.InternalServerError, match="The server is ending and takes no more requests") as refused:
        slow.client().completions.create(model="echo", prompt="a")
    assert refused.value.status_code == 503


def test_who_waits_too_long_is_told_so(start: Callable[..., Any], connect: Any) -> None:
    live = start(token_ms=20.0, limits=Limits(queue_s=0.1))
    connection = connect(live, post({"prompt": "abc", "max_tokens": 2000}))
    assert until(lambda: live.router.loads[0].running == 1, WAIT_S)
    with pytest.raises(openai.InternalServerError, match=r"No replica was free for 0\.1 s") as refused:
        live.client().completions.create(model="echo", prompt="a")
    assert refused.value.status_code == 503
    assert live.router.loads[0].running == 1  # for whom it has begun the time does not count
    connection.close()


def test_a_reader_who_takes_nothing_is_cut_off_and_his_slot_free(start: Callable[..., Any], connect: Any) -> None:
    """Each chunk has all ids of the prompt's first: buffers are full long before the answer ends."""
    live = start(token_ms=1.0, limits=Limits(stalled_s=0.3))
    body = {"prompt": "a" * 3000, "max_tokens": 1000, "stream": True, "return_token_ids": True, "model": "echo"}
    connection = connect(live, post(body), buffer=4096)
    with pytest.MonkeyPatch.context() as patch:
        from skote.serve.replies import Reply

        chunk = Reply.chunk
        patch.setattr(Reply, "chunk", lambda *args, **options: {**chunk(*args, **options), "padding": "x" * 100_000})
        assert until(lambda: live.router.loads[0].running == 1, WAIT_S)
        assert until(lambda: nothing_runs(live), 10.0)  # a thousand tokens would take longer only if they ran on
    completed = live.service.metrics.text().decode()
    assert 'skote_requests_total{outcome="cancelled",replica="0"} 1.0' in completed
    assert b"[DONE]" not in rest(connection)


def test_an_answer_that_nobody_takes_does_not_hold_its_connection(start: Callable[..., Any], connect: Any) -> None:
    live = start(limits=Limits(stalled_s=0.3))
    body = {"prompt": "a" * 4000, "max_tokens": 90, "stream": False, "model": "echo"}
    with pytest.MonkeyPatch.context() as patch:
        from skote.serve.replies import Reply

        patch.setattr(Reply, "whole", lambda *_: {"padding": "x" * 10_000_000})
        connection = connect(live, post(body), buffer=4096)
        assert until(lambda: len(live.server.server_state.connections) == 1, WAIT_S)
        assert until(lambda: not live.server.server_state.connections, 10.0)
    assert len(rest(connection)) < 10_000_000


@pytest.mark.parametrize("data", [b"", b"POST /v1/comp", b"GET /health HTTP/1.1\r\nhost: x\r\n"])
def test_a_request_that_never_begins_is_cut_off(slow: Any, connect: Any, data: bytes) -> None:
    connection = connect(slow, data)
    assert rest(connection) == b""


def test_a_second_request_that_never_begins_is_cut_off(slow: Any, connect: Any) -> None:
    connection = connect(slow, b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
    assert read_to(connection, b'"replicas":1}').startswith(b"HTTP/1.1 200")
    connection.sendall(b"GET /hea")
    assert rest(connection) == b""


def test_a_body_that_never_ends_is_refused(slow: Any, connect: Any) -> None:
    connection = connect(slow, post({"prompt": "abc"}, length=1000))
    answer = rest(connection)
    assert answer.startswith(b"HTTP/1.1 408 Request Timeout")
    assert b"The request did not arrive within 0.5 s." in answer


def test_a_connection_outlives_a_timer_of_its_first_request(slow: Any, connect: Any) -> None:
    """A request that takes longer than a head may is none that never began."""
    connection = connect(slow, post({"prompt": "abc", "max_tokens": 40}))  # 0.8 s, after 0.5 s
    assert read_to(connection, b'"completion_tokens":40').startswith(b"HTTP/1.1 200")
