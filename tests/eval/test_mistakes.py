"""Mistakes that other harnesses have been found to make: one test each, that this one does not."""

from __future__ import annotations

import dataclasses
import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest

from skote.eval.arrivals import ArrivalConfig
from skote.eval.codec import HashCodec
from skote.eval.record import read_run
from skote.eval.sources.source_config import SourceConfig
from skote.eval.summary import summarize
from skote.eval.workload import build_workload
from skote.eval.workload_config import WorkloadConfig, check_config
from skote.types import UsageError

CODEC = HashCodec(49152)


def test_token_events_of_one_pass_do_not_stay_for_the_next(synthetic):
    """Requests of 16 tokens have 15 gaps each, in every block; events that are kept would grow from block to block."""
    run = read_run(synthetic(blocks=6, requests=12, tokens=16).write())

    assert summarize(run)["arms"]["candidate"]["metrics"]["icl_ms"]["n"] == 6 * 12 * 15


def test_prompts_do_not_depend_on_a_salted_hash():
    code = (
        "from skote.eval.codec import HashCodec; from skote.eval.workload import build_workload;"
        "from skote.eval.workload_config import WorkloadConfig;"
        "workload = build_workload(WorkloadConfig(), HashCodec(49152), 0, 8);"
        "print(workload.extended(2).sha256, hash(workload.probe[0].input_ids[0]), workload.warmup)"
    )
    said = {
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True,
            env=os.environ | {"PYTHONHASHSEED": salt},
        ).stdout
        for salt in ("1", "2")
    }  # fmt: skip
    assert len(said) == 1


@pytest.mark.parametrize("load", ["uniform", "exponential"])
def test_a_load_that_does_not_exist_is_not_approximated_by_one_that_does(load):
    with pytest.raises(UsageError, match=rf"workload\.load must be one of closed, burst, .*, got '{load}'"):
        check_config(WorkloadConfig(load=load))


def test_a_constant_rate_has_gaps_that_are_equal():
    config = WorkloadConfig(load="constant", concurrency=None, arrivals=ArrivalConfig(rate=8.0))
    (gaps,) = {
        tuple(later - earlier for earlier, later in itertools.pairwise(times))
        for times in build_workload(config, CODEC, 0).times
    }
    assert gaps == (125_000_000,) * 11


def test_the_times_of_a_trace_are_those_that_requests_are_sent_at(tmp_path):
    path = tmp_path / "trace.csv"
    path.write_text("timestamp,input_tokens,output_tokens\n100.5,20,1\n101.5,20,1\n104.5,20,1\n")
    config = WorkloadConfig(
        load="trace", concurrency=None, blocks=1, requests_per_block=3, arrivals=ArrivalConfig(speed_up=2.0),
        source=SourceConfig(str(path)),
    )  # fmt: skip
    assert build_workload(config, CODEC, 0).times == ((0, 500_000_000, 2_000_000_000),)


CHANGES = {
    "load": {"load": "burst", "concurrency": None},
    "concurrency": {"concurrency": 3},
    "blocks": {"blocks": 5},
    "requests_per_block": {"requests_per_block": 11},
    "max_new_tokens": {"max_new_tokens": 17},
    "output_mix": {"output_mix": [0.5, 1.0]},
    "prompts": {"prompts": "short"},
    "prompt_tokens": {"prompts": "sentences", "prompt_tokens": 60},
    "prompt_mix": {"prompts": "sentences", "prompt_tokens": 60, "prompt_mix": [0.5, 1.0]},
    "temperature": {"temperature": 0.5},
    "top_k": {"top_k": 7},
    "top_p": {"top_p": 0.5},
    "respect_eos": {"respect_eos": True},
    "arrivals": {"load": "poisson", "concurrency": None, "arrivals": ArrivalConfig(rate=2.0)},
    "source": {"prompts": "sentences", "source": SourceConfig("lengths.csv")},
}


def test_no_option_is_reported_and_not_used(tmp_path, monkeypatch):
    """Every option of a workload, but for its name, changes what is sent, and so the hash of it."""
    monkeypatch.chdir(tmp_path)
    Path("lengths.csv").write_text("input_tokens,output_tokens\n" + "20,5\n" * 72)
    hashes = [
        build_workload(dataclasses.replace(WorkloadConfig(), **change), CODEC, 0).sha256
        for change in [{}, *CHANGES.values()]
    ]

    assert set(CHANGES) == {field.name for field in dataclasses.fields(WorkloadConfig)} - {"name"}
    assert len(set(hashes)) == len(hashes)


def test_warmup_and_parity_show_no_measured_prompt():
    workload = build_workload(WorkloadConfig(), CODEC, 0, max_blocks=40)
    measured = {request.input_ids for request in workload.possible}
    before = {request.input_ids for request in (*workload.warmup, *workload.probe)}

    assert measured.isdisjoint(before)


