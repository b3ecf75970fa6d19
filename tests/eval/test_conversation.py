from __future__ import annotations

import json
import time
from concurrent.futures import Future

import pytest

from skote.eval.codec import HashCodec
from skote.eval.conversation import Conversations, as_sent, at_full_length, parted
from skote.eval.derive import Measured
from skote.eval.page import report_html
from skote.eval.record import read_run
from skote.eval.schedule import run_schedule
from skote.eval.sending import send_block
from skote.eval.sources.lengths import LengthConfig
from skote.eval.sources.source_config import SourceConfig, check_source
from skote.eval.summary import summarize
from skote.eval.workload import build_workload, check_fits
from skote.eval.workload_config import WorkloadConfig
from skote.types import CapacityError, Completion, Request, UsageError

MS = 1_000_000
CODEC = HashCodec(49152)


def turn(name: str, *ids: int) -> Request:
    return Request(name, ids, max_new_tokens=2)


BLOCK = [turn("a-t0", 1, 2), turn("a-t1", 3), turn("a-t2", 4), turn("b-t0", 5), turn("c-t0", 6), turn("c-t1", 7)]
TURNS = (3, 1, 2)


class Echo:
    """Answers a prompt at once with its length, twice; `fail` names requests that fail. Counts what is open."""

    def __init__(self, fail: str = "") -> None:
        self.sent: list[tuple[str, tuple[int, ...]]] = []
        self._fail = fail

    def dispatch(self, request: Request) -> Future[Completion]:
        self.sent.append((request.request_id, request.input_ids))
        now = time.monotonic_ns()
        status = "error" if request.request_id == self._fail else "ok"
        ids = (100 + len(request.input_ids),) * 2
        future: Future[Completion] = Future()
        future.set_result(Completion(request.request_id, len(request.input_ids), ids, (), now, now, now, status))
        return future

    def cancel(self, future: Future[Completion]) -> bool:
        return False


def run(dispatcher: Echo, concurrency: int | None = None, think_ns: int = 0):
    talks = Conversations(BLOCK, TURNS, (think_ns,) * len(BLOCK), concurrency)
    ended: list[tuple[str, str, int]] = []
    run_schedule(
        dispatcher, talks.first, (0,) * len(talks.first),
        lambda at_ns, done: ended.append((done.request_id, done.status, at_ns)), follow=talks.follow,
    )  # fmt: skip
    return talks, ended


def test_a_next_turn_begins_with_all_before_it_and_the_models_own_answer():
    dispatcher = Echo()
    talks, ended = run(dispatcher)
    prompts = dict(dispatcher.sent)
    assert prompts["a-t0"] == (1, 2)
    assert prompts["a-t1"] == (1, 2, 102, 102, 3)
    assert prompts["a-t2"] == (1, 2, 102, 102, 3, 105, 105, 4)
    assert prompts["c-t1"] == (6, 101, 101, 7)
    assert talks.prompts == {name: prompts[name] for name in ("a-t1", "a-t2", "c-t1")}
    assert sorted(name for name, *_ in ended) == sorted(each.request_id for each in BLOCK)


def test_a_closed_loop_keeps_so_many_conversations_open():
    dispatcher = Echo()
    run(dispatcher, concurrency=1)
    assert [name for name, _ in dispatcher.sent] == ["a-t0", "a-t1", "a-t2", "b-t0", "c-t0", "c-t1"]
    talks = Conversations(BLOCK, TURNS, (0,) * len(BLOCK), 2)
    assert [each.request_id for each in talks.first] == ["a-t0", "b-t0"]


def test_an_answer_that_ends_with_what_follows_it_ends_once():
    """As where a model is let end its turn: the mark of that is what the next turn begins with, too."""
    block = [turn("a-t0", 1, 2), turn("a-t1", 102, 3)]
    talks = Conversations(block, (2,), (0, 0), None)
    done = Completion("a-t0", 2, (9, 102), (), 0, 0, 0, "ok", "stop")
    ((_, following),) = talks.follow(block[0], done)
    assert following.input_ids == (1, 2, 9, 102, 3)


def test_a_next_turn_waits_for_the_user_to_think():
    _, ended = run(Echo(), concurrency=1, think_ns=3 * MS)
    at = {name: at_ns for name, _, at_ns in ended}
    assert at["a-t1"] - at["a-t0"] >= 3 * MS
    assert at["a-t2"] - at["a-t1"] >= 3 * MS
    assert at["b-t0"] > at["a-t2"]


