from __future__ import annotations

import copy
import json
from dataclasses import replace

import pytest

from skote.eval.derive import Measured
from skote.eval.findings import find
from skote.eval.record import read_run
from skote.types import RecordError


@pytest.fixture
def run(synthetic):
    return read_run(synthetic().write())


def codes(run, manifest=None):
    return [(finding.severity, finding.code) for finding in find(Measured(run), manifest or run.manifest)]


def changed(run, **changes):
    return copy.deepcopy(run.manifest) | changes


def test_a_plain_run_has_none(run):
    assert codes(run) == []


def test_parity_failed(run):
    parity = run.manifest["parity"] | {"passed": False, "sentence": "Prompt chat-03 differs at token 5."}
    [finding] = find(Measured(run), changed(run, parity=parity))

    assert (finding.severity, finding.code) == ("invalid", "parity_failed")
    assert finding.sentence == "Parity failed: Prompt chat-03 differs at token 5."


def test_parity_that_nothing_could_judge_is_invalid_and_hashes_of_unknown_ids_are_not_compared(run):
    run.requests.loc[run.requests["arm"] == "baseline", "output_sha256"] = "00" * 32
    outputs = {"candidate": {}, "baseline": {}}
    for mode, passed, expected in (("not_judged", None, [("invalid", "parity_not_judged")]), ("text_equal", True, [])):
        parity = {"mode": mode, "passed": passed, "sentence": "So it is.", "outputs": outputs, "divergences": []}
        found = codes(run, changed(run, parity=parity))
        assert [each for each in found if each != ("warning", "output_unchecked")] == expected


def test_parity_missing_matters_where_two_arms_ran(run, synthetic):
    assert codes(run, changed(run, parity=None)) == [("invalid", "parity_missing")]

    alone = read_run(synthetic(arms={"candidate": "baseline"}).write())
    assert codes(alone) == []


def test_arms_on_different_weights(run):
    manifest = changed(run)
    manifest["arms"]["baseline"]["replicas"][0]["info"]["weights_fingerprint"] = "0123456789abcdef"
    [finding] = find(Measured(run), manifest)

    assert (finding.severity, finding.code, finding.observed, finding.limit) == ("invalid", "weights_differ", 2, 1)
    assert "baseline: 0123456789ab" in finding.sentence


def test_tokens_faster_than_the_device_can_read(run):
    """At 10 GB/s the floor of 54 ms is beyond the candidate's 39 ms a token, and within the baseline's 104."""
    roofline = {"device": "cpu", "read_bandwidth_bytes_per_s": 1e10}
    [finding] = find(Measured(run), changed(run, roofline=roofline))

    assert (finding.severity, finding.code, finding.limit) == ("warning", "beyond_roofline", 1.1)
    assert finding.observed == pytest.approx(54.0 / 39.0, rel=0.01)
    assert "The candidate arm's tokens come 1.38 times as fast" in finding.sentence


def test_weights_without_a_fingerprint(run):
    manifest = changed(run)
    del manifest["arms"]["baseline"]["replicas"][0]["info"]["weights_fingerprint"]

    assert codes(run, manifest) == [("warning", "weights_unverified")]


def test_engines_without_a_model_have_no_weights_to_verify(run):
    """The candidate says so alone, then both."""
    manifest = changed(run)
    infos = [arm["replicas"][0]["info"] for arm in manifest["arms"].values()]
    for info in infos:
        del info["weights_fingerprint"]
    infos[0]["parameters"] = 0
    assert codes(run, manifest) == [("warning", "weights_unverified")]
    infos[1]["parameters"] = 0
    assert codes(run, manifest) == []


def test_token_counts_and_early_end(synthetic, timeline):
    """One request of the candidate stops after 3 of 16 tokens."""

    def short(arm, block, request):
        if (arm, block, request) == ("candidate", 2, 5):
            return timeline(0.2, 100, [40.0] * 2, output=(5, 6, 7))
        return timeline(0.2, 100, [40.0] * 15)

    found = {finding.code: finding for finding in find(*_of(synthetic().write(short)))}

    assert set(found) == {
        "token_count_mismatch",
        "early_end",
        "output_differs_from_parity",
        "greedy_outputs_differ",
    }
    assert {finding.severity for finding in found.values()} == {"invalid"}
    assert {finding.observed for finding in found.values()} == {1}
    assert found["early_end"].sentence == (
        "1 request ended before the tokens that were asked for, first chat-05 (candidate, block 2): 3 of 16."
    )


def test_ending_at_the_end_of_sequence_token_is_no_early_end(synthetic, timeline):
    directory = synthetic().write(lambda arm, block, request: timeline(0.2, 100, [40.0] * 2, output=(1, 2, 3)))
    run = read_run(directory)
    manifest = changed(run)
    manifest["workload"] |= {"respect_eos": True, "greedy": False}

    assert "early_end" in [code for _, code in codes(run, manifest)]
    run.requests["finish_reason"] = "stop"
    assert codes(run, manifest) == [("warning", "sampled_outputs")]
    manifest["workload"]["respect_eos"] = False
    assert ("invalid", "early_end") in codes(run, manifest)
    manifest["may_stop"] = sorted(set(run.requests["request_id"]))  # those with stops of their own may end early, too
    assert codes(run, manifest) == [("warning", "sampled_outputs")]


