"""Each finding of the machine: a run that has it, and one that is just within its limit."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest

from skote.eval.derive import Measured
from skote.eval.device_state import windows
from skote.eval.machine_findings import machine_findings
from skote.eval.record import TELEMETRY_SCHEMA, read_run

S = 10**9


@pytest.fixture
def run(synthetic):
    return read_run(synthetic().write())


def frame(stamps, device="cuda:0", **columns):
    nobody_else = {} if device == "host" else {"foreign_processes": [0] * len(stamps)}
    known = {"t_ns": stamps, "device": [device] * len(stamps), **nobody_else, **columns}
    content = {name: known.get(name, [None] * len(stamps)) for name in TELEMETRY_SCHEMA.names}
    return pa.Table.from_pydict(content, schema=TELEMETRY_SCHEMA).to_pandas()


def samples_in(run, arm, count):
    """`count` stamps, evenly spread over the passes of `arm`."""
    spans = windows(Measured(run), arm)
    each = count // len(spans)
    return np.concatenate([np.linspace(start, end, each).astype(np.int64) for start, end in spans])


def found(run, telemetry=None, manifest=None):
    sampled = run if telemetry is None else replace(run, telemetry=telemetry)
    return list(machine_findings(Measured(sampled), run.manifest | (manifest or {})))


def codes(run, telemetry):
    return [(finding.severity, finding.code) for finding in found(run, telemetry)]


def test_a_plain_run_has_none(run):
    assert found(run) == []


@pytest.mark.parametrize(("late_ms", "limited"), [(10.0, False), (20.0, True)])
def test_client_limited(synthetic, late_ms, limited):
    """The candidate takes some 725 ms: 20 ms are more than 2 % of it, 10 are not."""
    run = read_run(synthetic(arms={"candidate": "skotergy"}).write())
    run.requests["scheduled_ns"] -= int(late_ms * 1e6)
    findings = found(run)

    assert [(each.severity, each.code) for each in findings] == [("warning", "client_limited")] * limited
    if limited:
        assert "left the client late: by 20 ms (p95)" in findings[0].sentence


@pytest.mark.parametrize(("reason", "share", "throttled"), [(4, 2, True), (4, 1, False), (2, 100, False)])
def test_throttled_clocks(run, reason, share, throttled):
    """Of 1200 samples, `share` percent; a clock that was set (2) is no throttling."""
    stamps = samples_in(run, "candidate", 600)
    telemetry = frame(stamps, throttle_reasons=[reason] * (6 * share) + [0] * (600 - 6 * share))
    findings = found(run, telemetry)

    assert [each.code for each in findings] == ["throttled_clocks"] * throttled
    if throttled:
        assert findings[0].sentence == (
            "The clocks of cuda:0 were held down in 2% of the measured samples (power cap)."
        )


@pytest.mark.parametrize(("most", "expected"), [(0, []), (1, [("warning", "foreign_gpu_process")])])
def test_a_foreign_process_on_the_gpu(run, most, expected):
    telemetry = frame(samples_in(run, "candidate", 12), foreign_processes=[None] * 6 + [0] * 5 + [most])

    assert codes(run, telemetry) == expected


def test_a_foreign_process_between_passes_does_not_matter(run):
    _, end = windows(Measured(run))[0]

    assert codes(run, frame([end + S // 100], foreign_processes=[3])) == []


@pytest.mark.parametrize(
    ("last_clock", "last_temperature", "drifted"),
    [(1900, 60, True), (1930, 60, False), (1900, 52, False), (1900, None, True)],
)
def test_thermal_drift(run, last_clock, last_temperature, drifted):
    """From 1980 MHz by 4 % and by 2.5 %; a GPU that did not warm has another reason, one without a sensor may not."""
    stamps = samples_in(run, "candidate", 60)
    temperatures = [None] * 60 if last_temperature is None else [50] * 30 + [last_temperature] * 30
    telemetry = frame(stamps, sm_clock_mhz=[1980] * 30 + [last_clock] * 30, temperature_c=temperatures)
    findings = found(run, telemetry)

    assert [(each.severity, each.code) for each in findings] == [("warning", "thermal_drift")] * drifted
    if drifted and last_temperature:
        assert findings[0].sentence == (
            "The clock of cuda:0 fell by 4.0% while the candidate arm was measured, and it warmed by 10 degrees."
        )


def test_drift_of_a_processor_s_clock(run):
    telemetry = frame(samples_in(run, "baseline", 24), "host", cpu_clock_mhz=[3500.0] * 12 + [3000.0] * 12)

    assert codes(run, telemetry) == [("warning", "thermal_drift")]
    assert codes(run, telemetry.iloc[::3]) == []  # 8 samples tell nothing


@pytest.mark.parametrize(("jump_ms", "jumped"), [(9, False), (-40, True)])
def test_clock_jump(run, jump_ms, jumped):
    offset = 1_700_000_000 * S
    offsets = [offset, offset + 10**6, offset + 10**6 + jump_ms * 10**6]
    findings = found(run, frame([0, 2 * S, 4 * S], "host", wall_offset_ns=offsets))

    assert [each.code for each in findings] == ["clock_jump"] * jumped
    if jumped:
        assert (findings[0].observed, findings[0].limit) == (40, 10)


@pytest.mark.parametrize(("power", "expected"), [(109.0, []), (112.0, [("warning", "energy_mismatch")])])
def test_power_and_energy_that_disagree(run, power, expected):
    stamps = [second * S for second in range(21)]
    telemetry = frame(stamps, energy_j=[100.0 * second for second in range(21)], power_w=[power] * 21)

    assert codes(run, telemetry) == expected


def test_what_telemetry_says_of_itself(run):
    facts = {"unavailable": None, "error": None, "cpu_share": 0.0019}
    assert found(run, manifest={"telemetry": facts}) == []

    facts = {"unavailable": "NVML is missing.", "error": "It ended early.", "cpu_share": 0.0031}
    findings = found(run, manifest={"telemetry": facts})
    assert [(each.severity, each.code) for each in findings] == [
        ("warning", "telemetry_incomplete"),
        ("info", "telemetry_unavailable"),
        ("info", "telemetry_cost"),
    ]
    assert findings[2].sentence == "Telemetry took 0.31% of one core, more than 0.2%."


@pytest.mark.parametrize(
    ("baseline", "candidate", "biased"),
    [(0.30, 0.01, True), (0.01, 0.30, True), (0.30, 0.30, False), (0.069, 0.01, False), (0.30, None, False)],
)
def test_noise_on_one_side(run, baseline, candidate, biased):
    """What both arms have alike is machine noise, and where one side is not known nothing can be told."""
    shares = {"baseline": baseline, "candidate": candidate}
    passes = [entry | {"foreign_cpu_share": shares[entry["arm"]]} for entry in run.manifest["passes"]]
    findings = [each for each in found(run, manifest={"passes": passes}) if each.code == "one_sided_noise"]

    assert [each.severity for each in findings] == ["invalid"] * biased
    if biased:
        hit, spared = ("baseline", "candidate") if baseline > candidate else ("candidate", "baseline")
        assert (findings[0].observed, findings[0].limit) == (0.29, 0.06)
        assert findings[0].sentence == (
            f"Other processes took 30% of the CPU in the passes of the {hit} arm and 1% in those of the {spared} arm, "
            "in the median: the comparison is biased."
        )


def test_noise_is_judged_over_the_passes_and_not_by_some(run):
    """Some of the candidate's six measured passes at 90 %, the others at 1, as all of the baseline's."""
    passes = [dict(entry) for entry in run.manifest["passes"]]
    mine = [entry for entry in passes if entry["arm"] == "candidate" and entry["phase"] == "measure"]
    assert len(mine) == 6
    for entry in mine[:2]:
        entry["foreign_cpu_share"] = 0.9

    assert [each.code for each in found(run, manifest={"passes": passes})] == ["foreign_cpu"]
    mine[2]["foreign_cpu_share"] = 0.9
    assert [each.code for each in found(run, manifest={"passes": passes})] == ["foreign_cpu", "one_sided_noise"]


def handed_back(run, arm, late_ms):
    """`run`, in which answers of `arm` came back `late_ms` after the last token."""
    rows = run.requests["arm"] == arm
    run.requests.loc[rows, "end_ns"] = run.requests.loc[rows, "last_token_ns"].astype("int64") + int(late_ms * 1e6)
    return run


@pytest.mark.parametrize(("late_ms", "late"), [(14.0, False), (16.0, True)])
def test_answers_that_come_back_late(run, late_ms, late):
    """The candidate takes some 725 ms, of which 2 % are 14.5; the harness has 0.31 of its own."""
    findings = found(handed_back(run, "candidate", late_ms))

    assert [(each.severity, each.code) for each in findings] == [("invalid", "late_hand_back")] * late
    if late:
        assert findings[0].observed == 16.0
        assert findings[0].limit == pytest.approx(0.31 + 0.02 * 725, abs=0.3)
        assert "Answers of the candidate arm came back 16 ms after their last token" in findings[0].sentence


@pytest.mark.parametrize(("late_ms", "late"), [(1.29, False), (1.33, True)])
def test_short_answers_may_take_a_millisecond_and_what_the_harness_takes(synthetic, timeline, late_ms, late):
    """Of 8 ms, 2 % would be less than it takes to hand an answer over."""
    run = read_run(synthetic().write(lambda arm, block, request: timeline(0.2, 0.5, [0.5] * 15)))

    assert [each.code for each in found(handed_back(run, "baseline", late_ms))] == ["late_hand_back"] * late


@pytest.mark.parametrize(
    ("answers", "quick", "late"),
    [(6, 0, True), (6, 1, False), (5, 0, True), (5, 1, False), (4, 0, False), (9, 1, True)],
)
def test_answers_that_waited_for_a_busy_core_are_not_late(synthetic, timeline, answers, quick, late):
    """All but `quick` take 4 ms. The median's interval begins at the first of six and the second of nine."""
    run = read_run(synthetic(blocks=1, requests=answers).write(lambda *_: timeline(0.2, 0.5, [0.5] * 15)))
    handed_back(run, "baseline", 4.0)
    rows = run.requests.index[(run.requests["arm"] == "baseline") & (run.requests["phase"] == "measure")]
    run.requests.loc[rows[:quick], "end_ns"] -= 3_700_000

    assert [each.code for each in found(run)] == ["late_hand_back"] * late


