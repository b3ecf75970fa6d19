from __future__ import annotations

import pytest

from skote.eval.derive import Measured
from skote.eval.record import read_run
from skote.eval.roofline import (
    mean_context,
    multi_token_share,
    prefill_floors,
    request_floors,
    roofline,
    speculates,
    step_kernels,
    tokens_per_chunk,
)
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
        "step_share": None,
        "prefill_floor_ms": None,
        "prefill_share": None,
        "request_floor_ms": None,
        "request_share": None,
    }


def test_what_caches_hold_need_not_be_read_again(synthetic):
    """60 MB of the 600 MB lie in caches: 9 ms of reading at least, and a step gives one token in 12.5 ms."""
    measured, manifest = measured_of(synthetic(blocks=1, requests=2, arms=ONE_ARM).write())
    measured.requests["input_tokens"] = [100, 302]
    measured.requests["output_tokens"] = [5, 3]
    measured.requests["tpot_ms"] = [12.0, 13.0]
    manifest["model"] |= {"bytes_per_token": 593_220_000, "kv_bytes_per_token": 40_000}
    manifest["roofline"] = {"device": "cpu", "read_bandwidth_bytes_per_s": 60e9, "cache_bytes": 60_000_000}
    assert roofline(measured, "candidate", manifest)["step_share"] == pytest.approx(9 / 12.5)

    manifest["roofline"]["cache_bytes"] = 10**10
    assert roofline(measured, "candidate", manifest)["step_share"] == 0


def test_a_chunk_of_several_tokens_reads_the_weights_once(synthetic, timeline):
    """Five chunks of 4 tokens, 20 ms apart: 5 ms a token, but 20 ms a step of an engine that says it speculates."""
    directory = synthetic(blocks=1, requests=2, tokens=20, arms=ONE_ARM).write(
        lambda arm, block, request: timeline(0.2, 100, [20.0] * 4, tokens_per_chunk=4)
    )
    measured, manifest = measured_of(directory)
    manifest["model"] |= {"bytes_per_token": 200_000_000, "kv_bytes_per_token": 0}
    manifest["roofline"] = {"device": "cpu", "read_bandwidth_bytes_per_s": 20e9, "cache_bytes": 0}

    assert tokens_per_chunk(measured, "candidate") == 4
    found = roofline(measured, "candidate", manifest)
    assert found["achieved_share"] == pytest.approx(10 / 5)
    assert found["step_share"] == pytest.approx(10 / 5)
    assert found["request_share"] == pytest.approx((10 + 19 * 10) / 180)

    manifest["arms"]["candidate"]["replicas"][0]["info"]["speculative"] = True
    assert speculates(manifest, "candidate")
    found = roofline(measured, "candidate", manifest)
    assert found["step_share"] == pytest.approx(10 / 20)
    assert (found["request_floor_ms"], found["request_share"]) == (None, None)


def test_chunks_of_several_tokens_are_counted_after_the_first(synthetic, timeline):
    """A whole answer at once has no chunk after its first; of the others' four, all hold four tokens or one."""
    directory = synthetic(blocks=1, requests=3, tokens=16, arms=ONE_ARM).write(
        lambda arm, block, request: [
            timeline(0.2, 100, [], tokens_per_chunk=16),
            timeline(0.2, 100, [1.0], tokens_per_chunk=8),
            timeline(0.2, 100, [1.0] * 3, tokens_per_chunk=1, output=(1, 2, 3, 4)),
        ][request]
    )
    measured, _ = measured_of(directory)

    assert multi_token_share(measured, "candidate") == 1 / 4
    measured.gaps = measured.gaps.iloc[:0]
    assert multi_token_share(measured, "candidate") == 0


def test_request_floor_of_each_request(synthetic):
    """Weights of 3 MB and 1 kB a position at 1 GB/s, 1 MB of cache; 100 operations a token at 1 MFLOP/s."""
    measured, manifest = measured_of(synthetic(blocks=1, requests=3, arms=ONE_ARM).write())
    rows = measured.requests.assign(input_tokens=[10, 100, 10], output_tokens=[1, 5, 0], cached_tokens=None)
    manifest["model"] |= {"prefill_flops": None, "bytes_per_token": 3_000_000, "kv_bytes_per_token": 1000}
    manifest["roofline"] = {"device": "cpu", "read_bandwidth_bytes_per_s": 1e9, "cache_bytes": 1_000_000}
    step = 2 + 0.102_5  # ms; the steps of the second read 101, 102, 103 and 104 positions

    assert request_floors(rows, manifest).tolist() == pytest.approx([2, 2 + 4 * step, 2])
    manifest["model"]["prefill_flops"] = {"fixed": 0, "per_token": 100, "per_pair": 0}
    manifest["roofline"]["matmul_peak_flops_per_s"] = 1e6
    assert request_floors(rows, manifest).tolist() == pytest.approx([2, 10 + 4 * step, 2])

    manifest["roofline"]["cache_bytes"] = 10**10
    assert request_floors(rows, manifest).tolist() == pytest.approx([1, 10, 1])
    manifest["roofline"]["cache_bytes"] = None
    assert request_floors(rows, manifest) is None


def test_prefill_floor_of_each_request(synthetic):
    """1000 + 100 P + 10 P (P + 1) / 2 operations at 1 MFLOP/s; 10 of the second prompt's 20 tokens were cached."""
    measured, manifest = measured_of(synthetic(blocks=1, requests=3, arms=ONE_ARM).write())
    rows = measured.requests.assign(input_tokens=[10, 20, 1], cached_tokens=[None, 10, 0], ttft_ms=[10.0, 5.0, 20.0])
    measured.requests = rows
    manifest["model"] |= {
        "prefill_flops": {"fixed": 1000, "per_token": 100, "per_pair": 10},
        "bytes_per_token": 3_000_000,
    }
    manifest["roofline"] = {
        "device": "cpu",
        "matmul_peak_flops_per_s": 1e6,
        "read_bandwidth_bytes_per_s": 1e9,
        "cache_bytes": 1_000_000,
    }
    first = 1000 + 100 * 10 + 10 * sum(range(1, 11))
    second = 1000 + 100 * 10 + 10 * sum(range(11, 21))

    assert prefill_floors(rows, manifest).tolist() == pytest.approx([first / 1e3, second / 1e3, 2.0])  # the last reads
    found = roofline(measured, "candidate", manifest)
    assert found["prefill_floor_ms"] == pytest.approx(2.55)
    assert found["prefill_share"] == pytest.approx(0.255)  # of 0.255, 0.71 and 0.1

    manifest["roofline"]["matmul_peak_flops_per_s"] = None
    assert prefill_floors(rows, manifest) is None


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
    for kernel in manifest["arms"]["candidate"]["replicas"][0]["info"]["step_kernels"]:
        kernel["own_us"] = {150.0: 40.0, 50.0: 10.0}[kernel["us"]]
    assert [(kernel["us"], kernel["share"]) for kernel in step_kernels(manifest, "candidate")] == [
        (150, 0.8),
        (50, 0.2),
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
