from __future__ import annotations

import json

import pytest

from skote.eval.adaptive import primary_effect
from skote.eval.derive import Measured
from skote.eval.record import read_run
from skote.eval.summary import summarize
from skote.eval.survivors import survivor_findings


@pytest.fixture
def breaking(synthetic, timeline):
    """Both arms take 160 ms for a request and 1600 for every third, at which the candidate breaks where asked for."""

    def write(*, breaks, concurrency=1):
        def choose(arm, block, request):
            step = (100.0 if request % 3 == 2 else 10.0) * (1 + 0.001 * (block % 2))
            ok = not (breaks and arm == "candidate" and request % 3 == 2)
            return timeline(0.2, step, [step] * 15, ok=ok)

        return read_run(synthetic(blocks=5, requests=12, concurrency=concurrency).write(choose))

    return write


@pytest.mark.parametrize("concurrency", [1, 3])
def test_an_arm_that_breaks_at_the_long_requests_is_not_faster(breaking, concurrency):
    metrics = summarize(breaking(breaks=True, concurrency=concurrency))
    arms = [metrics["arms"][arm]["metrics"]["e2el_ms"]["mean"] for arm in ("candidate", "baseline")]

    assert arms[0] < arms[1] / 3  # each arm's own survivors
    for part in (metrics, metrics["steady"]) if concurrency > 1 else (metrics,):
        for name in ("e2el_ms", "ttft_ms", "tpot_ms"):
            assert part["deltas"][name]["p95"]["delta_pct"] == pytest.approx(0)
            assert part["deltas"][name]["p50"]["verdict"] == "SAME"
    assert metrics["deltas"]["itl_ms"]["p95"]["delta_pct"] == pytest.approx(0)
    assert metrics["exit_code"] == 1


def test_how_many_are_left_out_is_a_finding(breaking):
    (finding,) = survivor_findings(Measured(breaking(breaks=True)))

    assert (finding.severity, finding.code, finding.observed) == ("warning", "survivors", 5 * 4)
    assert finding.sentence.startswith("Differences of latencies are over the 40 requests that both arms finished: 20 ")


def test_the_adaptive_stop_looks_at_the_same_effect(breaking):
    run = breaking(breaks=True)
    delta = summarize(run)["deltas"]["e2el_ms"]["p50"]
    assert 100 * primary_effect(Measured(run), run.manifest["seed"]).center == pytest.approx(delta["block_delta_pct"])


def test_without_a_failure_all_requests_are_compared(breaking):
    measured = Measured(breaking(breaks=False))
    assert not measured.pairs_survivors
    assert measured.finished_by_all.all()
    assert list(survivor_findings(measured)) == []


def test_a_request_that_failed_in_one_arm_is_left_out_of_both_in_its_block_alone(synthetic, timeline):
    run = read_run(
        synthetic(blocks=2, requests=2).write(
            lambda arm, block, request: timeline(0.2, 10, [1] * 15, ok=(arm, block, request) != ("baseline", 1, 0))
        )
    )
    measured = Measured(run)
    left = measured.requests[~measured.finished_by_all]
    assert sorted(zip(left.arm, left.block, left.request_id, strict=True)) == [
        ("baseline", 1, "chat-00"),
        ("candidate", 1, "chat-00"),
    ]
    json.dumps(summarize(run), allow_nan=False)
