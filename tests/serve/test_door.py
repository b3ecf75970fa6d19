"""Who may come in, what may be brought along, and that whatever is wrong is said in one sentence of one form."""

from __future__ import annotations

import http.client
import json
import logging
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest

from skote.serve.door import read_keys
from skote.serve.settings import Limits
from skote.types import UsageError

KEYS = ("first-key", "k\N{LATIN SMALL LETTER E WITH ACUTE}y")
JSON = {"content-type": "application/json"}


@pytest.fixture(scope="module")
def locked(start: Callable[..., Any]) -> Any:
    return start(keys=KEYS)


@pytest.fixture(scope="module")
def small(start: Callable[..., Any]) -> Any:
    return start(limits=Limits(body_bytes=1000, prompt_tokens=5, output_tokens=7))


def ask(live: Any, method: str, path: str, body: bytes | None = None, headers: Any = None) -> tuple[int, Any, Any]:
    """Status, headers and content, which is JSON where it says so."""
    connection = http.client.HTTPConnection("127.0.0.1", live.port, timeout=30)
    connection.request(method, path, body, headers or {})
    response = connection.getresponse()
    content: Any = response.read()
    connection.close()
    if response.getheader("content-type") == "application/json":
        content = json.loads(content)
    return response.status, response.headers, content


def complain(live: Any, body: bytes, path: str = "/v1/completions", headers: Any = JSON) -> tuple[int, str]:
    status, _, content = ask(live, "POST", path, body, headers)
    assert set(content) == {"error"}
    assert set(content["error"]) == {"message", "type", "param", "code"}
    return status, content["error"]["message"]


def test_a_key_is_needed_for_all_but_health(locked: Any) -> None:
    for path in ("/v1/models", "/metrics", "/openapi.json", "/nowhere"):
        status, headers, content = ask(locked, "GET", path)
        assert (status, headers["www-authenticate"]) == (401, "Bearer")
        assert content["error"]["code"] == "invalid_api_key"
    assert ask(locked, "GET", "/health")[0] == 200
    assert ask(locked, "POST", "/v1/completions", b"{", JSON)[0] == 401  # before anything else is looked at


@pytest.mark.parametrize(
    "sent", ["", "Bearer", "Bearer ", "Bearer first-ke", "Bearer first-key2", "Basic first-key", "first-key"]
)
def test_another_key_does_not_open(locked: Any, sent: str) -> None:
    assert ask(locked, "GET", "/v1/models", headers={"authorization": sent})[0] == 401


def test_each_key_opens(locked: Any) -> None:
    for key in KEYS:
        header = b"bearer  " + key.encode()
        assert ask(locked, "GET", "/v1/models", headers={"authorization": header})[0] == 200
    assert locked.client(KEYS[0]).models.list().data[0].id == "echo"
    with pytest.raises(openai.AuthenticationError, match="Send a key that this server knows"):
        locked.client("other").models.list()


@pytest.mark.parametrize(
    ("host", "status"),
    [("localhost", 200), ("127.0.0.1:8000", 200), ("[::1]:80", 200), ("[::1]", 200), ("LOCALHOST:1", 200),
     ("evil.example", 403), ("evil.example:8000", 403), ("127.0.0.1.evil.example", 403), ("", 403), (":80", 403)],
)  # fmt: skip
def test_without_a_key_it_must_be_called_by_a_name_of_its_own_machine(live: Any, host: str, status: int) -> None:
    assert ask(live, "GET", "/v1/models", headers={"host": host})[0] == status


def test_with_a_key_any_name_does(locked: Any) -> None:
    headers = {"host": "inference.example", "authorization": f"Bearer {KEYS[0]}"}
    assert ask(locked, "GET", "/v1/models", headers=headers)[0] == 200


def test_a_page_of_a_browser_cannot_post_without_being_asked_first(live: Any) -> None:
    """What a page may send to anybody, without a preflight, is no JSON."""
    status, sentence = complain(live, b'{"prompt": "a"}', headers={"content-type": "text/plain"})
    assert (status, sentence) == (400, "The body must be a JSON object, and its content-type application/json.")


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_beyond_the_limit_is_refused(small: Any, chunked: bool) -> None:
    body = json.dumps({"prompt": "a", "user": "x" * 1000}).encode()
    content: Any = iter([body[:500], body[500:]]) if chunked else body
    status, _, answer = ask(small, "POST", "/v1/completions", content, JSON)
    assert (status, answer["error"]["message"]) == (
        413, "The body is larger than 1000 bytes, the most that this server takes."
    )  # fmt: skip