def test_sampled_outputs_that_are_no_draws(run):
    manifest = changed(run)
    manifest["workload"]["greedy"] = False
    judged = {"passed": False, "z": 17.25, "limit": 5.0, "sentence": "They are no draws."}
    manifest["parity"]["sampled"] = {"candidate": judged, "baseline": judged | {"passed": True}}
    (finding,) = find(Measured(run), manifest)

    assert (finding.severity, finding.code, finding.observed, finding.limit) == ("invalid", "sampled_outputs", 17.25, 5)
    assert finding.sentence == "They are no draws."

    manifest["parity"]["sampled"] = {"candidate": judged | {"passed": True}}
    assert codes(run, manifest) == []
    manifest["parity"]["sampled"] = {"candidate": judged | {"z": None}}
    assert find(Measured(run), manifest)[0].observed is None


def test_a_timed_output_that_parity_did_not_see(run):
    manifest = changed(run)
    manifest["parity"]["outputs"]["candidate"]["chat-00"] = "00" * 32
    del manifest["parity"]["outputs"]["baseline"]["chat-01"]
    found = find(Measured(run), manifest)

    assert [(finding.severity, finding.code, finding.observed) for finding in found] == [
        ("invalid", "output_differs_from_parity", 6),
        ("warning", "output_unchecked", 6),
    ]


def test_a_named_near_tie_is_a_warning(synthetic, timeline):
    def other(arm, block, request):
        output = tuple(range(100, 116)) if (arm, request) == ("candidate", 1) else None
        return timeline(0.2, 100, [40.0] * 15, output=output)

    run = read_run(synthetic().write(other))
    manifest = changed(run)
    manifest["parity"]["outputs"]["candidate"]["chat-01"] = run.requests.query(
        "arm == 'candidate' and request_id == 'chat-01'"
    )["output_sha256"].iloc[0]
    assert codes(run, manifest) == [("invalid", "greedy_outputs_differ")]

    manifest["parity"]["divergences"] = [{"request_id": "chat-01", "near_tie": True}]
    assert codes(run, manifest) == [("warning", "near_tie")]


def test_greedy_outputs_may_differ_in_bf16(synthetic, timeline):
    """Each arm repeats its own parity output; the arms differ by rounding, which fp32 must not."""

    def other(arm, block, request):
        return timeline(0.2, 100, [40.0] * 15, output=tuple(range(100, 116)) if arm == "candidate" else None)

    run = read_run(synthetic().write(other))
    manifest = changed(run)
    manifest["parity"]["outputs"]["candidate"] = dict.fromkeys(
        manifest["requested_tokens"], run.requests.query("arm == 'candidate'")["output_sha256"].iloc[0]
    )

    assert codes(run, manifest) == [("invalid", "greedy_outputs_differ")]
    assert codes(run, manifest | {"dtype": "bf16"}) == []


def test_stamps_that_do_not_follow_each_other(run):
    row = run.requests.index[run.requests["phase"] == "measure"][7]
    run.requests.loc[row, "first_token_ns"] = run.requests.loc[row, "admitted_ns"] - 1
    found = find(Measured(run), run.manifest)

    assert [(finding.severity, finding.code, finding.observed) for finding in found] == [
        ("invalid", "stamps_out_of_order", 1)
    ]


def test_flags_that_differ_between_the_arms(run):
    manifest = changed(run)
    for arm, threads in (("candidate", 2), ("baseline", 1)):
        for replica in manifest["arms"][arm]["replicas"]:
            replica["info"]["flags"] = {"threads": threads}

    assert codes(run, manifest) == [("invalid", "flags_differ")]


def test_an_arm_that_computes_while_the_other_is_timed(run):
    manifest = changed(run)
    timed = [entry for entry in manifest["passes"] if entry["phase"] == "measure"]
    timed[0]["idle_arm_share"] = 0.061

    assert codes(run, manifest) == [("invalid", "idle_arm_busy")]


def test_a_harness_that_costs_too_much(run):
    manifest = changed(run)
    manifest["harness"] = {"us_per_token": 51.0, "ms_per_request": 1.5, "requests": 1, "tokens": 1}

    assert codes(run, manifest) == [("warning", "harness_overhead"), ("warning", "harness_overhead")]


def test_a_run_that_was_killed_before_its_arms_were_asked_is_readable(run):
    manifest = changed(run) | {"status": "interrupted"}
    for content in manifest["arms"].values():
        content["replicas"] = []

    assert codes(run, manifest) == [("warning", "interrupted")]


def test_failed_requests(synthetic, timeline):
    def failing(arm, block, request):
        return timeline(0.2, 100, [40.0] * 15, ok=(arm, request) != ("candidate", 3))

    found = find(*_of(synthetic().write(failing)))

    assert [(finding.code, finding.observed) for finding in found] == [
        ("requests_failed", 6),
        ("survivors", 6),
        ("too_few_samples", 66),
    ]
    assert found[0].sentence.startswith("6 of 72 requests failed in the candidate arm, first chat-03 (The replica on")


