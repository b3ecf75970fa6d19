from __future__ import annotations

import pytest

from skote.eval.derive import Measured
from skote.eval.record import read_run
from skote.eval.roofline import mean_context, roofline, step_kernels
from skote.eval.summary import summarize

ONE_ARM = {"candidate": "skotergy"}


def measured_of(directory):
    run = read_run(directory)
    return Measured(run), run.manifest


def test_context_of_each_step_counted_one_by_one(synthetic):
    """Requests of 40, 41 and 42 prompt tokens; the step for output token k reads prompt + k - 1 positions."""
    measured, _ = measured_of(synthetic(blocks=1, requests=3, tokens=5, arms=ONE_ARM).write())
    read = [prompt + token - 1 for prompt in (40, 41, 42) for token in range(2, 6)]

    assert mean_context(measured.requests) == pytest.approx(sum(read) / len(read))


def test_worked_example_of_the_metrics_document(synthetic):
    measured, manifest = measured_of(synthetic(blocks=1, requests=2, arms=ONE_ARM).write())
    measured.requests["input_tokens"] = [100, 302]
    measured.requests["output_tokens"] = [5, 3]
    measured.requests["tpot_ms"] = [12.0, 13.0]
    manifest["model"] |= {"bytes_per_token": 593_220_000, "kv_bytes_per_token": 40_000}
    manifest["roofline"] = {"device": "cpu", "read_bandwidth_bytes_per_s": 60e9}

    assert roofline(measured, "candidate", manifest) == {
        "weight_bytes": 593_220_000,
        "mean_context": 169.5,
        "kv_bytes": 6_780_000,
        "floor_ms": 10.0,
        "achieved_share": 0.8,
    }


def test_a_failed_request_and_a_lone_token_take_no_step(synthetic, timeline):
    directory = synthetic(blocks=1, requests=3, tokens=3, arms=ONE_ARM).write(
        lambda arm, block, request: [
            timeline(0.2, 10, [1.0, 1.0]),
            timeline(0.2, 10, [1.0, 1.0], ok=False),
            timeline(0.2, 10, [], output=(5,)),
        ][request]
    )
    measured, _ = measured_of(directory)

    assert mean_context(measured.requests) == 40 + 3 / 2
    assert mean_context(measured.requests.iloc[1:]) is None


@pytest.mark.parametrize("gone", ["roofline", "bandwidth", "kv"])
def test_what_was_not_measured_is_null(synthetic, gone):
    measured, manifest = measured_of(synthetic(blocks=1).write())
    if gone == "roofline":
        del manifest["roofline"]
    elif gone == "bandwidth":
        manifest["roofline"]["read_bandwidth_bytes_per_s"] = None
    else:
        del manifest["model"]["kv_bytes_per_token"]
    found = roofline(measured, "candidate", manifest)

    assert found["weight_bytes"] == 538_060_032
    assert found["floor_ms"] is None
    assert found["achieved_share"] is None
    assert (found["kv_bytes"] is None) == (gone == "kv")


def test_shares_of_the_kernels_of_a_step(synthetic):
    _, manifest = measured_of(synthetic(blocks=1).write())

    assert step_kernels(manifest, "candidate") == [
        {"kernel": "gate_up_gemv_kernel", "calls": 30, "us": 150.0, "share": 0.75},
        {"kernel": "flash_decode_kernel", "calls": 30, "us": 50.0, "share": 0.25},
    ]
    assert step_kernels(manifest, "baseline") == []
    assert step_kernels({"arms": {"candidate": {"replicas": []}}}, "candidate") == []


def test_metrics_hold_the_roofline_of_each_arm(synthetic, timeline):
    """538.06 MB of weights and 53.5 positions of 46,080 bytes at 20 GB/s: 27.03 ms, of a TPOT of 54.05 ms the half."""
    run = read_run(synthetic(blocks=1).write(lambda arm, block, request: timeline(0.2, 100, [54.05] * 15)))
    metrics = summarize(run)

    assert metrics["roofline"] == {"device": "cpu", "read_bandwidth_bytes_per_s": 2e10}
    for arm in ("candidate", "baseline"):
        assert metrics["arms"][arm]["roofline"]["floor_ms"] == pytest.approx((538_060_032 + 53.5 * 46_080) / 2e7)
        assert metrics["arms"][arm]["roofline"]["achieved_share"] == pytest.approx(0.5, abs=1e-3)
    assert len(metrics["arms"]["candidate"]["step_kernels"]) == 2