def test_the_limits_of_tokens(small: Any) -> None:
    assert complain(small, b'{"prompt": "123456"}')[1] == "The prompt has 6 tokens, this server takes 5."
    assert complain(small, b'{"prompt": "1", "max_tokens": 8}')[1] == "max_tokens is 8, this server gives 7."
    chat = b'{"messages": [{"role": "user", "content": "ab"}]}'
    answer = ask(small, "POST", "/v1/chat/completions", chat, JSON)[2]
    assert answer["choices"][0]["message"]["content"] == "abababa"


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        (b"", "The body must be a JSON object, and its content-type application/json."),
        (b"[]", "The body must be a JSON object, and its content-type application/json."),
        (b"null", "The body must be a JSON object, and its content-type application/json."),
        (b"{}", "prompt is missing."),
        (b'{"prompt": "a"', "The body is not JSON: "),
        (b'{"prompt": "\xff"}', "POST /v1/completions: There was an error parsing the body."),
        (b'{"prompt": "\\ud800"}', "prompt is of the wrong kind. "),
        (b'{"\\ud800": 1, "prompt": "a"}', "The name of a field has half a surrogate pair."),
        (b'{"prompt": "a", "temperature": NaN}', "temperature: "),
        (b'{"prompt": "a", "temperature": Infinity}', "temperature: "),
        (b'{"prompt": "a", "temperature": 1e999}', "temperature: "),
        (b'{"prompt": "a", "top_k": 1e30}', "top_k: "),
        (b'{"prompt": "a", "seed": 99999999999999999999}', "seed: "),
        (b'{"prompt": "a", "max_tokens": ' + b"9" * 5000 + b"}", ""),
        (b'{"prompt": "a", "max_tokens": true}', "max_tokens: "),
        (b'{"prompt": "a", "stream": "yes"}', "stream: "),
        (b'{"prompt": ' + b"[" * 100_000, ""),
        (b'{"prompt": [1.5]}', "prompt is of the wrong kind. "),
        (b'{"prompt": [-1]}', "prompt is of the wrong kind. "),
        (b'{"prompt": [[1], [2]]}', "prompt is of the wrong kind. "),
    ],
)  # fmt: skip
def test_a_body_that_is_wrong_gets_a_sentence(live: Any, body: bytes, sentence: str) -> None:
    status, told = complain(live, body)
    assert status == 400
    assert told.startswith(sentence)
    assert told.endswith(".")


@pytest.mark.parametrize("seed", range(3))
def test_bytes_that_are_nothing_get_a_sentence(live: Any, seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(30):
        assert complain(live, draw.randbytes(draw.randint(1, 200)))[0] == 400


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/completions", 405),
        ("DELETE", "/health", 405),
        ("GET", "/", 404),
        ("GET", "/docs", 404),
        ("GET", "/%ff%00", 404),
    ],
)
def test_what_is_not_there_is_told_in_the_same_form(live: Any, method: str, path: str, status: int) -> None:
    got, _, content = ask(live, method, path)
    assert got == status
    assert content["error"]["message"].endswith(".")


def test_no_prompt_is_in_the_log_unless_it_is_asked_for(
    live: Any, start: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG):
        live.client().completions.create(model="echo", prompt="secret", max_tokens=6)
        for body in (
            b'{"prompt": "secret',
            b'{"prompt": "secret", "secret": 1}',
            b'{"prompt": ["secret", 1]}',
            b'{"stop": "secret"}',
        ):
            assert complain(live, body)[0] == 400
        with pytest.raises(openai.InternalServerError):
            live.client().completions.create(model="echo", prompt="secret\1")
    ours = [record.getMessage() for record in caplog.records if record.name.startswith(("skote", "uvicorn", "asyncio"))]
    assert len(ours) >= 2
    assert not any("secret" in message for message in ours)

    telling = start(log_prompts=True)
    with caplog.at_level(logging.INFO):
        telling.client().completions.create(model="echo", prompt="secret", max_tokens=3)
    assert any("'secret' was answered by 'sec'" in record.getMessage() for record in caplog.records)


def test_keys_are_read_one_a_line(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("one\n\n two \n", encoding="utf-8")
    assert read_keys(file) == ["one", "two"]
    file.write_text(" \n", encoding="utf-8")
    with pytest.raises(UsageError, match="has no key: write one a line"):
        read_keys(file)
    with pytest.raises(UsageError, match="cannot be read"):
        read_keys(tmp_path / "none")
