from __future__ import annotations

import json

import pytest

from skote.engines.endpoint_events import EventLines, TokenCount, error_text, read_event
from skote.types import UNKNOWN_ID, EngineError

U = UNKNOWN_ID
ROLE = {"choices": [{"delta": {"role": "assistant", "content": ""}}]}
HI = {"choices": [{"delta": {"content": "hi"}}], "usage": None}
THINKS = {"choices": [{"delta": {"reasoning_content": "hm"}}]}
THINKS_NEWER = {"choices": [{"delta": {"reasoning": "hm"}}]}
END = {"choices": [{"delta": {}, "finish_reason": "stop"}]}


def usage(tokens, prompt=4, choices=()):
    return {"choices": list(choices), "usage": {"prompt_tokens": prompt, "completion_tokens": tokens}}


def text(text="x", **keys):
    return {"choices": [{"text": text, **keys}]}


def count(*chunks):
    counted = TokenCount()
    return counted, [list(counted.new_tokens(read_event(json.dumps(chunk).encode()))) for chunk in chunks]


def test_events_are_the_same_however_the_network_cuts_them():
    stream = b': hello\r\n\r\ndata: {"a": 1}\r\n\r\nevent: x\ndata:{"b": 2}\n\ndata: [DONE]\n\n'
    want = [b'{"a": 1}', b'{"b": 2}', b"[DONE]"]
    for size in range(1, len(stream) + 1):
        lines = EventLines()
        pieces = [stream[start : start + size] for start in range(0, len(stream), size)]
        assert [data for piece in pieces for data in lines.feed(piece)] == want


def test_a_role_an_end_and_empty_text_are_no_tokens_and_reasoning_is():
    counted, ids = count(ROLE, THINKS, THINKS_NEWER, HI, text(""), END)
    assert ids == [[], [U], [U], [U], [], []]
    assert (counted.total, counted.by_chunk, counted.ids_known, counted.reported) == (3, 3, False, None)


def test_ids_are_taken_as_they_are_also_without_text():
    counted, ids = count(text(token_ids=[5, 6]), text("", token_ids=[7]), text("", token_ids=[]), usage(3))
    assert ids == [[5, 6], [7], [], []]
    assert (counted.total, counted.by_chunk, counted.ids_known) == (3, 0, True)
    assert (counted.reported, counted.prompt_tokens) == (3, 4)


def test_running_counts_are_believed_and_not_the_chunks():
    role = usage(0, choices=ROLE["choices"])
    counted, ids = count(role, usage(3, choices=HI["choices"]), usage(3, choices=HI["choices"]), usage(4), usage(4))
    assert ids == [[], [U, U, U], [], [U], []]
    assert (counted.total, counted.by_chunk) == (4, 0)


def test_what_only_the_count_at_the_end_knows_of_is_added_there():
    counted, ids = count(HI, HI, END, usage(5))
    assert ids == [[U], [U], [], [U, U, U]]
    assert (counted.total, counted.by_chunk, counted.reported) == (5, 2, 5)


def test_a_count_below_the_chunks_takes_nothing_back():
    counted, ids = count(HI, HI, HI, usage(2))
    assert ids == [[U], [U], [U], []]
    assert (counted.total, counted.reported) == (3, 2)


@pytest.mark.parametrize(
    ("reason", "want"), [("stop", "stop"), ("eos_token", "stop"), ("length", "length"), (None, None), ("", None)]
)
def test_reasons(reason, want):
    assert read_event(json.dumps(text(finish_reason=reason)).encode()).finish_reason == want


def test_a_reason_of_another_kind_is_a_failure():
    with pytest.raises(EngineError, match=r"for the reason 'content_filter', and not"):
        read_event(json.dumps(text(finish_reason="content_filter")).encode())


@pytest.mark.parametrize("data", ["", "{", "[]", "3", "null", "{}", '{"choices": 3}', '{"choices": [3]}', '"error"'])
def test_what_is_no_chunk_is_a_failure(data):
    with pytest.raises(EngineError, match="no chunk of an answer"):
        read_event(data.encode())


@pytest.mark.parametrize("tokens", [-1, "3", 1.5, True])
def test_a_count_that_is_none(tokens):
    with pytest.raises(EngineError, match="no chunk of an answer"):
        read_event(json.dumps(usage(tokens)).encode())


def test_an_error_in_the_stream_is_the_servers_own_sentence():
    with pytest.raises(EngineError, match=r"^The server broke off: out of memory\.$"):
        read_event(b'{"error": {"message": "out of memory.", "code": 500}}')


@pytest.mark.parametrize(
    ("body", "want"),
    [
        (b'{"error": {"message": "no\\nroom."}}', "no room"),
        (b'{"error": "busy"}', "busy"),
        (b'{"message": "gone"}', "gone"),
        (b'{"detail": "Not Found"}', "Not Found"),
        (b"<html>", "<html>"),
        (b"", "nothing"),
        (b"[1]", "[1]"),
        (b"x" * 1000, "x" * 300),
    ],
)
def test_what_a_server_says_went_wrong(body, want):
    assert error_text(body) == want


def test_what_came_from_a_cache_is_told():
    chunk = usage(1)
    assert count(chunk)[0].cached_tokens is None
    chunk["usage"]["prompt_tokens_details"] = None
    assert count(chunk)[0].cached_tokens is None
    chunk["usage"]["prompt_tokens_details"] = {"cached_tokens": 3}
    assert count(chunk)[0].cached_tokens == 3
