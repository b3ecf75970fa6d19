"""Arms that are faster than their device can be. The synthetic candidate takes 39 ms a token, 140 ms to the first."""

from __future__ import annotations

import pytest

from skote.eval.derive import Measured
from skote.eval.physics import physics_findings
from skote.eval.record import read_run

CEILINGS = {
    "device": "cuda:0",
    "read_bandwidth_bytes_per_s": 20e9,  # a floor of 27 ms a token
    "cache_bytes": 50_000_000,
    "matmul_peak_flops_per_s": 1e12,
}


def found(directory, speculative=False, **changes):
    run = read_run(directory)
    run.manifest["arms"]["candidate"]["replicas"][0]["info"]["speculative"] = speculative
    manifest = run.manifest | {"roofline": CEILINGS | changes}
    manifest["model"] |= {"prefill_flops": {"fixed": 0, "per_token": 2 * 10**9, "per_pair": 0}}  # 80 to 102 ms
    return [(each.severity, each.code) for each in physics_findings(Measured(run), manifest)]


@pytest.fixture
def directory(synthetic):
    return synthetic(arms={"candidate": "skotergy"}).write()


def test_a_possible_run_has_none(directory):
    assert found(directory) == []


@pytest.mark.parametrize(
    ("bandwidth", "device", "expected"),
    [
        (12e9, "cuda:0", [("warning", "beyond_roofline")]),  # 45 ms of reading, 41 beyond the cache, in 39 ms
        (10e9, "cuda:0", [("invalid", "decode_faster_than_physics")]),  # 49 ms beyond the cache
        (10e9, "cpu", [("warning", "beyond_roofline")]),
        (5e9, "cpu", [("invalid", "decode_faster_than_physics")]),  # 98 ms
        (5e9, "mps", [("warning", "beyond_roofline")]),  # nothing is known of how well its ceilings repeat
    ],
)
def test_tokens_faster_than_memory(directory, bandwidth, device, expected):
    assert found(directory, read_bandwidth_bytes_per_s=bandwidth, device=device) == expected


def test_weights_that_fit_a_cache_may_be_read_faster_than_memory(directory):
    """A processor with 600 MB of cache holds all of the model: remarkable, and possible."""
    assert found(directory, read_bandwidth_bytes_per_s=5e9, device="cpu", cache_bytes=600_000_000) == [
        ("warning", "beyond_roofline")
    ]
    assert found(directory, read_bandwidth_bytes_per_s=5e9, device="cpu", cache_bytes=None) == [
        ("warning", "beyond_roofline")
    ]


@pytest.mark.parametrize(("peak", "invalid"), [(0.8e12, False), (0.4e12, True), (None, False)])
def test_a_first_token_faster_than_arithmetic(directory, peak, invalid):
    """At the median prompt of 45.5 tokens 114 ms, within a quarter of the 140 +- 15 % that it took, and 228 ms."""
    expected = [("invalid", "prefill_faster_than_physics")] if invalid else []

    assert found(directory, matmul_peak_flops_per_s=peak) == expected


def test_an_arm_that_skips_the_prefill(synthetic, timeline):
    directory = synthetic(arms={"candidate": "skotergy"}).write(
        lambda arm, block, request: timeline(0.2, 2.0, [39.0] * 15)
    )
    assert found(directory, device="cpu") == [("invalid", "prefill_faster_than_physics")]


@pytest.mark.parametrize(("ms", "invalid"), [(60, True), (450, False)])
def test_a_whole_answer_at_once_is_held_against_all_of_its_tokens(synthetic, timeline, ms, invalid):
    """Sixteen tokens in one chunk have no time a token; 91 ms of prefill and 15 steps of 24.5 ms are 459 in all.

    A replay that sleeps is caught; an engine that computes them all and streams nothing is not.
    """
    directory = synthetic(arms={"candidate": "skotergy"}).write(
        lambda arm, block, request: timeline(0.2, ms, [], tokens_per_chunk=16)
    )

    expected = [("invalid", "request_faster_than_physics")] if invalid else []
    assert found(directory, device="cpu", matmul_peak_flops_per_s=2e12) == expected


def some_quick(synthetic, timeline, count, ttft_ms):
    """A run whose candidate gives `count` of 72 requests their first token after `ttft_ms`, the others after 140 ms."""
    quick = {(index % 6, index // 6) for index in range(count)}
    return synthetic(arms={"candidate": "skotergy"}).write(
        lambda arm, block, request: timeline(0.2, ttft_ms if (block, request) in quick else 140, [39.0] * 15)
    )


@pytest.mark.parametrize(
    ("count", "ttft_ms", "invalid"),
    [(7, 60, False), (8, 60, True), (1, 45, False), (1, 30, True)],
    ids=["a tenth by a third", "more than a tenth", "one within twice the limit", "one beyond"],
)
def test_a_part_of_the_prefill_that_is_skipped_on_some_requests(synthetic, timeline, count, ttft_ms, invalid):
    """80 to 102 ms of arithmetic, in 60 ms, 45 ms, or 30: 1.3 to 1.7, 1.8 to 2.3, 2.7 to 3.4 times as fast."""
    expected = [("invalid", "prefill_faster_than_physics")] if invalid else []

    assert found(some_quick(synthetic, timeline, count, ttft_ms)) == expected


def test_the_finding_counts_the_requests_and_tells_the_fastest(synthetic, timeline):
    directory = some_quick(synthetic, timeline, 1, 20)
    run = read_run(directory)
    manifest = run.manifest | {"roofline": CEILINGS}
    manifest["model"] |= {"prefill_flops": {"fixed": 0, "per_token": 2 * 10**9, "per_pair": 0}}
    [finding] = physics_findings(Measured(run), manifest)

    assert finding.observed == 4  # a prompt of 40 tokens: 80 ms in 20
    assert finding.sentence.startswith("1 request of the candidate arm's 72 got the first token more than 1.25 times")


def test_answers_that_are_replayed_for_some_requests(synthetic, timeline):
    """Two of 72 come whole after 120 ms: longer than a prefill of 80 ms takes, and 15 steps of 24.5 ms are missing."""
    directory = synthetic(arms={"candidate": "skotergy"}).write(
        lambda arm, block, request: timeline(
            0.2, 120, [] if (block, request) in {(0, 0), (3, 0)} else [39.0] * 15, output=tuple(range(16))
        )
    )

    assert found(directory) == [("invalid", "request_faster_than_physics")]


def test_tokens_that_come_together_after_the_first_are_no_single_step(synthetic, timeline):
    """One token after the prefill, the other fifteen 30 ms later: 2 ms a token."""
    directory = synthetic(arms={"candidate": "skotergy"}).write(
        lambda arm, block, request: timeline(0.2, 140, [30.0], tokens_per_chunk=8)
    )

    assert found(directory) == [("warning", "multi_token_chunks"), ("invalid", "decode_faster_than_physics")]
    assert found(directory, speculative=True) == [
        ("info", "speculation_declared"),
        ("warning", "beyond_roofline"),
    ]


def test_a_speculation_that_outruns_a_step_a_chunk_is_impossible_too(synthetic, timeline):
    directory = synthetic(arms={"candidate": "skotergy"}).write(
        lambda arm, block, request: timeline(0.2, 140, [15.0], tokens_per_chunk=8)
    )

    assert found(directory, speculative=True) == [
        ("info", "speculation_declared"),
        ("invalid", "decode_faster_than_physics"),
    ]
