"""OpenAI's own client against the server."""

from __future__ import annotations

import json
import urllib.request
from typing import Any

import openai
import pytest

HALF = "日本語 €🙂 né"


def test_a_completion(live: Any) -> None:
    answer = live.client().completions.create(model="echo", prompt="abc", max_tokens=7)
    (choice,) = answer.choices
    assert (choice.text, choice.finish_reason, choice.index) == ("abcabca", "length", 0)
    assert (answer.object, answer.model) == ("text_completion", "echo")
    assert answer._request_id == answer.id  # what the log calls it
    usage = answer.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (3, 7, 10)


def test_a_completion_has_sixteen_tokens_by_default(live: Any) -> None:
    assert live.client().completions.create(model="echo", prompt="a").choices[0].text == "a" * 16


def test_token_ids_in_and_out(live: Any) -> None:
    extra = {"return_token_ids": True}
    answer = live.client().completions.create(model="echo", prompt=[65, 66], max_tokens=3, extra_body=extra)
    assert (answer.choices[0].text, answer.choices[0].token_ids) == ("ABA", [65, 66, 65])
    assert answer.choices[0].prompt_token_ids == [65, 66]
    stream = live.client().completions.create(
        model="echo", prompt=[[0xE2, 0x82, 0xAC]], max_tokens=4, stream=True, extra_body=extra
    )
    chunks = [chunk.choices[0] for chunk in stream]
    assert [token for chunk in chunks for token in chunk.token_ids] == [0xE2, 0x82, 0xAC, 0xE2]
    assert "".join(chunk.text for chunk in chunks) == "€\N{REPLACEMENT CHARACTER}"


def test_a_stream_of_characters_of_many_bytes(live: Any) -> None:
    size = len(HALF.encode())
    stream = live.client().completions.create(model="echo", prompt=HALF, max_tokens=2 * size, stream=True)
    chunks = list(stream)
    assert "".join(chunk.choices[0].text for chunk in chunks) == HALF * 2
    assert all("\N{REPLACEMENT CHARACTER}" not in chunk.choices[0].text for chunk in chunks)
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
    assert len({chunk.id for chunk in chunks}) == 1
    assert all(chunk.usage is None for chunk in chunks)


def test_a_stream_of_a_chat_with_usage(live: Any) -> None:
    stream = live.client().chat.completions.create(
        model="echo",
        messages=[{"role": "system", "content": "x"}, {"role": "user", "content": [{"type": "text", "text": "yz"}]}],
        max_completion_tokens=5,
        stream=True,
        stream_options={"include_usage": True},
    )
    *chunks, last = stream
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "xyzxy"
    assert chunks[-1].choices[0].finish_reason == "length"
    assert last.choices == []
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (3, 5)
    assert all(chunk.usage is None for chunk in chunks)


def test_counts_in_every_chunk(live: Any) -> None:
    stream = live.client().completions.create(
        model="echo", prompt="é", max_tokens=4, stream=True,
        stream_options={"include_usage": True, "continuous_usage_stats": True},
    )  # fmt: skip
    chunks = list(stream)
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-2:] == [4, 4]
    assert chunks[-1].choices == []


def test_a_chat(live: Any) -> None:
    turns: Any = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": ", "},
        {"role": "user", "content": "ho"},
    ]
    answer = live.client().chat.completions.create(model="echo", messages=turns, max_tokens=6)
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", "hi, ho", "length")


def test_a_chat_may_take_what_the_context_holds(live: Any) -> None:
    prompt = "a" * 4000 + "\0"
    answer = live.client().chat.completions.create(model="echo", messages=[{"role": "user", "content": prompt}])
    assert answer.usage.completion_tokens == 4096 - 4001 + 1
    assert answer.choices[0].finish_reason == "length"


def test_the_end_of_sequence_ends_it_unless_it_is_to_be_ignored(live: Any) -> None:
    def ask(**extra: Any) -> Any:
        return live.client().completions.create(model="echo", prompt="ab\0", max_tokens=5, extra_body=extra)

    answer = ask()
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("ab", "stop")
    assert answer.usage.completion_tokens == 3
    answer = ask(ignore_eos=True)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("abab", "length")


def test_a_stop_id_ends_an_answer_and_is_its_last_token(live: Any) -> None:
    def ask(**extra: Any) -> Any:
        body = {"return_token_ids": True, **extra}
        return live.client().completions.create(model="echo", prompt="abc", max_tokens=5, extra_body=body)

    whole = ask().choices[0].token_ids
    answer = ask(stop_token_ids=[whole[1]])
    assert answer.choices[0].token_ids == whole[:2]
    assert (answer.choices[0].finish_reason, answer.usage.completion_tokens) == ("stop", 2)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("prompt", "stop", "want", "reason"),
    [
        ("one two ", ["two o"], "one ", "stop"),
        ("日本語", "本語日", "日", "stop"),
        ("abc", ["bca", "zz", "cab"], "a", "stop"),
        ("abc", "abca", "", "stop"),
        ("abc", ["x"], "abcabcabcabcabc", "length"),
        ("abc", ["abcd", "cabcabb"], "abcabcabcabcabc", "length"),
    ],
)
def test_stop_strings(live: Any, stream: bool, prompt: str, stop: Any, want: str, reason: str) -> None:
    answer = live.client().completions.create(model="echo", prompt=prompt, max_tokens=15, stop=stop, stream=stream)
    chunks = list(answer) if stream else [answer]
    assert "".join(chunk.choices[0].text for chunk in chunks) == want
    assert chunks[-1].choices[0].finish_reason == reason