def test_a_turn_that_fails_loses_the_later_ones_and_no_other_conversation():
    dispatcher = Echo(fail="a-t1")
    _, ended = run(dispatcher, concurrency=1)
    statuses = {name: status for name, status, _ in ended}
    assert statuses == {"a-t0": "ok", "a-t1": "error", "a-t2": "cancelled", "b-t0": "ok", "c-t0": "ok", "c-t1": "ok"}
    assert "a-t2" not in dict(dispatcher.sent)


def test_what_is_given_up_is_handed_over_with_all_its_turns():
    talks = Conversations(BLOCK, TURNS, (0,) * len(BLOCK), None)
    ended: list[str] = []
    run_schedule(
        Echo(), talks.first, (0, 60_000 * MS, 60_000 * MS), lambda _, done: ended.append(done.request_id),
        lambda: len(ended) >= 1, talks.follow,
    )  # fmt: skip
    assert sorted(ended) == sorted(each.request_id for each in BLOCK)


def test_lengths_count_the_answers():
    assert [len(each) for each in parted(BLOCK, TURNS)] == [3, 1, 2]
    full = at_full_length(BLOCK, TURNS)
    # a: 2; 2 + 2 + 1 = 5; 5 + 2 + 1 = 8. c: 1; 1 + 2 + 1 = 4.
    assert [len(each.input_ids) for each in full] == [2, 5, 8, 1, 1, 4]
    assert full[2].input_ids[: len(full[1].input_ids)] == full[1].input_ids


def test_turns_are_judged_where_both_arms_were_asked_the_same():
    first, later = turn("a-t0", 1), turn("a-t1", 2)
    both = {"candidate": {"a-t1": (1, 9, 2)}, "baseline": {"a-t1": (1, 9, 2)}}
    assert as_sent([first, later], both) == [first, Request("a-t1", (1, 9, 2), 2)]
    assert as_sent([first, later], both | {"baseline": {"a-t1": (1, 8, 2)}}) == [first]
    assert as_sent([first, later], {"candidate": {"a-t1": (1, 9, 2)}, "baseline": {}}) == [first]
    assert as_sent([first], {"candidate": {}}) == [first]


def built(tmp_path, *rows: str, positions: int | None = None, **source):
    path = tmp_path / "bench.jsonl"
    path.write_text("\n".join(rows))
    config = WorkloadConfig(
        prompts="sentences", blocks=1, requests_per_block=len(rows), max_new_tokens=4,
        source=SourceConfig(str(path), turns="all", **source), concurrency=1,
    )  # fmt: skip
    return build_workload(config, CODEC, 0, 0, positions)


ROWS = ('{"turns": ["One?", "Two?", "Three?"]}', '{"turns": ["Four?"]}')


def test_a_files_turns_become_conversations(tmp_path):
    workload = built(tmp_path, *ROWS, think_ms=2.5)
    assert [each.request_id for each in workload.requests] == ["b00-r00-t0", "b00-r00-t1", "b00-r00-t2", "b00-r01-t0"]
    assert workload.turns == ((3, 1),)
    assert workload.think_ns == ((0, 2_500_000, 2_500_000, 0),)
    assert workload.requests[1].input_ids == CODEC.encode_next_turn([{"role": "user", "content": "Two?"}])
    assert len({workload.sha256, built(tmp_path, *ROWS).sha256, built(tmp_path, *ROWS[::-1]).sha256}) == 3
    described = workload.describe()
    assert (described["turns"], described["requests_per_block"]) == (4, 2)
    # A turn has 8 ids and an answer 4: 8, 20 and 32.
    assert [len(each.input_ids) for each in workload.at_full_length] == [8, 20, 32, 8]
    assert {len(each.input_ids) for each in workload.warmup} == {8, 20, 32}
    check_fits(workload, 36)
    with pytest.raises(CapacityError, match="b00-r00-t2"):
        check_fits(workload, 35)


def test_tools_answer_in_turns_of_their_own_and_recorded_answers_are_left_to_the_model(tmp_path):
    said = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "u"},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]},
        {"role": "assistant", "content": "One more moment."},
        {"role": "tool", "content": "t"},
        {"role": "user", "content": "v"},
        {"role": "assistant", "content": "So."},
    ]
    rows = (
        json.dumps({"messages": said}),
        json.dumps({"messages": [{"role": "assistant", "content": "Hi."}, said[1]]}),
    )
    workload = built(tmp_path, *rows, think_ms=100.0)
    assert workload.turns == ((2, 1),)
    assert [each.input_ids for each in workload.requests] == [
        CODEC.encode("<system> s <user> u <assistant>"),
        CODEC.encode("<tool> t <user> v <assistant>"),
        CODEC.encode("<assistant> Hi. <user> u <assistant>"),
    ]