@pytest.mark.parametrize(
    ("blocks", "requests", "expected"),
    [
        (6, 12, []),
        (6, 11, ["too_few_samples"]),
        (4, 18, ["too_few_blocks"]),
        (4, 5, ["too_few_samples", "too_few_blocks"]),
    ],
)
def test_sample_sizes(synthetic, blocks, requests, expected):
    found = find(*_of(synthetic(blocks=blocks, requests=requests).write()))

    assert [finding.code for finding in found] == expected


@pytest.mark.parametrize(("key", "code"), [("foreign_cpu_share", "foreign_cpu"), ("steal_share", "steal")])
def test_machine_noise(run, key, code):
    manifest = changed(run)
    for entry in manifest["passes"]:
        entry[key] = 0.06
    assert codes(run, manifest) == []

    manifest["passes"][5][key] = 0.081
    manifest["passes"][0][key] = 0.9  # a warm-up pass does not matter
    [finding] = find(Measured(run), manifest)
    assert (finding.severity, finding.code, finding.observed, finding.limit) == ("warning", code, 0.081, 0.06)
    assert "in 1 of 12 passes, at most 8%" in finding.sentence


def test_interrupted_and_failed_runs(run):
    assert codes(run, changed(run, status="interrupted")) == [("warning", "interrupted")]
    [finding] = find(Measured(run), changed(run, status="failed", error="The disk is full."))
    assert finding.sentence == "The run did not come to its end: The disk is full."


def test_a_complete_run_that_left_an_arm_out(synthetic):
    run = read_run(synthetic().write())
    run = type(run)(run.directory, run.requests.query("arm == 'baseline'"), run.tokens, run.manifest)

    assert codes(run)[0] == ("invalid", "arm_not_measured")


def test_a_slow_path_is_named_once(run):
    manifest = changed(run)
    info = manifest["arms"]["candidate"]["replicas"][0]["info"]
    info["notes"] = ["There is no C++ compiler, so plain ops ran."] * 2

    [finding] = find(Measured(run), manifest)

    assert (finding.severity, finding.code, finding.observed) == ("warning", "slow_path", "candidate")
    assert "There is no C++ compiler" in finding.sentence


def test_what_an_engine_leaves_open_is_named_once(run):
    manifest = changed(run)
    manifest["arms"]["baseline"]["replicas"][0]["info"]["caveats"] = ["Tokens were counted by chunk."] * 2

    [finding] = find(Measured(run), manifest)

    assert (finding.severity, finding.code, finding.observed) == ("warning", "caveat", "baseline")
    assert finding.sentence == "Of the baseline arm: Tokens were counted by chunk."


def test_invalid_findings_come_first(run):
    manifest = changed(run, status="interrupted", parity=None)

    assert codes(run, manifest) == [("invalid", "parity_missing"), ("warning", "interrupted")]


def _of(directory):
    run = read_run(directory)
    return Measured(run), run.manifest


def test_rows_that_went_missing(run):
    row = run.requests.index[run.requests["phase"] == "measure"][3]
    found = find(Measured(replace(run, requests=run.requests.drop(index=row))), run.manifest)

    assert ("invalid", "rows_missing", 71, 72) in [
        (finding.severity, finding.code, finding.observed, finding.limit) for finding in found
    ]


def test_files_of_two_runs_are_not_mixed(run):
    changed_id = changed(run) | {"run_id": "another"}
    (run.directory / "manifest.json").write_text(json.dumps(changed_id), encoding="utf-8")

    with pytest.raises(RecordError, match="requests of another run than its manifest's"):
        read_run(run.directory)


def test_rows_of_another_workload(run):
    run.requests.loc[run.requests["arm"] == "baseline", "workload_sha256"] = "0123456789abcdef"
    [finding] = find(Measured(run), run.manifest)

    assert (finding.severity, finding.code, finding.observed, finding.limit) == ("invalid", "workloads_differ", 2, 1)
    assert "0123456789ab, 5b5b5b5b5b5b" in finding.sentence


def test_prompts_of_different_lengths(run):
    rows = (run.requests["arm"] == "baseline") & (run.requests["request_id"] == "chat-03")
    run.requests.loc[rows, "input_tokens"] = 7
    [finding] = find(Measured(run), run.manifest)

    assert (finding.severity, finding.code, finding.observed) == ("invalid", "prompts_differ", 6)
    assert finding.sentence.endswith("first chat-03 in block 0: 43 and 7 tokens.")


def test_prompts_from_a_warm_cache(run):
    run.requests["cached_tokens"] = 0
    assert codes(run) == []

    run.requests.loc[run.requests["arm"] == "candidate", "cached_tokens"] = run.requests["input_tokens"] // 2
    [finding] = find(Measured(run), run.manifest)
    assert (finding.severity, finding.code, finding.limit) == ("warning", "warm_cache", 0)
    assert finding.observed == pytest.approx(0.5, abs=0.01)