def test_without_the_harness_s_own_time_a_millisecond_is_the_limit(synthetic, timeline):
    run = read_run(synthetic().write(lambda arm, block, request: timeline(0.2, 0.5, [0.5] * 15)))

    [finding] = found(handed_back(run, "baseline", 1.1), manifest={"harness": None})
    assert (finding.code, finding.limit) == ("late_hand_back", 1.0)


def test_rows_of_a_batch_come_back_with_its_last(run):
    """The first of two rows has its last token 100 ms before the second: both end with the launch."""
    rows = run.requests[run.requests["arm"] == "candidate"]
    for first, second in rows.index.to_numpy().reshape(-1, 2):
        run.requests.loc[first, "admitted_ns"] = run.requests.loc[second, "admitted_ns"]
        last = int(run.requests.loc[second, "last_token_ns"])
        run.requests.loc[[first, second], "end_ns"] = last + 500_000
        run.requests.loc[first, "last_token_ns"] = last - 100_000_000

    assert found(run) == []


def told_after(run, told_ms):
    """The manifest's parts of a run whose candidate's first tokens were known so many ms after their stamps."""
    passes = [dict(each) for each in run.manifest["passes"]]
    mine = [each for each in passes if (each["arm"], each["phase"]) == ("candidate", "measure")]
    for each, ms in zip(mine, told_ms, strict=False):
        each["cache_probe"] = {"again_ms": [9.0], "other_ms": [9.0], "cached_tokens": None, "told_after_ms": ms}
    return {"passes": passes}


@pytest.mark.parametrize(
    ("told_ms", "early"),
    [([3.2] * 5, True), ([3.0] * 5, False), ([9.0] * 4 + [0.1], False), ([9.0] * 4, False)],
    ids=["every one beyond", "within", "one told at once", "too few"],
)
def test_stamps_of_first_tokens_that_are_too_early(run, told_ms, early):
    """The candidate's come after some 140 ms, of which 2 % are 2.8; the harness has 0.31 of its own."""
    findings = found(run, manifest=told_after(run, told_ms))

    assert [(each.severity, each.code) for each in findings] == [("invalid", "early_stamps")] * early
    if early:
        assert (findings[0].observed, findings[0].limit) == (3.2, pytest.approx(0.31 + 0.02 * 140, abs=0.1))


def test_nobody_can_see_the_processes_on_a_gpu(run):
    stamps = samples_in(run, "candidate", 12)
    [finding] = found(run, frame(stamps, foreign_processes=[None] * 12))

    assert (finding.severity, finding.code) == ("info", "foreign_unknown")
    assert "computed on cuda:0" in finding.sentence
    assert found(run, frame(stamps, foreign_processes=[None] * 11 + [0])) == []
    assert found(run, frame(stamps, "host")) == []