@pytest.mark.parametrize("documents", [{}, {"prompts": "sentences", "prompt_tokens": 40}], ids=["turns", "documents"])
def test_no_prompt_tells_an_engine_whether_it_is_timed(documents):
    """What all timed prompts have, the others have: their first words, their form; and no number tells the order."""
    letters = dataclasses.replace(WorkloadConfig(), **documents)
    workload = build_workload(letters, Words(), 0)
    timed, others = (
        [each.input_ids for each in some] for some in (workload.requests, workload.probe + workload.warmup)
    )

    if documents:
        numbers = [[int(ids[1].rstrip(".")) for ids in some] for some in (timed, others)]
        assert all(ids[0] == "Report" and len(ids) == 40 for ids in timed + others)
        assert sorted(numbers[0]) != numbers[0]
        assert min(numbers[0]) < sum(numbers[1]) / len(numbers[1]) < max(numbers[0])
    else:
        assert all(ids[0] == "<turn>" and ids[-1] == "</turn>" for ids in timed + others)
        beginnings = {ids[1] for ids in timed}
        assert {ids[1] for ids in others} <= beginnings
    assert not set(timed) & set(others)


@pytest.mark.parametrize(("blocks", "numbers"), [(1, {""}), (3, {"", "(2)", "(3)"})], ids=["once", "three times"])
def test_no_number_tells_a_held_out_prompt_of_a_list_that_is_no_longer_than_what_is_timed(tmp_path, blocks, numbers):
    """A dozen of questions, all timed: others have their words in another order, and numbers as often as the timed."""
    path = tmp_path / "mine.txt"
    path.write_text("\n".join(f"why is the {what} so cold" for what in "abcdefghijkl"), encoding="utf-8")
    workload = build_workload(WorkloadConfig(blocks=blocks, requests_per_block=12, prompts=str(path)), Words(), 0)
    timed, others = ([each.input_ids for each in some] for some in (workload.requests, workload.probe))

    assert {next((word for word in ids if "(" in word), "") for ids in timed} == numbers
    assert {next((word for word in ids if "(" in word), "") for ids in others} == numbers
    assert len({*timed, *others}) == len(timed) + len(others)


class Words:
    """A codec whose ids are the words themselves, so that a test can read a prompt."""

    def encode(self, text):
        return tuple(text.split())

    def encode_chat(self, text):
        return ("<turn>", *text.split(), "</turn>")


def test_throughput_counts_tokens_and_not_chunks(synthetic, timeline):
    """8 chunks of 2 tokens each: 16 tokens in 100 + 7 x 20 ms."""
    run = read_run(
        synthetic(blocks=1, requests=1, arms={"candidate": "baseline"}).write(
            lambda arm, block, request: timeline(0, 100, [20.0] * 7, tokens_per_chunk=2)
        )
    )
    candidate = summarize(run)["arms"]["candidate"]

    assert candidate["throughput"]["output_tok_s"] == pytest.approx(16 / 0.24)
    assert candidate["metrics"]["itl_ms"]["p50"]["value"] == 10
    assert candidate["metrics"]["tpot_ms"]["p50"]["value"] == 10


def test_arms_that_count_requests_differently_are_not_compared(synthetic):
    """A row of one arm is lost: that block compares nothing, and the run is invalid."""
    run = read_run(synthetic().write())
    lost = run.requests.index[(run.requests["arm"] == "candidate") & (run.requests["phase"] == "measure")][5]
    metrics = summarize(dataclasses.replace(run, requests=run.requests.drop(index=lost)))

    assert metrics["deltas"]["e2el_ms"]["p50"]["blocks"] == 5
    assert [finding["code"] for finding in metrics["findings"] if finding["severity"] == "invalid"] == ["rows_missing"]
    assert metrics["exit_code"] == 2


def test_a_fast_arm_with_other_tokens_is_invalid(synthetic, timeline):
    """As an arm has that skips the prefill; `test_runner.py` runs one."""
    run = read_run(
        synthetic().write(
            lambda arm, block, request: timeline(
                0, 1 if arm == "candidate" else 100, [1.0] * 15, output=(7,) * 16 if arm == "candidate" else None
            )
        )
    )
    metrics = summarize(run)

    assert metrics["verdict"]["label"] == "INVALID"
    assert {"output_differs_from_parity", "greedy_outputs_differ"} <= {each["code"] for each in metrics["findings"]}
    assert metrics["exit_code"] == 2


def test_failures_stand_in_the_tail(synthetic, timeline):
    """Three of 60 requests fail: p50 is finite with them, p95 is not."""
    run = read_run(
        synthetic(blocks=5, arms={"candidate": "baseline"}).write(
            lambda arm, block, request: timeline(0, 100, [10.0] * 15, ok=request != 4 or block > 2)
        )
    )
    adjusted = summarize(run)["arms"]["candidate"]["metrics"]["adj_e2el_ms"]

    assert (adjusted["n"], adjusted["p50"]["value"], adjusted["p95"]["value"]) == (60, 250, "inf")


@pytest.mark.parametrize("arms", [{"candidate": "baseline"}, {"candidate": "skotergy", "baseline": "baseline"}])
def test_a_run_in_which_every_request_failed_does_not_end_with_0(synthetic, timeline, arms):
    run = read_run(synthetic(arms=arms).write(lambda arm, block, request: timeline(0, 1, [1.0], ok=False)))

    assert summarize(run)["exit_code"] == 1
