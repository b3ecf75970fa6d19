"""The command `skote-serve` as users run it, over a tiny model: loaded, asked, told to end."""

from __future__ import annotations

import contextlib
import queue
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import openai
import psutil
import pytest

from skote.runtime.text import load_tokenizer
from skote.serve.command import main
from skote.types import ExitCode

WAIT_S = 60.0
PROMPT = "w7 w8 w9 w10"
IDS = (7, 8, 9, 10)

pytestmark = pytest.mark.slow


class Process:
    """A server in a process of its own; its log is read as it comes."""

    def __init__(self, *arguments: str) -> None:
        command = [sys.executable, "-m", "skote.serve.command", "port=0", "engine.compile=false", *arguments]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        self.lines: queue.Queue[str] = queue.Queue()
        self.log: list[str] = []
        self.clients = contextlib.ExitStack()
        self.reader = threading.Thread(target=self._read)
        self.reader.start()
        self.url = self.wait_for(r"is served at (http://\S+)").group(1)
        self.children = psutil.Process(self.process.pid).children(recursive=True)

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.put(line)

    def wait_for(self, pattern: str) -> re.Match[str]:
        while True:
            line = self.lines.get(timeout=WAIT_S)
            self.log.append(line)
            match = re.search(pattern, line)
            if match:
                return match

    def client(self, key: str = "none") -> openai.OpenAI:
        url = self.url.replace("0.0.0.0", "127.0.0.1")
        client = openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=WAIT_S)
        return self.clients.enter_context(client)

    def end(self) -> int:
        self.clients.close()
        code = self.process.wait(WAIT_S)
        self.reader.join(WAIT_S)
        assert self.process.stderr is not None
        self.process.stderr.close()
        return code


@pytest.fixture(scope="module")
def model(make_checkpoint: Callable[..., Path], write_tokenizer: Callable[..., None]) -> Path:
    directory = make_checkpoint(max_position_embeddings=32768, eos_token_id=None)
    write_tokenizer(directory, chat=True)
    return directory


@pytest.fixture
def serve(model: Path) -> Iterator[Callable[..., Process]]:
    """`serve(*arguments)`: a server of the tiny model, killed where the test has not ended it."""
    started: list[Process] = []

    def start(*arguments: str) -> Process:
        started.append(Process(f"model.path={model}", *arguments))
        return started[-1]

    yield start
    for each in started:
        if each.process.poll() is None:
            each.process.kill()
            each.end()
        assert psutil.wait_procs(each.children, timeout=WAIT_S)[1] == []  # replicas go with their server


def test_two_replicas_answer_with_the_models_own_tokens_and_sigterm_lets_a_stream_end(
    serve: Callable[..., Process], model: Path, reference_ids: Callable[..., list[int]]
) -> None:
    server = serve("devices=2", "model.name=tiny", "engine.max_batch=2", "engine.max_model_len=2048")
    client = server.client()
    assert len(server.children) == 2
    codec = load_tokenizer(model)
    want = codec.decode(reference_ids(model, IDS, 20))
    for _ in range(2):
        answer = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=20, temperature=0)
        assert answer.choices[0].text == f" {want}"
    chat = client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "w7"}], max_tokens=5, temperature=0
    )
    assert chat.choices[0].message.content == codec.decode(reference_ids(model, (1, 3, 7, 9), 5))

    drawn = [
        client.completions.create(model="tiny", prompt=PROMPT, max_tokens=20, seed=seed).choices[0].text
        for seed in (1, 1, 2)
    ]
    assert drawn[0] == drawn[1] != drawn[2]
    with pytest.raises(openai.BadRequestError, match="the context holds 2048"):
        client.completions.create(model="tiny", prompt=PROMPT, max_tokens=2046)

    stream = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=400, temperature=0, stream=True)
    text = next(stream).choices[0].text
    server.process.send_signal(signal.SIGTERM)
    chunks = list(stream)
    text += "".join(chunk.choices[0].text for chunk in chunks)
    assert text == f" {codec.decode(reference_ids(model, IDS, 400))}"
    assert chunks[-1].choices[0].finish_reason == "length"
    assert server.end() == 0
    assert any("has ended." in line for line in server.lines.queue)


def test_beyond_loopback_it_wants_its_key_and_what_takes_longer_than_it_may_is_told_so(
    serve: Callable[..., Process], tmp_path: Path
) -> None:
    (tmp_path / "key").write_text("sesame\n", encoding="utf-8")
    server = serve("host=0.0.0.0", f"api_key_file={tmp_path / 'key'}", "drain_s=0.2", "engine.max_model_len=32768")
    with pytest.raises(openai.AuthenticationError):
        server.client("other").models.list()
    client = server.client("sesame")
    (served,) = client.models.list()
    stream = client.completions.create(model=served.id, prompt=PROMPT, max_tokens=30_000, stream=True)
    next(stream)
    server.process.send_signal(signal.SIGTERM)
    with pytest.raises(openai.APIError, match=r"had not within 0\.2 s \(drain_s\)"):
        list(stream)
    assert server.end() == 0


def test_ctrl_c_ends_it_too(serve: Callable[..., Process]) -> None:
    server = serve()
    server.process.send_signal(signal.SIGINT)
    assert server.end() == ExitCode.INTERRUPTED
    assert list(server.lines.queue)[-1] == "skote-serve: interrupted.\n"


def test_an_address_that_is_taken_is_told_before_the_model_is_loaded(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main([f"model.path={model}", f"port={port}"]) == ExitCode.USAGE
    assert capsys.readouterr().err == (
        f"skote-serve: The server cannot listen at host=127.0.0.1 port={port}: Address already in use.\n"
    )
