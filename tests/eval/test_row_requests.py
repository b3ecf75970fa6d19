from __future__ import annotations

import gzip
import json
import random
import tracemalloc
from pathlib import Path

import pytest

from skote.eval.arrivals import ArrivalConfig
from skote.eval.codec import HashCodec
from skote.eval.record import read_run
from skote.eval.sources.records import Entry
from skote.eval.sources.row import Row
from skote.eval.sources.row_file import RowFile
from skote.eval.sources.source_config import SourceConfig, check_source
from skote.eval.warmup import NEVER
from skote.eval.workload import build_workload
from skote.eval.workload_config import WorkloadConfig, check_config
from skote.types import CapacityError, RequestError, Sampling, UsageError

CODEC = HashCodec(49152)
S = 1_000_000_000


def lengths_file(folder: Path, rows: list[tuple[float, int, int]], name: str = "trace.csv") -> str:
    path = folder / name
    path.write_text("timestamp,input_tokens,output_tokens\n" + "".join(f"{t},{p},{n}\n" for t, p, n in rows))
    return str(path)


def jsonl(folder: Path, *lines: str) -> str:
    path = folder / "rows.jsonl"
    path.write_text("\n".join(lines))
    return str(path)


def built(source: SourceConfig, *, blocks: int = 1, size: int = 3, positions: int | None = None, **options):
    config = WorkloadConfig(prompts="sentences", blocks=blocks, requests_per_block=size, source=source, **options)
    return build_workload(config, CODEC, 0, 0, positions)


def shapes(workload) -> list[tuple[int, int]]:
    return [(len(request.input_ids), request.max_new_tokens) for request in workload.requests]


