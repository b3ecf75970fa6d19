from __future__ import annotations

from pathlib import Path

import pytest

from skote.eval.sources.formats import FORMATS, recognise
from skote.eval.sources.row import Row, RowError
from skote.types import UsageError

S = 1_000_000_000
ASK = {"role": "user", "content": "Why?"}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {}}}

# What a file of each format has in a row, and what that is.
EXAMPLES = [
    (
        "azure",
        {"TIMESTAMP": "1970-01-02 00:00:03.9799600", "ContextTokens": "4808", "GeneratedTokens": "10"},
        Row("line 2", at_ns=86_403 * S + 979_960_000, input_tokens=4808, output_tokens=10),
    ),
    (
        "azure",
        {"TIMESTAMP": "1970-01-01 02:00:00.5+02:00", "ContextTokens": "1", "GeneratedTokens": "1"},
        Row("line 2", at_ns=S // 2, input_tokens=1, output_tokens=1),
    ),
    (
        "burstgpt",
        {"Timestamp": "5.25", "Model": "ChatGPT", "Request tokens": "472", "Response tokens": "18", "Log Type": "x"},
        Row("line 2", at_ns=5_250_000_000, input_tokens=472, output_tokens=18),
    ),
    (
        "mooncake",
        {"timestamp": 27482, "input_length": 513, "output_length": 500, "hash_ids": [0, 46]},
        Row("line 2", at_ns=27_482_000_000, input_tokens=513, output_tokens=500, hash_ids=(0, 46)),
    ),
    (
        "lengths",
        {"input_tokens": 7, "output_tokens": 3},
        Row("line 2", input_tokens=7, output_tokens=3),
    ),
    (
        "lengths",
        {"timestamp": 1.5, "input_tokens": 7.0, "output_tokens": 3},
        Row("line 2", at_ns=1_500_000_000, input_tokens=7, output_tokens=3),
    ),
    (
        "replay",
        {"run_id": "r", "scheduled_ns": 12, "input_tokens": 7, "output_tokens": 3, "status": "ok"},
        Row("line 2", at_ns=12, input_tokens=7, output_tokens=3),
    ),
    (
        "prompts",
        {"prompt": "Why?", "max_tokens": 5, "temperature": 0.5, "top_p": 0.9, "top_k": -1, "seed": 3, "stop": ["\n"]},
        Row(
            "line 2", output_tokens=5, turns=("Why?",),
            sampling={"temperature": 0.5, "top_p": 0.9, "top_k": 0, "seed": 3}, stop_strings=("\n",),
        ),
    ),
    ("prompts", {"prompt": "Why?", "output_tokens": 9}, Row("line 2", output_tokens=9, turns=("Why?",))),
    (
        "prompts",
        {"prompt": "Why?", "stop": '["\\n", "</s>"]', "stop_token_ids": "[2, 3]"},  # columns of text
        Row("line 2", turns=("Why?",), stop_strings=("\n", "</s>"), stop_ids=(2, 3)),
    ),
    ("prompts", {"prompt": "Why?", "stop": "[INST]"}, Row("line 2", turns=("Why?",), stop_strings=("[INST]",))),
    (
        "spec_bench",
        {"turns": ["One?", "Two?", "Three?"], "think_ms": [1.5, 0]},
        Row("line 2", turns=("One?", "Two?", "Three?"), think_ns=(1_500_000, 0)),
    ),
    ("prompts", {"prompt": "Why?", "timestamp": 2}, Row("line 2", at_ns=2 * S, turns=("Why?",))),
    ("messages", {"messages": [ASK], "tools": [TOOL]}, Row("line 2", messages=(ASK,), tools=(TOOL,))),
    (
        "messages",
        {"messages": [ASK, {"role": "assistant", "content": "So."}], "max_completion_tokens": 4},
        Row("line 2", output_tokens=4, messages=(ASK,), replies=("So.",)),
    ),
    (
        "messages",
        {"custom_id": "1", "method": "POST", "url": "/v1", "body": {"messages": [ASK], "max_tokens": 2}},
        Row("line 2", output_tokens=2, messages=(ASK,)),
    ),
    ("messages", {"messages": '[{"role": "user", "content": "Why?"}]'}, Row("line 2", messages=(ASK,))),
    (
        "spec_bench",
        {"question_id": 81, "category": "writing", "turns": ["Write.", "Again."]},
        Row("line 2", turns=("Write.", "Again.")),
    ),
    (  # MT-Bench
        "spec_bench",
        {"question_id": 101, "category": "reasoning", "turns": ["Race?", "And last?"], "reference": ["Second.", "No."]},
        Row("line 2", turns=("Race?", "And last?")),
    ),
    (
        "sharegpt",
        {"id": "x", "conversations": [{"from": "human", "value": "Why?"}, {"from": "gpt", "value": "So."},
                                      {"from": "human", "value": "Really?"}]},
        Row("line 2", turns=("Why?", "Really?"), replies=("So.", "")),
    ),
]  # fmt: skip


@pytest.mark.parametrize(("name", "record", "row"), EXAMPLES)
def test_a_row_is_what_its_format_says_and_is_recognised(name, record, row):
    assert FORMATS[name]("line 2", record) == row
    assert recognise(record, Path("file")) == name


@pytest.mark.parametrize("other", [{"phase": "warmup"}, {"arm": "baseline"}])
def test_of_a_recorded_run_warm_up_and_the_other_arm_are_passed_over(other):
    record = {"run_id": "r", "scheduled_ns": 12, "input_tokens": 7, "output_tokens": 3, "arm": "candidate"}
    assert FORMATS["replay"]("entry 1", record | {"phase": "measure"}) is not None
    assert FORMATS["replay"]("entry 1", record | {"phase": "measure"} | other) is None


def test_every_format_has_an_example():
    assert {name for name, *_ in EXAMPLES} == set(FORMATS)


def test_an_unknown_format_is_refused_with_what_there_is():
    with pytest.raises(UsageError, match=r"no format that is known \(keys: a, b\): name it with .*azure, burstgpt"):
        recognise({"a": 1, "b": 2}, Path("rows.jsonl"))


AZURE = {"TIMESTAMP": "2023-11-16 18:17:03", "ContextTokens": "8", "GeneratedTokens": "8"}
MOONCAKE = {"timestamp": 0, "input_length": 513, "output_length": 1, "hash_ids": [1, 2]}


@pytest.mark.parametrize(
    ("name", "record", "reason"),
    [
        ("azure", AZURE | {"ContextTokens": "many"}, "ContextTokens must be a whole number, got 'many'"),
        ("azure", AZURE | {"ContextTokens": ""}, "ContextTokens must be a whole number, got ''"),
        ("azure", AZURE | {"ContextTokens": "3.5"}, "ContextTokens must be a whole number"),
        ("azure", AZURE | {"ContextTokens": "nan"}, "ContextTokens must be a whole number"),
        ("azure", AZURE | {"GeneratedTokens": "0"}, "GeneratedTokens is 0, and a request has at least one token"),
        ("azure", AZURE | {"TIMESTAMP": "yesterday"}, "TIMESTAMP must be a date and a time, got 'yesterday'"),
        ("burstgpt", {"Timestamp": "inf", "Request tokens": 1, "Response tokens": 1}, "Timestamp must be a finite"),
        ("mooncake", MOONCAKE | {"hash_ids": [1]}, "it has 1 hash_ids, and 513 tokens are 2 blocks"),
        ("mooncake", MOONCAKE | {"hash_ids": ["a", "b"]}, "hash_ids must be a list of whole numbers"),
        ("lengths", {"input_tokens": True, "output_tokens": 1}, "input_tokens must be a whole number, got True"),
        ("prompts", {"prompt": " "}, "its prompt is no text, or an empty one"),
        ("prompts", {"prompt": ["a"]}, "its prompt is no text"),
        ("prompts", {"prompt": "a", "temperature": "hot"}, "temperature must be"),
        ("prompts", {"prompt": "a", "top_p": 7}, "top_p must lie in"),
        ("prompts", {"prompt": "a", "max_tokens": -1}, "max_tokens is -1"),
        ("prompts", {"prompt": "a", "stop": 7}, "its stop is neither a text nor a list of texts"),
        ("prompts", {"prompt": "a", "stop": ["x", ""]}, "its stop is neither a text nor a list of texts"),
        ("prompts", {"prompt": "a", "stop_token_ids": ["x"]}, "its stop_token_ids are no list of token ids"),
        ("spec_bench", {"turns": ["a", "b"], "think_ms": 5}, "think_ms must be a list of milliseconds, one for each"),
        ("spec_bench", {"turns": ["a", "b"], "think_ms": [-5]}, "think_ms must be 0 or more"),
        ("messages", {"messages": []}, "its messages are no list of mappings with a role"),
        ("messages", {"messages": [{"role": "assistant", "content": "So."}]}, "its messages are an answer alone"),
        ("messages", {"messages": [ASK], "tools": "none"}, "its tools are no list"),
        ("spec_bench", {"turns": [""]}, "its turns are no list of texts"),
        ("sharegpt", {"conversations": [{"from": "gpt", "value": "So."}]}, "nobody asks anything"),
        ("sharegpt", {"conversations": [{"from": "human", "value": None}]}, "is not text throughout"),
    ],
)
def test_a_row_that_cannot_be_served_says_why(name, record, reason):
    with pytest.raises(RowError) as raised:
        FORMATS[name]("line 2", record)
    assert str(raised.value).startswith(reason) or reason in str(raised.value)
