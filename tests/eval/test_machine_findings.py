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
    known = {"t_ns": stamps, "device": [device] * len(stamps), **columns}
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
