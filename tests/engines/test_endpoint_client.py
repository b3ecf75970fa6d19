"""How a server is reached: certificates, ports that speak something else, its list of models, the end of a stream."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading

import pytest

from skote.engines.endpoint import EndpointEngine
from skote.types import EngineError, Request, UsageError

DONE = (0.0, b"data: [DONE]\n\n")
WAIT_S = 30.0
TOKEN = (0.0, {"choices": [{"text": "x", "token_ids": [5], "finish_reason": "length"}]})
REQUEST = Request("a", (7, 8, 9), max_new_tokens=1)
LISTED = b'{"data": [{"id": "tiny"}]}'
CERTIFICATE = """\
-----BEGIN CERTIFICATE-----
MIIBWzCCAQKgAwIBAgIBATAKBggqhkjOPQQDAjAUMRIwEAYDVQQDDAkxMjcuMC4w
LjEwIBcNMjAwMTAxMDAwMDAwWhgPMjEyMDAxMDEwMDAwMDBaMBQxEjAQBgNVBAMM
CTEyNy4wLjAuMTBZMBMGByqGSM49AgEGCCqGSM49AwEHA0IABE+z+6uxuIphx3iA
aghhnclLLFs788skm8UxaNehtuXBHzpbIACUnYGylT4wXwYvPUgzR3Oxoq/Gq5Pz
MfiY7QejQzBBMA8GA1UdEQQIMAaHBH8AAAEwDwYDVR0TAQH/BAUwAwEB/zAdBgNV
HQ4EFgQUO8eizydXHirD05KEsQRuXS5J2S8wCgYIKoZIzj0EAwIDRwAwRAIhAK/m
mrjyqZApemkvL7t9Ue2+CwqA0HXFov7e8RReLIv1Ah88cmZCPjd0HGUFnfi1bdnY
YvFG2/96Mge53q62kbU7
-----END CERTIFICATE-----
-----BEGIN PRIVATE KEY-----
MIGHAgEAMBMGByqGSM49AgEGCCqGSM49AwEHBG0wawIBAQQgmnRuLSjVaLc0HYhM
Z3qDotZbL4XIFBDNPYhwi644yPqhRANCAARPs/ursbiKYcd4gGoIYZ3JSyxbO/PL
JJvFMWjXobblwR86WyAAlJ2BspU+MF8GLz1IM0dzsaKvxquT8zH4mO0H
-----END PRIVATE KEY-----
"""  # of 127.0.0.1, signed by itself, until 2120


@pytest.fixture
def listen():
    """`listen(answer, tls=None)`: the port of a server that sends `answer` when it has read something, and hangs up."""
    over, threads, sockets = threading.Event(), [], []

    def start(answer, tls=None):
        listener = socket.create_server(("127.0.0.1", 0))
        sockets.append(listener)

        def serve():
            while not over.is_set():
                with contextlib.suppress(OSError):
                    taken, _ = listener.accept()
                    with tls.wrap_socket(taken, server_side=True) if tls else taken as connection:
                        connection.recv(4096)
                        if answer is None:
                            over.wait(WAIT_S)
                        else:
                            connection.sendall(answer)

        threads.append(threading.Thread(target=serve))
        threads[-1].start()
        return listener.getsockname()[1]

    yield start
    over.set()
    for each in sockets:
        with contextlib.suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)
        each.close()
    for thread in threads:
        thread.join(WAIT_S)


@pytest.fixture
def tls(tmp_path):
    """The server's side of TLS, with a certificate that lies in tmp_path / "own.pem"."""
    (tmp_path / "own.pem").write_text(CERTIFICATE, encoding="ascii")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "own.pem")
    return context


def test_a_certificate_is_trusted_by_ca_file_alone(listen, tls, tmp_path):
    answer = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%s" % (len(LISTED), LISTED)
    url = f"https://127.0.0.1:{listen(answer, tls)}/v1"
    with pytest.raises(
        UsageError, match=r"certificate of endpoint.url=https.* is not trusted \(.*\): .*endpoint.ca_file"
    ):
        EndpointEngine(url=url)
    engine = EndpointEngine(url=url, ca_file=str(tmp_path / "own.pem"))
    assert engine.describe()["tier_reason"].startswith("tiny at https://")
    engine.close()


def test_a_port_without_tls(fake_server):
    with pytest.raises(UsageError, match=r"speaks no TLS that this client knows \(.*\): try http://"):
        EndpointEngine(url=fake_server().url.replace("http:", "https:"))


def test_a_port_that_speaks_no_http(listen):
    with pytest.raises(UsageError, match=r"What listens at endpoint.url=.* speaks no HTTP"):
        EndpointEngine(url=f"http://127.0.0.1:{listen(b'SSH-2.0-server' + bytes([13, 10]))}/v1")


@pytest.mark.parametrize("answer", [b"", None], ids=["hangs_up", "silent"])
def test_a_port_that_does_not_answer(listen, answer):
    with pytest.raises(EngineError, match=r"takes connections and does not answer: give the port of an OpenAI API"):
        EndpointEngine(url=f"http://127.0.0.1:{listen(answer)}/v1", connect_s=0.2)


def test_a_port_that_is_taken_by_something_else_is_not_started_at(listen):
    port = listen(b"SSH-2.0-server\r\n")
    with pytest.raises(UsageError, match=r"Something answers at .* before endpoint.command was started"):
        EndpointEngine(url=f"http://127.0.0.1:{port}/v1", command=["true"])


def test_a_server_that_is_not_ready(fake_server):
    with pytest.raises(EngineError, match=r"/v1/models answers with HTTP 503, not ready: no key\."):
        EndpointEngine(url=fake_server(models_status=503).url)


def test_a_model_that_the_server_does_not_list(fake_server):
    server = fake_server(models=("a", "b"))
    with pytest.raises(UsageError, match=r"has no model c \(endpoint.model\): it lists a, b\."):
        EndpointEngine(url=server.url, model="c")
    many = fake_server(models=tuple(f"m{i}" for i in range(13)))
    with pytest.raises(UsageError, match=r"it lists m0, .*, m11 and others\."):
        EndpointEngine(url=many.url, model="c")


def test_a_server_that_lists_none_is_taken_at_its_word(fake_server, play):
    server = fake_server(play([TOKEN, DONE]), models_status=404)
    engine = EndpointEngine(url=server.url, model="c")
    engine.generate([REQUEST], lambda *_: None)
    assert server.asked[0].body["model"] == "c"
    engine.close()


def test_an_answer_ends_at_done_whatever_the_response_does(fake_server, play):
    """The first response stays open: its connection is given up, and the next answer has another one."""
    server = fake_server(play([TOKEN, DONE, (WAIT_S, b": over\n\n")]), play([TOKEN, DONE]))
    engine = EndpointEngine(url=server.url, silence_s=WAIT_S)
    for _ in range(2):
        heard = []
        assert engine.generate([REQUEST], lambda _, ids, heard=heard: heard.extend(ids)) == ["length"]
        assert heard == [5]
    assert server.connections == 2
    engine.close()


def test_what_comes_after_done_is_left_out_and_its_connection_kept(fake_server, play, monkeypatch):
    monkeypatch.setattr("skote.engines.endpoint_client._CLOSE_S", WAIT_S)
    server = fake_server(play([TOKEN, DONE, (0.0, b"data: no event\n\n")]))
    engine = EndpointEngine(url=server.url)
    for _ in range(2):
        assert engine.generate([REQUEST], lambda *_: None) == ["length"]
    assert server.connections == 1
    engine.close()
