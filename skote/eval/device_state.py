"""What telemetry says of the devices within the measured passes: clocks, power, heat, memory, and the energy used."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from skote.eval.derive import PASS, Measured

HOST = "host"
THROTTLE_REASONS = {
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x10: "sync boost",
    0x20: "heat, by software",
    0x40: "heat, by hardware",
    0x80: "power brake",
}
"""NVML's bits for clocks that are held down; being idle, a clock that was set and a display are not among them."""

SHORTEST_S = 10.0  # that power is integrated over: NVML's may be a mean over the last second


def windows(measured: Measured, arm: str | None = None) -> list[tuple[int, int]]:
    """First dispatch and last token, in ns, of every pass of `arm` (None: of both) that gave a token."""
    rows = measured.requests if arm is None else measured.requests[measured.requests["arm"] == arm]
    passes = rows.groupby(PASS, sort=True).agg(start=("dispatched_ns", "min"), end=("last_token_ns", "max")).dropna()
    return [(int(start), int(end)) for start, end in passes.sort_values("start").itertuples(index=False)]


def in_windows(samples: pd.DataFrame, measured: Measured, arm: str | None = None) -> pd.DataFrame:
    """The rows of `samples` that were taken within a pass of `arm` (None: of both), in order."""
    stamps = samples["t_ns"].to_numpy()
    inside = np.zeros(len(samples), dtype=bool)
    for start, end in windows(measured, arm):
        inside |= (stamps >= start) & (stamps <= end)
    return samples[inside].sort_values("t_ns")


def throttled(reasons: pd.Series[Any]) -> pd.Series[bool]:
    """For each sample whose `reasons` (NVML's bits) are known, whether clocks were held down."""
    held: pd.Series[bool] = (reasons.dropna().astype("int64") & sum(THROTTLE_REASONS)) != 0
    return held


def energy_mismatch(samples: pd.DataFrame) -> float | None:
    """Power integrated (trapezoids) from the energy counter's first reading to its last / its difference - 1.

    None where either is not available, or the readings span less than `SHORTEST_S`.
    """
    counter = samples[["t_ns", "energy_j"]].dropna().sort_values("t_ns")
    if len(counter) < 2 or counter["t_ns"].iloc[-1] - counter["t_ns"].iloc[0] < SHORTEST_S * 1e9:
        return None
    power = samples[samples["t_ns"].between(counter["t_ns"].iloc[0], counter["t_ns"].iloc[-1])]
    power = power[["t_ns", "power_w"]].dropna().sort_values("t_ns")
    counted = float(counter["energy_j"].iloc[-1] - counter["energy_j"].iloc[0])
    if len(power) < 2 or counted <= 0:
        return None
    return float(np.trapezoid(power["power_w"], power["t_ns"].to_numpy(dtype=np.float64) / 1e9)) / counted - 1


def joules(samples: pd.DataFrame, spans: list[tuple[int, int]]) -> float | None:
    """What one device's energy counter advanced within `spans`.

    Between two readings of the counter its advance is spread over time as the power that was sampled meanwhile, or
    evenly where none was. None where there is no counter, or its readings do not cover every span.
    """
    known = samples[["t_ns", "energy_j"]].dropna().sort_values("t_ns")
    stamps, counter = (known[name].to_numpy(dtype=np.float64) for name in ("t_ns", "energy_j"))
    if not len(known) or not spans or spans[0][0] < stamps[0] or spans[-1][1] > stamps[-1]:
        return None
    power = samples[["t_ns", "power_w"]].dropna().sort_values("t_ns")
    if power.empty:
        power = known.assign(power_w=1.0)
    sampled, watts = (power[name].to_numpy(dtype=np.float64) for name in ("t_ns", "power_w"))
    knots = np.union1d(sampled, stamps)
    at_knots = np.interp(knots, sampled, watts)
    used = np.concatenate([[0.0], np.cumsum(np.diff(knots) * (at_knots[1:] + at_knots[:-1]) / 2)])
    starts, ends = (
        np.interp(np.interp(each, knots, used), np.interp(stamps, knots, used), counter)
        for each in np.array(spans, dtype=np.float64).T
    )
    return float((ends - starts).sum())


def joules_per_token(measured: Measured, arm: str, devices: list[str]) -> float | None:
    """Energy of all `devices` in the arm's passes / output tokens of its finished requests.

    None where a device has no energy counter: a CPU has none here.
    """
    rows = measured.requests[(measured.requests["arm"] == arm) & (measured.requests["status"] == "ok")]
    telemetry, spans = measured.telemetry, windows(measured, arm)
    used = [joules(telemetry[telemetry["device"] == device], spans) for device in dict.fromkeys(devices)]
    tokens = int(rows["output_tokens"].sum())
    if any(each is None for each in used) or not tokens:
        return None
    return sum(each for each in used if each is not None) / tokens


def device_states(measured: Measured) -> dict[str, dict[str, float | int | None]]:
    """For each sampled device, the host first, its state within the measured passes; what was not told is None."""
    names = sorted(set(measured.telemetry["device"]), key=lambda name: (name != HOST, name))
    return {
        name: _state(in_windows(measured.telemetry[measured.telemetry["device"] == name], measured)) for name in names
    }


def _state(rows: pd.DataFrame) -> dict[str, float | int | None]:
    held = throttled(rows["throttle_reasons"])
    return {
        "samples": len(rows),
        "sm_clock_mhz": _told(rows["sm_clock_mhz"].median()),
        "sm_clock_least_mhz": _told(rows["sm_clock_mhz"].min()),
        "memory_clock_mhz": _told(rows["memory_clock_mhz"].median()),
        "cpu_clock_mhz": _told(rows["cpu_clock_mhz"].median()),
        "cpu_busy_share": _told(rows["cpu_busy_share"].mean()),
        "load_1m": _told(rows["load_1m"].mean()),
        "power_w": _told(rows["power_w"].mean()),
        "temperature_most_c": _told(rows["temperature_c"].max()),
        "throttled_share": _told(held.mean()) if len(held) else None,
        "memory_most_bytes": _told(rows["memory_used_bytes"].max()),
        "foreign_processes_most": _told(rows["foreign_processes"].max()),
    }


def _told(value: Any) -> float | None:  # noqa: ANN401 (a scalar of pandas)
    """The figure, or None where no sample told one."""
    return None if pd.isna(value) else float(value)
