from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from skote.eval.derive import Measured
from skote.eval.device_state import (
    device_states,
    energy_mismatch,
    in_windows,
    joules,
    joules_per_token,
    throttled,
    windows,
)
from skote.eval.record import TELEMETRY_SCHEMA, read_run
from skote.eval.summary import summarize

S = 10**9


def frame(device="cuda:0", **columns):
    length = max(len(values) for values in columns.values())
    known = {"device": [device] * length, **columns}
    content = {name: known.get(name, [None] * length) for name in TELEMETRY_SCHEMA.names}
    return pa.Table.from_pydict(content, schema=TELEMETRY_SCHEMA).to_pandas()


def test_energy_between_samples_is_interpolated():
    """A counter that advances by 100 J/s up to 2 s, and by 300 J/s then."""
    samples = frame(t_ns=[0, 1 * S, 2 * S, 3 * S], energy_j=[50.0, 150.0, 250.0, 550.0])

    assert joules(samples, [(S // 2, S)]) == pytest.approx(50)
    assert joules(samples, [(S // 2, S), (3 * S // 2, 5 * S // 2)]) == pytest.approx(50 + 50 + 150)
    assert joules(samples, [(S // 2, 4 * S)]) is None  # the window reaches beyond the samples
    assert joules(samples, []) is None
    assert joules(samples.assign(energy_j=None), [(S // 2, S)]) is None


def test_energy_between_readings_goes_as_power():
    """The counter tells of 660 J in 4 s. Trapezoids of the samples make 100 + 200 + 300 + 500 = 1100: 0.6 of it."""
    samples = frame(
        t_ns=[0, 1 * S, 2 * S, 3 * S, 4 * S],
        energy_j=[1000.0, None, None, None, 1660.0],
        power_w=[100.0, 100.0, 300.0, 300.0, 700.0],
    )

    assert joules(samples, [(0, 4 * S)]) == pytest.approx(660)
    assert joules(samples, [(0, S)]) == pytest.approx(60)
    assert joules(samples, [(S, 2 * S), (3 * S, 4 * S)]) == pytest.approx(120 + 300)
    assert joules(samples.assign(power_w=None), [(S, 2 * S)]) == pytest.approx(165)


def test_power_integrated_against_the_counter():
    stamps = [second * S for second in range(21)]
    samples = frame(t_ns=stamps, energy_j=[100.0 * second for second in range(21)], power_w=[115.0] * 21)
    ends = samples["t_ns"].isin([3 * S, 18 * S])

    assert energy_mismatch(samples) == pytest.approx(0.15)
    assert energy_mismatch(samples.assign(energy_j=samples["energy_j"].where(ends))) == pytest.approx(0.15)
    assert energy_mismatch(samples.assign(power_w=None)) is None
    assert energy_mismatch(samples.iloc[:10]) is None  # 9 s are too few for a power that is a mean over one
    assert energy_mismatch(samples.assign(energy_j=5.0)) is None  # a counter that stands still


def test_throttle_reasons_are_bits():
    """Idle (1), a clock that was set (2) and a display (0x100) hold nothing down; a power cap (4) does."""
    assert throttled(pd.Series([0, 1, 2, 0x100, 4, 0x41, None])).tolist() == [False] * 4 + [True] * 2


def telemetry_of(measured):
    """A GPU that takes 100 W while the candidate runs and 400 W while the baseline does, sampled 10 times a second."""
    spans = {arm: windows(measured, arm) for arm in measured.arms}
    first, last = (
        min(span[0][0] for span in spans.values()) - S,
        max(span[-1][1] for span in spans.values()) + S,
    )
    stamps = np.arange(first, last, S // 10)
    power = np.zeros(len(stamps))
    for arm, watts in (("candidate", 100.0), ("baseline", 400.0)):
        for start, end in spans[arm]:
            power[(stamps >= start) & (stamps <= end)] = watts
    energy = 1e6 + np.concatenate([[0.0], np.cumsum((power[1:] + power[:-1]) / 2 / 10)])
    return frame(t_ns=stamps, power_w=power, energy_j=energy, throttle_reasons=[0] * len(stamps))


def test_joules_a_token_of_each_arm(synthetic):
    run = read_run(synthetic(blocks=2).write())
    measured = Measured(replace(run, telemetry=telemetry_of(Measured(run))))

    for arm, watts in (("candidate", 100.0), ("baseline", 400.0)):
        seconds = sum(end - start for start, end in windows(measured, arm)) / S
        tokens = 2 * 12 * 16
        expected = watts * seconds / tokens
        assert joules_per_token(measured, arm, ["cuda:0"]) == pytest.approx(expected, rel=0.01)
    assert joules_per_token(measured, "candidate", ["cuda:0", "cuda:0"]) == pytest.approx(
        joules_per_token(measured, "candidate", ["cuda:0"])
    )
    assert joules_per_token(measured, "candidate", ["cpu"]) is None
    assert joules_per_token(measured, "candidate", ["cuda:0", "cuda:1"]) is None


def test_only_samples_within_passes_count(synthetic):
    run = read_run(synthetic(blocks=1).write())
    measured = Measured(run)
    [(start, end)] = windows(measured, "candidate")
    samples = frame(t_ns=[start - 1, end, start, end + 1])

    assert in_windows(samples, measured, "candidate")["t_ns"].tolist() == [start, end]


def test_state_of_each_device_and_nothing_where_nothing_was_told(synthetic):
    run = read_run(synthetic(blocks=1).write())
    start, end = windows(Measured(run))[0]
    gpu = frame(
        t_ns=[start, end, end + S // 100],  # the last lies between two passes
        sm_clock_mhz=[1980, 1755, 300],
        power_w=[300.0, 500.0, 90.0],
        throttle_reasons=[0, 4, 1],
        temperature_c=[40, 45, 99],
    )
    host = frame("host", t_ns=[start], load_1m=[1.5], memory_used_bytes=[2**30])
    states = device_states(Measured(replace(run, telemetry=pd.concat([gpu, host]))))

    assert list(states) == ["host", "cuda:0"]
    assert states["cuda:0"] == {
        "samples": 2,
        "sm_clock_mhz": 1867.5,
        "sm_clock_least_mhz": 1755,
        "memory_clock_mhz": None,
        "cpu_clock_mhz": None,
        "cpu_busy_share": None,
        "load_1m": None,
        "power_w": 400.0,
        "temperature_most_c": 45,
        "throttled_share": 0.5,
        "memory_most_bytes": None,
        "foreign_processes_most": None,
    }
    assert states["host"]["load_1m"] == 1.5
    assert states["host"]["memory_most_bytes"] == 2**30


def test_metrics_of_a_run_that_was_not_sampled(synthetic):
    metrics = summarize(read_run(synthetic(blocks=1).write()))

    assert metrics["devices"] == {}
    assert metrics["arms"]["candidate"]["j_per_output_token"] is None