def test_rows_become_requests_of_their_lengths_at_their_times_in_blocks(tmp_path):
    path = lengths_file(
        tmp_path, [(10, 5, 1), (10, 70, 9), (11.5, 7, 40), (20, 8, 4), (22, 9, 5), (22, 10, 6), (30, 1, 1)]
    )
    workload = built(SourceConfig(path), blocks=2, load="trace", concurrency=None, max_new_tokens=16)
    assert shapes(workload) == [(5, 1), (70, 9), (7, 16), (8, 4), (9, 5), (10, 6)]
    assert workload.times == ((0, 0, 3 * S // 2), (0, 2 * S, 2 * S))
    described = workload.describe()
    assert described["schedule"]["offered_req_s"] == [2 / 1.5, 1.0]
    counts = (
        "malformed",
        "passed_over",
        "dropped",
        "truncated",
        "ignored_stops",
        "dropped_turns",
        "out_of_order",
        "repeated_prompts",
    )
    assert described["source"] | {"sha256": ""} == dict.fromkeys(counts, 0) | {
        "path": "trace.csv", "sha256": "", "format": "lengths", "rows_read": 6, "first_malformed": None,
        "cut_answers": 1,
    }  # fmt: skip


def test_the_hash_covers_the_schedule(tmp_path):
    early, late = ([(0, 5, 1), (t, 6, 1), (9, 7, 1)] for t in (1, 2))
    hashes = {
        built(SourceConfig(lengths_file(tmp_path, rows)), load="trace", concurrency=None).sha256
        for rows in (early, late)
    }
    assert len(hashes) == 2


def test_rows_out_of_order_are_sorted_and_counted(tmp_path):
    path = lengths_file(tmp_path, [(3, 5, 1), (1, 6, 1), (1, 7, 1)])
    workload = built(SourceConfig(path), load="trace", concurrency=None)
    assert shapes(workload) == [(6, 1), (7, 1), (5, 1)]
    assert workload.times == ((0, 0, 2 * S),)
    assert workload.describe()["source"]["out_of_order"] == 1


def test_one_row_is_a_workload(tmp_path):
    workload = built(SourceConfig(lengths_file(tmp_path, [(3, 5, 1)])), size=1, load="trace", concurrency=None)
    assert workload.times == ((0,),)
    assert workload.describe()["schedule"]["offered_req_s"] == [None]


@pytest.mark.parametrize("text", ["", "timestamp,input_tokens,output_tokens\n"])
def test_a_file_without_rows_is_refused(tmp_path, text):
    path = tmp_path / "trace.csv"
    path.write_text(text)
    with pytest.raises(UsageError, match=r"trace\.csv has 0 rows that can be sent, and the run needs 3: lower"):
        built(SourceConfig(str(path)))


def test_a_prompt_beyond_the_context_is_refused_cut_or_left_out_as_asked(tmp_path):
    path = lengths_file(tmp_path, [(0, 90, 10), (1, 91, 10), (2, 20, 10), (3, 30, 10)])
    with pytest.raises(CapacityError, match=r"line 3: its prompt has 91 tokens, and 90 fit beside an answer of 10"):
        built(SourceConfig(path), positions=100)
    cut = built(SourceConfig(path, too_long="truncate"), positions=100)
    left = built(SourceConfig(path, too_long="drop"), positions=100)
    assert shapes(cut) == [(90, 10), (90, 10), (20, 10)]
    assert shapes(left) == [(90, 10), (20, 10), (30, 10)]
    assert (cut.describe()["source"]["truncated"], left.describe()["source"]["dropped"]) == (1, 1)


def test_max_input_tokens_bounds_prompts_of_text_as_well(tmp_path):
    path = jsonl(tmp_path, '{"prompt": "a b c d e f g h"}', '{"prompt": "a b"}', '{"prompt": "c d"}', '{"prompt": "e"}')
    # A turn of HashCodec has 6 ids around its words: <, user, >, and <, assistant, >.
    assert shapes(built(SourceConfig(path, too_long="drop", max_input_tokens=9))) == [(8, 16), (8, 16), (7, 16)]
    assert shapes(built(SourceConfig(path, too_long="truncate", max_input_tokens=9)))[0] == (9, 16)
    with pytest.raises(CapacityError, match=r"line 1: its prompt has 14 tokens, and 9 fit"):
        built(SourceConfig(path, max_input_tokens=9))


def test_an_answer_that_fills_the_context_is_refused(tmp_path):
    with pytest.raises(CapacityError, match=r"line 2: its answer of 16 tokens leaves no room for a prompt"):
        built(SourceConfig(lengths_file(tmp_path, [(0, 5, 99)] * 3), too_long="truncate"), positions=16)


def test_lengths_are_scaled_and_never_0(tmp_path):
    path = lengths_file(tmp_path, [(0, 100, 30), (1, 2, 1), (2, 55, 5)])
    assert shapes(built(SourceConfig(path, length_scale=0.1))) == [(10, 3), (1, 1), (6, 1)]


def test_mooncakes_shared_blocks_are_shared_also_where_they_are_scaled(tmp_path):
    rows = ['{"timestamp": 0, "input_length": 1100, "output_length": 3, "hash_ids": [0, 1, 2]}',
            '{"timestamp": 0, "input_length": 1400, "output_length": 3, "hash_ids": [0, 1, 5]}',
            '{"timestamp": 5, "input_length": 600, "output_length": 3, "hash_ids": [0, 8]}']  # fmt: skip
    for scale, block in ((1.0, 512), (0.01, 6)):
        first, second, third = (
            each.input_ids for each in built(SourceConfig(jsonl(tmp_path, *rows), length_scale=scale)).requests
        )
        both = min(2 * block, len(first))
        assert first[:both] == second[:both]
        assert first[2 * block :] != second[2 * block : len(first)] or len(first) == both
        assert first[:block] == third[: min(block, len(third))]


def test_every_malformed_row_is_refused_by_its_line_or_counted(tmp_path):
    path = jsonl(tmp_path, '{"prompt": "a"}', "not json", '{"prompt": ""}', '{"prompt": "b"}', '{"prompt": "c"}')
    with pytest.raises(UsageError, match=r"rows\.jsonl, line 2: it is not JSON .*malformed=skip"):
        built(SourceConfig(path))
    facts = built(SourceConfig(path, malformed="skip")).describe()["source"]
    assert (facts["rows_read"], facts["malformed"], facts["format"]) == (5, 2, "prompts")
    assert facts["first_malformed"].startswith("line 2: it is not JSON")


def test_what_a_row_says_of_its_sampling_and_its_answer_is_its_own(tmp_path):
    path = jsonl(
        tmp_path,
        '{"prompt": "a", "temperature": 0.5, "top_p": 0.9, "top_k": 4, "seed": 11, "max_tokens": 3}',
        '{"prompt": "b"}',
        '{"prompt": "c", "temperature": 0, "stop": "x"}',
    )
    workload = built(SourceConfig(path), top_p=0.8)
    sampling = [request.sampling for request in workload.requests]
    assert sampling == [Sampling(0.5, 4, 0.9, 11), Sampling(0.0, 0, 0.8, 0), Sampling(0.0, 0, 0.8, 0)]
    assert [request.max_new_tokens for request in workload.requests] == [3, 16, 16]
    assert workload.greedy is False
    assert workload.describe()["source"]["ignored_stops"] == 1  # the ids of `HashCodec` are no text to look at
    assert [request.stop_strings for request in workload.requests] == [(), (), ()]


class Texts:
    """A tokenizer of `HashCodec`'s ids: all that a workload asks of one."""

    encode, encode_chat = CODEC.encode, CODEC.encode_chat
    encode_messages, encode_next_turn = CODEC.encode_messages, CODEC.encode_next_turn


def test_a_rows_stops_are_its_own_and_part_of_the_hash(tmp_path):
    def of(*stops: str):
        path = jsonl(tmp_path, *(f'{{"prompt": "a"{each}}}' for each in stops))
        config = WorkloadConfig(blocks=1, requests_per_block=len(stops), source=SourceConfig(path))
        return build_workload(config, Texts(), 0, 0, None)

    workload = of(', "stop": "x"', ', "stop": ["x", "\\n"], "stop_token_ids": [7, 8]', ', "stop": null')
    found = [(request.stop_strings, request.stop_ids) for request in workload.requests]
    assert found == [(("x",), ()), (("x", "\n"), (7, 8)), ((), ())]
    assert [request.may_stop for request in workload.requests] == [True, True, False]
    assert workload.describe()["source"]["ignored_stops"] == 0
    assert {request.stop_strings for request in workload.warmup} == {(NEVER,)}  # looked through, and never stopped
    assert len({of(stop, "").sha256 for stop in ("", ', "stop": "x"', ', "stop": "y"', ', "stop_token_ids": [7]')}) == 4


def test_conversations_and_turns_are_encoded_as_chats(tmp_path):
    path = jsonl(
        tmp_path,
        '{"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]}',
        '{"messages": [{"role": "user", "content": "u"}], "tools": [{"type": "function"}]}',
    )
    plain, tools = built(SourceConfig(path), size=2).requests
    assert plain.input_ids == CODEC.encode("<system> s <user> u <assistant>")
    assert tools.input_ids == CODEC.encode('[{"type": "function"}] <user> u <assistant>')
    turns = built(SourceConfig(jsonl(tmp_path, '{"turns": ["One?", "Two?"]}')), size=1).requests
    assert turns[0].input_ids == CODEC.encode_chat("One?")


def test_sharegpts_answer_gives_the_length_of_the_new_one(tmp_path):
    said = '[{"conversations": [{"from": "human", "value": "u"}, {"from": "gpt", "value": "one two three"}]}]'
    path = tmp_path / "sharegpt.json"
    path.write_text(said)
    assert shapes(built(SourceConfig(str(path)), size=1)) == [(7, 3)]


def test_what_is_not_timed_is_none_of_the_timed(tmp_path):
    path = lengths_file(tmp_path, [(0, 20 + index, 2 + index % 3) for index in range(40)])
    workload = built(SourceConfig(path), size=40)
    timed = {request.input_ids for request in workload.requests}
    others = [request.input_ids for request in (*workload.warmup, *workload.probe)]
    assert timed.isdisjoint(others)
    assert {len(ids) for ids in others} <= {len(ids) for ids in timed}
    assert len(workload.probe) == 12


def test_trace_times_are_needed_of_every_row(tmp_path):
    path = jsonl(tmp_path, '{"prompt": "a", "timestamp": 1}', '{"prompt": "b"}', '{"prompt": "c", "timestamp": 3}')
    with pytest.raises(UsageError, match=r"needs the times of all rows, and rows\.jsonl has none"):
        built(SourceConfig(path), load="trace", concurrency=None)
    with pytest.raises(UsageError, match=r"workload\.load=trace sends at the times of a file: name it with"):
        built(SourceConfig(), load="trace", concurrency=None)


@pytest.mark.parametrize("how", ["first", "window", "rows"])
def test_a_sample_is_seeded_in_order_and_of_the_whole_file(tmp_path, how):
    path = lengths_file(tmp_path, [(index, 1 + index, 1) for index in range(50)])

    def taken(seed: int, spare: int = 0) -> list[int]:
        file = RowFile(SourceConfig(path, sample=how))
        return [row.input_tokens for row in file.take(6, spare, 3, lambda row: row, random.Random(seed))]

    seen = {tuple(taken(seed)) for seed in range(200)}
    assert taken(5) == taken(5)
    assert taken(5, spare=6)[:6] == taken(5)
    assert len(set(taken(5, spare=42))) == 48
    if how == "first":
        assert seen == {(1, 2, 3, 4, 5, 6)}
    elif how == "window":
        assert seen <= {tuple(range(start, start + 6)) for start in range(1, 46)}
        assert len(seen) > 30
    else:
        assert {row for rows in seen for row in rows} == set(range(1, 51))
        assert all(list(rows[:3]) == sorted(rows[:3]) and list(rows[3:]) == sorted(rows[3:]) for rows in seen)


def test_rows_are_drawn_uniformly(tmp_path):
    path = lengths_file(tmp_path, [(index, 1 + index, 1) for index in range(10)])
    file = RowFile(SourceConfig(path, sample="rows"))
    rng = random.Random(0)
    counts = [0] * 11
    for _ in range(600):
        for row in file.take(2, 0, 2, lambda row: row, rng):
            counts[row.input_tokens or 0] += 1
    assert all(80 < count < 160 for count in counts[1:])  # 120 expected, a standard deviation of 10


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        (SourceConfig(format="xml"), r"workload\.source\.format must be one of auto, azure, .*, got 'xml'"),
        (SourceConfig(sample="some"), r"workload\.source\.sample must be one of first, window, rows, got 'some'"),
        (SourceConfig(malformed="fix"), r"workload\.source\.malformed must be one of refuse, skip"),
        (SourceConfig(too_long="fold"), r"workload\.source\.too_long must be one of refuse, truncate, drop"),
        (SourceConfig(max_input_tokens=0), r"max_input_tokens must be at least 1"),
        (SourceConfig(length_scale=0.0), r"length_scale must be above 0"),
        (SourceConfig(shared_prefix=1.0), r"shared_prefix must be 0 or more and below 1"),
    ],
)
def test_a_wrong_option_is_named(config, sentence):
    with pytest.raises(UsageError, match=sentence):
        check_source(config)