def test_the_model_is_listed(live: Any) -> None:
    client = live.client()
    assert [model.id for model in client.models.list()] == ["echo"]
    assert client.models.retrieve("echo").owned_by == "skotergy"
    with pytest.raises(openai.NotFoundError, match="There is no such model here: 'echo' is"):
        client.models.retrieve("gpt")
    with pytest.raises(openai.NotFoundError, match="There is no such model here"):
        client.completions.create(model="gpt", prompt="a")


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"n": 2}, "n: .*One answer a request"),
        ({"logprobs": 1}, "logprobs: .*without their probabilities"),
        ({"echo": True}, "echo: .*not built"),
        ({"logit_bias": {"5": 1}}, "logit_bias: .*not built"),
        ({"presence_penalty": 0.5}, "presence_penalty: .*not built"),
        ({"max_tokens": 0}, "max_tokens: .*greater than or equal to 1"),
        ({"max_tokens": 10**30}, "max_tokens: .*"),
        ({"max_tokens": 5000}, "The prompt has 1 tokens and max_tokens is 5000; the context holds 4096"),
        ({"temperature": -1}, "temperature: .*From 0 .* to 2"),
        ({"top_p": 0}, "top_p: .*greater than 0"),
        ({"stop": ""}, "stop is of the wrong kind. A text of 1 to 256 characters"),
        ({"stop": ["a"] * 17}, "stop is of the wrong kind"),
        ({"prompt": ""}, "The prompt has no token"),
        ({"prompt": ["a", "b"]}, "prompt is of the wrong kind. .*one prompt a request"),
        ({"prompt": [256]}, "A token id lies outside the vocabulary of 256"),
        ({"prompt": "a" * 4097}, "The prompt has 4097 tokens"),
        ({"stream_options": {"include_usage": True}}, "stream_options are for a stream"),
        ({"extra_body": {"max_token": 5}}, "There is no field 'max_token' here"),
        ({"extra_body": {"top_k": "5"}}, "top_k: .*integer"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(live: Any, options: Any, sentence: str) -> None:
    with pytest.raises(openai.BadRequestError, match=sentence) as refused:
        live.client().completions.create(**{"model": "echo", "prompt": "a", **options})
    assert refused.value.type == "invalid_request_error"


@pytest.mark.parametrize(
    ("messages", "sentence"),
    [
        ([], "messages: .*at least 1"),
        ([{"role": "tool", "content": "x"}], "messages.0.role: "),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
            "messages is of the wrong kind",
        ),
        ([{"role": "assistant", "content": "x"}], "chat template refuses a conversation: a user speaks first"),
        ([{"role": "user"}], "messages.0.content is missing"),
    ],
)
def test_messages_that_are_none_are_refused(live: Any, messages: Any, sentence: str) -> None:
    with pytest.raises(openai.BadRequestError, match=sentence):
        live.client().chat.completions.create(model="echo", messages=messages)


def test_neutral_values_are_taken(live: Any) -> None:
    answer = live.client().completions.create(
        model="echo", prompt="a", max_tokens=2, n=1, best_of=1, echo=False, presence_penalty=0, frequency_penalty=0.0,
        logit_bias={}, logprobs=None, stop=None, user="me", seed=-5, temperature=0, top_p=1,
        extra_body={"repetition_penalty": 1.0, "top_k": -1, "min_p": 0},
    )  # fmt: skip
    assert answer.choices[0].text == "aa"


def test_a_failure_before_the_first_token_has_a_status_and_one_after_it_is_an_event(live: Any) -> None:
    client = live.client()
    for stream in (False, True):
        with pytest.raises(openai.InternalServerError, match="told to break") as failed:
            client.completions.create(model="echo", prompt="\1", stream=stream)
        assert failed.value.status_code == 503
    stream = client.completions.create(model="echo", prompt="ab\1", stream=True)
    got = [next(stream).choices[0].text]
    with pytest.raises(openai.APIError, match="told to break"):
        got.extend(chunk.choices[0].text for chunk in stream)
    assert "ab".startswith("".join(got))


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (  # vllm bench serve --backend openai, with --ignore-eos and --temperature 0
            "completions",
            {"model": "echo", "prompt": "ab", "repetition_penalty": 1.0, "max_tokens": 3, "logprobs": None,
             "stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True, "temperature": 0},
        ),
        (  # --backend openai-chat
            "chat/completions",
            {"model": "echo", "messages": [{"role": "user", "content": [{"type": "text", "text": "ab"}]}],
             "max_completion_tokens": 3, "stream": True, "stream_options": {"include_usage": True}},
        ),
        (  # guidellm
            "completions",
            {"model": "echo", "prompt": "ab", "max_tokens": 3, "stop": None, "ignore_eos": True, "stream": True,
             "stream_options": {"include_usage": True, "continuous_usage_stats": True}},
        ),
    ],
    ids=["vllm bench serve", "vllm bench serve, chat", "guidellm"],
)  # fmt: skip
def test_what_benchmark_clients_send_is_taken(live: Any, path: str, body: dict[str, Any]) -> None:
    """Their rules: data: lines, a chunk with choices is a token's, one without has the counts, [DONE] ends it."""
    request = urllib.request.Request(
        f"{live.url}/v1/{path}", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=30) as response:
        *events, done, rest = response.read().decode().split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    chunks = [json.loads(event.removeprefix("data: ")) for event in events]
    *tokens, usage = chunks
    texts = [chunk["choices"][0] for chunk in tokens]
    assert (
        "".join(choice["text"] if "text" in choice else choice["delta"].get("content", "") for choice in texts) == "aba"
    )
    assert usage["choices"] == []
    assert usage["usage"] == {"prompt_tokens": 2, "completion_tokens": 3, "total_tokens": 5}
