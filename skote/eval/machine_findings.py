"""Findings about the machine and the harness while a run was measured: noise, clocks, other processes, lag, energy."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median
from typing import Any, cast

import pandas as pd

from skote.eval.derive import METRICS, PASS, Measured
from skote.eval.device_state import HOST, THROTTLE_REASONS, energy_mismatch, in_windows, throttled
from skote.eval.finding import Finding, Severity
from skote.eval.stats import MIN_BLOCKS, percentile, percentile_interval

CPU_SHARE_LIMIT = 0.06  # of the machine, taken by others in one pass; 3 times the default verdict threshold
HAND_BACK_LIMIT = 0.02  # of the median latency: the default verdict threshold
HAND_BACK_MS = 1.0  # answers took 0.1 to 0.9 ms to their client where this counts, below 50 ms, on GPU and CPU machines
LAG_LIMIT = 0.02  # of the median latency: the default verdict threshold
THROTTLED_LIMIT = 0.01  # of the samples
CLOCK_DRIFT_LIMIT = 0.03  # of the clock, from the first third of an arm's samples to the last
WARMING_C = 2  # degrees; sensors tell whole ones
LEAST_SAMPLES = 12  # that a clock's drift is judged by
WALL_JUMP_MS = 10.0  # a slewed clock moves by 1 ms in the 2 s between samples
ENERGY_LIMIT = 0.10
TELEMETRY_LIMIT = 0.002  # of one core

_CHOSEN = {metric.name: metric for metric in METRICS}


def machine_findings(measured: Measured, manifest: dict[str, Any]) -> Iterator[Finding]:
    """What the machine did to the figures, as far as the record tells."""
    yield from _noise(manifest)
    yield from _one_sided_noise(manifest)
    yield from _harness(manifest)
    yield from _client(measured)
    yield from _hand_back(measured, manifest)
    yield from _early_stamps(measured, manifest)
    yield from _throttled(measured)
    yield from _foreign_gpu_processes(measured)
    yield from _foreign_unknown(measured)
    yield from _thermal_drift(measured)
    yield from _wall_jump(measured)
    yield from _energy(measured)
    yield from _telemetry(manifest)


def _noise(manifest: dict[str, Any]) -> Iterator[Finding]:
    timed = [entry for entry in manifest["passes"] if entry["phase"] == "measure"]
    for severity, key, code, what in (
        ("warning", "foreign_cpu_share", "foreign_cpu", "Machine noise: other processes took"),
        ("warning", "steal_share", "steal", "Machine noise: the hypervisor took"),
        ("invalid", "idle_arm_share", "idle_arm_busy", "The arm that should have been idle took"),
    ):
        noisy = [entry for entry in timed if (entry.get(key) or 0.0) > CPU_SHARE_LIMIT]
        if noisy:
            worst = max(noisy, key=lambda entry: float(entry[key]))
            yield Finding(
                cast("Severity", severity),
                code,
                round(float(worst[key]), 4),
                CPU_SHARE_LIMIT,
                f"{what} more than {CPU_SHARE_LIMIT:.0%} of the CPU in {len(noisy)} of {len(timed)} "
                f"passes, at most {worst[key]:.0%} ({worst['arm']}, block {worst['block']}).",
            )


def _one_sided_noise(manifest: dict[str, Any]) -> Iterator[Finding]:
    """Noise that both arms have widens the interval; noise of one arm alone moves it.

    The median over passes: what comes and goes by chance hits a pass or two, and the medians of blocks stand that.
    """
    timed = [entry for entry in manifest["passes"] if entry["phase"] == "measure"]
    shares: dict[str, list[float]] = {}
    for entry in timed:
        if entry.get("foreign_cpu_share") is not None:
            shares.setdefault(entry["arm"], []).append(float(entry["foreign_cpu_share"]))
    usual = sorted(((median(each), arm) for arm, each in shares.items()), reverse=True)
    if len(usual) < 2:
        return
    (most, hit), (least, spared) = usual
    if most - least > CPU_SHARE_LIMIT:
        yield Finding(
            "invalid",
            "one_sided_noise",
            round(most - least, 4),
            CPU_SHARE_LIMIT,
            f"Other processes took {most:.0%} of the CPU in the passes of the {hit} arm and {least:.0%} in those of "
            f"the {spared} arm, in the median: the comparison is biased.",
        )


def _harness(manifest: dict[str, Any]) -> Iterator[Finding]:
    harness = manifest["harness"]
    for key, limit, unit in (("us_per_token", 50.0, "us a token"), ("ms_per_request", 1.0, "ms a request")):
        if harness is not None and harness[key] > limit:
            yield Finding(
                "warning",
                "harness_overhead",
                round(harness[key], 4),
                limit,
                f"The harness itself adds {harness[key]:.3g} {unit} on this machine, more than {limit:g}.",
            )


def _client(measured: Measured) -> Iterator[Finding]:
    for arm in measured.arms:
        lag, latency = (measured.samples(arm, _CHOSEN[name]).values for name in ("dispatch_delay_ms", "e2el_sched_ms"))
        if not latency.size:
            continue
        share = percentile(lag, 95) / percentile(latency, 50)
        if share > LAG_LIMIT:
            yield Finding(
                "warning",
                "client_limited",
                round(share, 4),
                LAG_LIMIT,
                f"Requests to the {arm} arm left the client late: by {percentile(lag, 95):.3g} ms (p95), {share:.1%} "
                "of the median latency, so that the load was not the one that was asked for.",
            )


def _hand_back(measured: Measured, manifest: dict[str, Any]) -> Iterator[Finding]:
    """Work that an engine puts off past the last token is in no latency, nor is time that a slowed clock hides.

    The rows of a batch share a launch, `admitted_ns`, and come back when the last of them has its last token. On a
    machine with more to do than cores answers wait for milliseconds now and then, while work that is put off makes them
    late every time: held against the limit is the lower end of the median's interval, of five answers the least. Fewer
    lead to no verdict anyway.
    """
    ok = measured.requests[measured.requests["status"] == "ok"]
    launches = ok.groupby([*PASS, "replica", "admitted_ns"])["last_token_ns"]
    late_ms = (ok["end_ns"] - launches.transform("max")) / 1e6
    harness_ms = manifest["harness"]["ms_per_request"] if manifest["harness"] is not None else 0.0
    for arm in measured.arms:
        rows = ok["arm"] == arm
        if rows.sum() < MIN_BLOCKS:
            continue
        late, latency = late_ms[rows].to_numpy(), float(ok.loc[rows, "e2el_ms"].median())
        limit = harness_ms + max(HAND_BACK_MS, HAND_BACK_LIMIT * latency)
        interval = percentile_interval(late, 50)
        if (late.min() if interval is None else interval.low) > limit:
            median = percentile(late, 50)
            yield Finding(
                "invalid",
                "late_hand_back",
                round(median, 3),
                round(limit, 3),
                f"Answers of the {arm} arm came back {median:.3g} ms after their last token (median; {limit:.3g} are "
                "allowed): its latencies leave out what it did in that time.",
            )


def _early_stamps(measured: Measured, manifest: dict[str, Any]) -> Iterator[Finding]:
    """Stamps are taken in the engine's own process, which might take them before it has the token.

    What the client hears of first tokens while a probe of the cache runs comes too late every time then.
    """
    harness_ms = manifest["harness"]["ms_per_request"] if manifest["harness"] is not None else 0.0
    for arm in measured.arms:
        probes = [each["cache_probe"] for each in manifest["passes"] if each["arm"] == arm and each.get("cache_probe")]
        ttft = measured.samples(arm, _CHOSEN["ttft_ms"]).values
        if len(probes) < MIN_BLOCKS or not ttft.size:
            continue
        least = min(float(each["told_after_ms"]) for each in probes)
        limit = harness_ms + max(HAND_BACK_MS, HAND_BACK_LIMIT * percentile(ttft, 50))
        if least > limit:
            yield Finding(
                "invalid",
                "early_stamps",
                round(least, 3),
                round(limit, 3),
                f"First tokens of the {arm} arm were known {least:.3g} ms after their stamps or later ({limit:.3g} are "
                "allowed): its times to first token leave out what it did in that time.",
            )


def _throttled(measured: Measured) -> Iterator[Finding]:
    for device, samples in _gpus(measured):
        down = throttled(samples["throttle_reasons"])
        share = float(down.mean()) if len(down) else 0.0
        if share > THROTTLED_LIMIT:
            seen = samples["throttle_reasons"].dropna().astype("int64")
            names = [name for bit, name in THROTTLE_REASONS.items() if (seen & bit).any()]
            yield Finding(
                "warning",
                "throttled_clocks",
                round(share, 4),
                THROTTLED_LIMIT,
                f"The clocks of {device} were held down in {share:.0%} of the measured samples ({', '.join(names)}).",
            )


def _foreign_gpu_processes(measured: Measured) -> Iterator[Finding]:
    for device, samples in _gpus(measured):
        most = samples["foreign_processes"].max()
        if most > 0:
            processes = "1 process that is" if most == 1 else f"{most:.0f} processes that are"
            yield Finding(
                "warning",
                "foreign_gpu_process",
                int(most),
                0,
                f"{processes} not ours had {device} open while the run was measured.",
            )


def _foreign_unknown(measured: Measured) -> Iterator[Finding]:
    told = measured.telemetry.groupby("device")["foreign_processes"].count()
    unknown = [str(device) for device, count in told.items() if device != HOST and not count]
    if unknown:
        yield Finding(
            "info",
            "foreign_unknown",
            None,
            None,
            f"Nobody looked whether other processes computed on {', '.join(unknown)}: the driver lists none of the "
            "run's own, as in a container.",
        )


def _thermal_drift(measured: Measured) -> Iterator[Finding]:
    for device, samples in measured.telemetry.groupby("device"):
        for arm in measured.arms:
            rows = in_windows(samples, measured, arm)
            clocks = rows["cpu_clock_mhz" if device == HOST else "sm_clock_mhz"].dropna()
            if len(clocks) < LEAST_SAMPLES:
                continue
            fell = 1 - _last_third(clocks) / _first_third(clocks)
            warmth = rows["temperature_c"].dropna()
            risen = _last_third(warmth) - _first_third(warmth) if len(warmth) >= 3 else None
            if fell > CLOCK_DRIFT_LIMIT and (risen is None or risen > WARMING_C):
                yield Finding(
                    "warning",
                    "thermal_drift",
                    round(fell, 4),
                    CLOCK_DRIFT_LIMIT,
                    f"The clock of {device} fell by {fell:.1%} while the {arm} arm was measured"
                    f"{'' if risen is None else f', and it warmed by {risen:.0f} degrees'}.",
                )


def _wall_jump(measured: Measured) -> Iterator[Finding]:
    host = measured.telemetry[measured.telemetry["device"] == HOST].sort_values("t_ns")
    jump_ms = float(host["wall_offset_ns"].diff().abs().max()) / 1e6
    if jump_ms > WALL_JUMP_MS:
        yield Finding(
            "warning",
            "clock_jump",
            round(jump_ms, 3),
            WALL_JUMP_MS,
            f"The wall clock and the monotonic clock moved apart by {jump_ms:,.0f} ms at once: one was set, or the "
            "machine stood still.",
        )


def _energy(measured: Measured) -> Iterator[Finding]:
    for device, samples in measured.telemetry.groupby("device"):
        mismatch = energy_mismatch(samples)
        if mismatch is not None and abs(mismatch) > ENERGY_LIMIT:
            yield Finding(
                "warning",
                "energy_mismatch",
                round(mismatch, 4),
                ENERGY_LIMIT,
                f"Power of {device}, integrated, is {mismatch:+.0%} off its energy counter: do not rely on either.",
            )


def _telemetry(manifest: dict[str, Any]) -> Iterator[Finding]:
    facts = manifest.get("telemetry")
    if facts is None:
        return
    if facts["error"] is not None:
        yield Finding("warning", "telemetry_incomplete", facts["error"], None, facts["error"])
    if facts["unavailable"] is not None:
        yield Finding("info", "telemetry_unavailable", None, None, facts["unavailable"])
    if facts["cpu_share"] is not None and facts["cpu_share"] > TELEMETRY_LIMIT:
        yield Finding(
            "info",
            "telemetry_cost",
            round(facts["cpu_share"], 5),
            TELEMETRY_LIMIT,
            f"Telemetry took {facts['cpu_share']:.2%} of one core, more than {TELEMETRY_LIMIT:.1%}.",
        )


def _gpus(measured: Measured) -> Iterator[tuple[str, pd.DataFrame]]:
    """Each GPU's samples within the passes of any arm."""
    for device, samples in measured.telemetry.groupby("device"):
        if device != HOST:
            yield str(device), in_windows(samples, measured)


def _first_third(values: pd.Series[float]) -> float:
    return float(values.iloc[: len(values) // 3].median())


def _last_third(values: pd.Series[float]) -> float:
    return float(values.iloc[-(len(values) // 3) :].median())