def test_what_makes_prompts_has_no_place_beside_a_file():
    with pytest.raises(UsageError, match=r"have their own: set them to null and \[1\.0\]"):
        check_config(WorkloadConfig(prompt_tokens=20, source=SourceConfig("x.csv")))


ARRIVALS = [  # 1.5, 1.5 and 4 s after the moment before the first one that the file counts from
    (
        "azure.csv",
        (
            "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:01.5000000,4,3\n"
            "2023-11-16 18:17:01.5000000,5,2\n2023-11-16 18:17:04.0000000,6,1\n"
        ),
    ),
    (
        "burst.csv",
        (
            "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n1.5,ChatGPT,4,3,7,Conversation log\n"
            "1.5,GPT-4,5,2,7,API log\n4,GPT-4,6,1,7,API log\n"
        ),
    ),
    (
        "mooncake.jsonl",
        (
            '{"timestamp": 1500, "input_length": 4, "output_length": 3, "hash_ids": [0]}\n'
            '{"timestamp": 1500, "input_length": 5, "output_length": 2, "hash_ids": [1]}\n'
            '{"timestamp": 4000, "input_length": 6, "output_length": 1, "hash_ids": [0]}\n'
        ),
    ),
    ("lengths.csv", "timestamp,input_tokens,output_tokens\n1.5,4,3\n1.5,5,2\n4,6,1\n"),
    (
        "prompts.jsonl",
        "".join(
            json.dumps({"prompt": "w " * words, "max_tokens": new, "timestamp": at}) + "\n"
            for at, words, new in ((1.5, 4, 3), (1.5, 5, 2), (4, 6, 1))
        ),
    ),
    (
        "messages.jsonl",
        "".join(
            json.dumps({"messages": [{"role": "user", "content": "w " * words}], "max_tokens": new, "timestamp": at})
            + "\n"
            for at, words, new in ((1.5, 4, 3), (1.5, 5, 2), (4, 6, 1))
        ),
    ),
]