def test_each_answer_of_a_conversation_has_the_length_of_its_own_in_the_file(tmp_path):
    said = [
        {"role": "user", "content": "u"},
        {"role": "assistant", "content": "one two"},
        {"role": "user", "content": "v"},
        {"role": "assistant", "content": "one two three"},
        {"role": "user", "content": "w"},
        {"role": "assistant", "content": "one"},
    ]
    people = {"user": "human", "assistant": "gpt"}
    shared = [{"from": people[each["role"]], "value": each["content"]} for each in said[:5]]
    rows = json.dumps({"messages": said}), json.dumps({"messages": said[:-1]}), json.dumps({"messages": said[:3]})
    # What the file does not say has the 4 of `max_new_tokens`.
    assert [each.max_new_tokens for each in built(tmp_path, *rows).requests] == [2, 3, 1, 2, 3, 4, 2, 4]
    assert [each.max_new_tokens for each in built(tmp_path, json.dumps({"conversations": shared})).requests] == [
        2,
        3,
        4,
    ]
    # Prompts are as long as the answers before them make them: 6 ids a turn.
    assert [len(each.input_ids) for each in built(tmp_path, *rows[:1]).at_full_length] == [7, 16, 26]


def test_thinking_is_a_rows_own_or_drawn_turn_by_turn(tmp_path):
    thinking = LengthConfig("uniform", min=10, max=20)
    rows = (*ROWS, '{"turns": ["Five?", "Six?", "Seven?"], "think_ms": [0.5]}')
    drawn, again = (built(tmp_path, *rows, think=thinking) for _ in range(2))
    assert drawn.think_ns == again.think_ns
    first, second, third, alone, fifth, sixth, seventh = drawn.think_ns[0]
    assert (first, alone, fifth, sixth) == (0, 0, 0, 500_000)
    assert all(10 * MS <= each <= 20 * MS for each in (second, third, seventh))
    assert len({second, third, seventh}) > 1
    for config in (SourceConfig(think=thinking), SourceConfig(turns="all", think_ms=1.0, think=thinking)):
        with pytest.raises(UsageError, match=r"workload\.source\.think draws the times before further turns"):
            check_source(config)


def test_turns_that_no_longer_fit_are_left_out_and_counted(tmp_path):
    workload = built(tmp_path, *ROWS, positions=30)
    assert workload.turns == ((2, 1),)
    assert workload.describe()["source"]["dropped_turns"] == 1


def test_a_block_of_conversations_is_sent_whole(tmp_path):
    workload = built(tmp_path, *ROWS)
    ended: list[str] = []
    prompts = send_block(
        Echo(), workload, 0, workload.blocks[0], lambda _, done: ended.append(done.request_id), lambda: False
    )
    assert sorted(ended) == [each.request_id for each in workload.requests]
    assert set(prompts) == {"b00-r00-t1", "b00-r00-t2"}


def test_think_time_needs_turns():
    check_source(SourceConfig(turns="all", think_ms=5.0))
    with pytest.raises(UsageError, match=r"think_ms must be 0 or more, and has no effect with .*turns=first"):
        check_source(SourceConfig(think_ms=5.0))
    with pytest.raises(UsageError, match=r"workload\.source\.turns must be one of first, all"):
        check_source(SourceConfig(turns="some"))


def test_figures_of_conversations_and_of_their_turns(synthetic, timeline):
    """Six requests a block, one after another: two conversations of three turns, the last turn of the second fails."""

    def shape(arm, block, request):
        return timeline(0, 10 + 10 * (request % 3), [5], ok=block < 0 or request != 5)

    run = read_run(synthetic(blocks=1, requests=6, tokens=2, arms={"candidate": "skotergy"}).write(shape))
    assert "sessions" not in summarize(run)
    run.manifest["workload"]["turns"] = 6
    measured = run.requests["phase"] == "measure"
    run.requests.loc[measured, "request_id"] = [f"b00-r0{index // 3}-t{index % 3}" for index in range(6)]
    run.tokens["request_id"] = run.tokens["request_id"].astype(object)
    figures = summarize(run)["sessions"]["candidate"]
    assert (figures["sessions"], figures["complete"]) == (2, 1)
    rows = run.requests[measured].head(3)
    whole = (rows["last_token_ns"].iloc[2] - rows["scheduled_ns"].iloc[0]) / 1e9
    assert figures["duration_s"] == pytest.approx({"p50": whole, "p95": whole})
    assert [row["turn"] for row in figures["by_turn"]] == [0, 1, 2]
    assert [row["ok"] for row in figures["by_turn"]] == [2, 2, 1]
    assert [row["ttft_ms"]["p50"] for row in figures["by_turn"]] == [10.0, 20.0, 30.0]
    page = report_html(run.manifest, summarize(run), Measured(run))
    assert "1 of 2 conversations came to their end" in page
