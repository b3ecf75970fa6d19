from __future__ import annotations

import json

import pytest

from skote.eval.derive import METRICS, Measured
from skote.eval.record import RowKey, Run, RunWriter, read_run
from skote.eval.schema_version import SCHEMA_VERSION
from skote.types import Chunk, Completion

MS = 1_000_000
BY_NAME = {metric.name: metric for metric in METRICS}


def completion(dispatched, chunks, **changes):
    values = {
        "request_id": "r0",
        "input_tokens": 7,
        "output_ids": tuple(range(sum(n for _, n in chunks))),
        "chunks": tuple(Chunk(int(t * MS), n) for t, n in chunks),
        "dispatched_ns": dispatched * MS,
        "admitted_ns": (dispatched + 1) * MS,
        "end_ns": int(chunks[-1][0] + 1) * MS if chunks else dispatched * MS,
        "status": "ok",
        "finish_reason": "length",
    }
    return Completion(**(values | changes))


@pytest.fixture
def measured(tmp_path):
    """`measured((arm, block, round, phase, scheduled_ms, completion), ...)` through parquet files and back."""

    def build(*rows):
        writer = RunWriter(tmp_path, "run", "ab" * 32)
        for arm, block, round_, phase, scheduled, done in rows:
            writer.add(RowKey(arm, "engine", block, round_, phase), scheduled * MS, done)
        writer.flush()
        (tmp_path / "manifest.json").write_text(json.dumps({"schema_version": SCHEMA_VERSION, "run_id": "run"}))
        return Measured(read_run(tmp_path))

    return build


WORKED = completion(2, [(13, 1), (18, 1), (28, 2)], end_ns=29 * MS)


def test_worked_example_of_the_metric_definitions(measured):
    run = measured(("candidate", 0, 0, "measure", 0, WORKED))
    expected = {
        "ttft_ms": [11],
        "ttft_sched_ms": [13],
        "e2el_ms": [26],
        "e2el_sched_ms": [28],
        "tpot_ms": [5],
        "itl_ms": [5, 5, 5],
        "icl_ms": [5, 10],
        "itl_max_ms": [10],
        "dispatch_delay_ms": [2],
        "queue_ms": [1],
    }

    assert run.requests["output_tokens"].tolist() == [4]
    assert {name: run.samples("candidate", BY_NAME[name]).values.tolist() for name in expected} == expected
    assert set(expected) == set(BY_NAME)


def test_throughput_of_the_worked_example(measured):
    run = measured(("candidate", 0, 0, "measure", 0, WORKED))

    rates = run.throughput("candidate")

    assert rates["output_tok_s"] == pytest.approx(4 / 0.026)
    assert rates["total_tok_s"] == pytest.approx(11 / 0.026)
    assert rates["req_s"] == pytest.approx(1 / 0.026)


def test_tpot_is_undefined_for_a_single_chunk(measured):
    run = measured(("candidate", 0, 0, "measure", 0, completion(2, [(13, 4)])))

    assert run.samples("candidate", BY_NAME["tpot_ms"]).values.size == 0
    assert run.samples("candidate", BY_NAME["itl_max_ms"]).values.size == 0
    assert run.samples("candidate", BY_NAME["e2el_ms"]).values.tolist() == [11]


def test_warmup_does_not_count(measured):
    run = measured(
        ("candidate", 0, 0, "warmup", 0, completion(1, [(500, 1), (900, 1)])),
        ("candidate", 0, 0, "measure", 1000, completion(1000, [(1010, 1), (1030, 1)])),
    )

    assert run.samples("candidate", BY_NAME["icl_ms"]).values.tolist() == [20]
    assert run.throughput("candidate")["output_tok_s"] == pytest.approx(2 / 0.030)


def test_the_other_arms_passes_do_not_count_in_the_window(measured):
    """Two passes of 20 and 40 ms with 80 ms of the other arm between them: 60 ms, not 140."""
    run = measured(
        ("candidate", 0, 0, "measure", 0, completion(0, [(10, 1), (20, 1)])),
        ("baseline", 0, 1, "measure", 20, completion(20, [(50, 1), (100, 1)])),
        ("candidate", 1, 0, "measure", 100, completion(100, [(120, 1), (140, 2)])),
    )

    assert run.throughput("candidate")["output_tok_s"] == pytest.approx(5 / 0.060)
    assert run.throughput("baseline")["output_tok_s"] == pytest.approx(2 / 0.080)
    assert run.block_throughput("candidate")[1]["output_tok_s"] == pytest.approx(3 / 0.040)


def test_a_failed_request_has_no_latency_and_finishes_no_tokens(measured):
    partial = completion(0, [(10, 1), (90, 1)], request_id="r1", status="error", finish_reason=None, error="It broke.")
    run = measured(
        ("candidate", 0, 0, "measure", 0, completion(0, [(10, 1), (20, 1)])),
        ("candidate", 0, 0, "measure", 0, partial),
    )

    assert run.samples("candidate", BY_NAME["e2el_ms"]).values.tolist() == [20]
    assert run.samples("candidate", BY_NAME["icl_ms"]).values.tolist() == [10]
    assert run.failures("candidate") == 1
    assert run.throughput("candidate")["output_tok_s"] == pytest.approx(2 / 0.090)


def test_gaps_do_not_depend_on_the_order_of_the_token_rows(measured, tmp_path):
    measured(
        ("candidate", 0, 0, "measure", 0, completion(0, [(10, 1), (20, 1), (35, 1)])),
        ("candidate", 0, 0, "measure", 0, completion(0, [(12, 2), (50, 2)], request_id="r1")),
        ("candidate", 1, 0, "measure", 99, completion(99, [(110, 1)])),
    )
    run = read_run(tmp_path)
    reversed_rows = Run(run.directory, run.requests, run.tokens.iloc[::-1], run.manifest)

    for gaps in (Measured(run).gaps, Measured(reversed_rows).gaps):
        assert run.requests["request_id"][gaps["request"]].tolist() == ["r0", "r0", "r1"]
        assert gaps["gap_ms"].tolist() == [10, 15, 38]
        assert gaps["position"].tolist() == [1, 2, 2]


def test_only_blocks_with_the_same_requests_in_both_arms_are_paired(measured):
    other = completion(0, [(10, 1)], request_id="r1")
    run = measured(
        ("candidate", 0, 0, "measure", 0, completion(0, [(10, 1)])),
        ("baseline", 0, 1, "measure", 0, completion(0, [(10, 1)])),
        ("candidate", 1, 0, "measure", 0, completion(0, [(10, 1)])),
        ("candidate", 1, 0, "measure", 0, other),
        ("baseline", 1, 1, "measure", 0, completion(0, [(10, 1)])),
        ("candidate", 2, 0, "measure", 0, completion(0, [(10, 1)])),
    )

    assert run.paired_blocks == [0]