@pytest.mark.parametrize(("name", "text"), ARRIVALS, ids=[name for name, _ in ARRIVALS])
@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_files_of_every_format_arrive_at_their_own_times_twice_as_fast(tmp_path, name, text, suffix):
    content = text.encode()
    (tmp_path / f"{name}{suffix}").write_bytes(gzip.compress(content) if suffix else content)
    source = SourceConfig(str(tmp_path / f"{name}{suffix}"))
    workload = built(source, load="trace", concurrency=None, arrivals=ArrivalConfig(speed_up=2.0))
    around = 6 if name in ("prompts.jsonl", "messages.jsonl") else 0  # the marks of a chat's turns
    assert shapes(workload) == [(4 + around, 3), (5 + around, 2), (6 + around, 1)]
    assert workload.times == ((0, 0, 5 * S // 4),)


def test_a_recorded_run_is_replayed_as_its_candidate_was_asked(tmp_path, synthetic, timeline):
    """Two blocks of two requests through both arms, warm-up before: four requests, at the moments of one arm."""
    directory = synthetic(blocks=2, requests=2, tokens=3).write(
        lambda arm, block, request: timeline(0.2, 10, [5.0] * 2)
    )
    asked = read_run(directory).requests.query("phase == 'measure' and arm == 'candidate'").sort_values("scheduled_ns")
    assert len(asked) == 4
    source = SourceConfig(str(directory / "requests.parquet"))
    workload = built(source, blocks=2, size=2, load="trace", concurrency=None)
    assert shapes(workload) == list(zip(asked["input_tokens"], asked["output_tokens"], strict=True))
    stamps = asked["scheduled_ns"].tolist()
    assert workload.times == ((0, stamps[1] - stamps[0]), (0, stamps[3] - stamps[2]))
    facts = workload.describe()["source"]
    assert (facts["format"], facts["passed_over"] >= 4, facts["malformed"]) == ("replay", True, 0)


def test_a_sample_of_a_long_trace_holds_no_more_than_it_takes(tmp_path, monkeypatch):
    count = 10_000
    entries = (
        Entry(f"line {number}", {"timestamp": str(number), "input_tokens": "5", "output_tokens": "1"})
        for number in range(count)
    )
    monkeypatch.setattr("skote.eval.sources.row_file.read_records", lambda _: entries)
    file = RowFile(SourceConfig("trace.csv", sample="rows"))
    tracemalloc.start()
    try:
        taken = file.take(10, 0, 5, lambda row: row, random.Random(0))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (len(taken), file.reading.rows) == (10, count)
    assert peak < 300_000  # all rows together take 10 times as much


def test_control_characters_and_every_script_reach_the_prompt(tmp_path):
    text = "a\x00b\x07 \u202e\U0001f600 \u65e5\u672c \x85"
    asked = built(SourceConfig(jsonl(tmp_path, json.dumps({"prompt": text}))), size=1).requests[0]
    assert asked.input_ids == CODEC.encode_chat(text)


def test_a_row_without_text_or_lengths_is_no_request():
    assert Row("line 1").input_tokens is None
    with pytest.raises(RequestError):
        Sampling(top_p=0.0)
