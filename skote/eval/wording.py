"""How figures and verdicts read on a page: numbers with the digits that matter, sentences, names of the arms."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import jinja2

from skote.eval.stats import MIN_BLOCKS

NOT_AVAILABLE = "not available"
MINUS = "\N{MINUS SIGN}"
PERCENT_UP_TO = 0.2


def number(value: float | str | None) -> str:
    """Three to four significant digits: 1,723 and 719.6 and 39.06 and 0.132; "\N{INFINITY}" for "inf"."""
    if value is None:
        return NOT_AVAILABLE
    if isinstance(value, str):
        return "\N{INFINITY}"
    size = abs(value)
    digits = 0 if size >= 1000 or value == 0 else 1 if size >= 100 else 2 if size >= 1 else 3
    return f"{value:,.{digits}f}".replace("-", MINUS)


def percent(value: float | None) -> str:
    """A signed percentage: "+1.3 %"."""
    return NOT_AVAILABLE if value is None else f"{value:+.1f}\N{NO-BREAK SPACE}%".replace("-", MINUS)


def share(value: float | None) -> str:
    """A share as an unsigned percentage: "68.2 %"."""
    return NOT_AVAILABLE if value is None else f"{100 * value:.1f}\N{NO-BREAK SPACE}%"


def percent_interval(bounds: list[float] | None) -> str:
    """An interval of percentages: "-3.1 to +0.2 %", with a second decimal where the first would hide its width."""
    if bounds is None:
        return NOT_AVAILABLE
    digits = 1 if bounds[1] - bounds[0] >= 0.2 else 2
    return f"{bounds[0]:+.{digits}f} to {bounds[1]:+.{digits}f}\N{NO-BREAK SPACE}%".replace("-", MINUS)


def interval(bounds: list[float | str] | None) -> str:
    """An interval in the metric's unit: "714.9 to 726.4"."""
    return NOT_AVAILABLE if bounds is None else f"{number(bounds[0])} to {number(bounds[1])}"


def size(value: float | None) -> str:
    """Bytes as MiB or GiB."""
    if value is None:
        return NOT_AVAILABLE
    mib = value / 2**20
    return f"{mib / 1024:,.2f}\N{NO-BREAK SPACE}GiB" if mib >= 1024 else f"{mib:,.0f}\N{NO-BREAK SPACE}MiB"


def decimal_bytes(value: float | None) -> str:
    """Bytes in powers of ten, as bandwidths count them: "538.1 MB", "16.06 GB"."""
    if value is None:
        return NOT_AVAILABLE
    units = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))
    power, unit = next((each for each in units if value >= each[0]), (1.0, "B"))
    return f"{number(value / power)}\N{NO-BREAK SPACE}{unit}"


def devices(names: list[str]) -> str:
    """Devices of the replicas: "cuda:0, cuda:1" and "2 × cpu"."""
    counts = Counter(names)
    return ", ".join(f"{count} × {name}" if count > 1 else name for name, count in counts.items())


def hardware(facts: dict[str, Any]) -> str:
    """What computes in a machine: machines that read alike here are of the same kind."""
    return f"{facts['cpu']}, {facts['cores']} cores, {_accelerators(facts)}"


def machine(facts: dict[str, Any]) -> str:
    """What a machine is made of, without its name."""
    return f"{facts['cpu']}, {facts['cores']} cores, {size(facts['memory_bytes'])}, {_accelerators(facts)}"


def _accelerators(facts: dict[str, Any]) -> str:
    return ", ".join(accelerator["name"] for accelerator in facts["accelerators"]) or "no accelerator"


def pretty(value: dict[str, Any]) -> str:
    """A configuration as indented JSON."""
    return json.dumps(value, indent=2, ensure_ascii=False)


def arm_labels(manifest: dict[str, Any]) -> dict[str, str]:
    """The engine's name of each arm, the candidate first, with what else the arms differ in on purpose.

    Where both ran the same engine, and nothing differs, with the arm's name.
    """
    arms = manifest["arms"]
    engines = {arm: str(arms[arm]["engine"]) for arm in ("candidate", "baseline") if arm in arms}
    options = arm_options(manifest)
    if len(engines) == 2 and options:
        return {arm: f"{engine} ({', '.join(options[arm])})" for arm, engine in engines.items()}
    if len(set(engines.values())) == len(engines):
        return engines
    return {arm: f"{engine} ({arm})" for arm, engine in engines.items()}


def arm_options(manifest: dict[str, Any]) -> dict[str, list[str]]:
    """For each arm, in words, the options that the other was given otherwise (`other`); empty where there are none."""
    config = manifest["config"]
    other = config.get("other") or {}
    names = {"candidate": config.get("devices"), "baseline": other.get("devices")}
    found: dict[str, list[str]] = {"candidate": [], "baseline": []}
    for arm in found if names["baseline"] is not None else ():
        replicas = manifest["arms"].get(arm, {}).get("replicas")
        where = devices([each["device"] for each in replicas]) if replicas else f"devices={names[arm]}"
        found[arm].append(where)
    for name, value in (other.get("router") or {}).items():
        found["candidate"].append(f"{name}={config['router'][name]}")
        found["baseline"].append(f"{name}={value}")
    return found if found["baseline"] else {}


def verdict_sentence(metrics: dict[str, Any], labels: dict[str, str]) -> str:
    """What the run's primary delta says, in one or two sentences."""
    if not metrics["arms"]:
        return "Nothing was measured."
    if not metrics["deltas"]:
        arm, content = next(iter(metrics["arms"].items()))
        median = number(content["metrics"]["e2el_ms"]["p50"]["value"])
        return f"One arm ran, so nothing is compared: with {labels[arm]} a median request took {median} ms end to end."
    delta = metrics["deltas"]["e2el_ms"]["p50"]
    change = delta["delta_pct"]
    if change is None:
        return "One of the arms finished no request, so there is nothing to compare."
    words = f"{abs(change):.1f}\N{NO-BREAK SPACE}% {'less' if change < 0 else 'more'} time"
    sentence = f"A median request takes {words} end to end with {labels['candidate']} than with {labels['baseline']}."
    threshold = f"\N{PLUS-MINUS SIGN}{metrics['threshold_pct']:g}\N{NO-BREAK SPACE}%"
    reasons = {
        "beyond_threshold": "",
        "within_threshold": f" The whole interval lies within {threshold}, which counts as no difference.",
        "too_few_blocks": f" {delta['blocks']} paired blocks are too few to say more: an interval takes {MIN_BLOCKS}.",
        "interval_crosses_threshold": f" The interval reaches across {threshold}: the smallest gain that this run "
        f"could have shown is {number(delta['detectable_pct'])}\N{NO-BREAK SPACE}%.",
    }
    if metrics["verdict"]["reason"] == "run_incomplete":
        return sentence + " The run did not come to its end, so that its outputs were not judged: there is no verdict."
    return sentence + reasons[delta["reason"]]


def load_phrase(workload: dict[str, Any]) -> str:
    """How the manifest's `workload` was sent: "closed loop, concurrency 4", "poisson, 12.5 requests a second"."""
    if workload["load"] == "burst":
        return "all at once"
    if "schedule" not in workload:
        return f"closed loop, concurrency {workload['concurrency']}"
    rates = [rate for rate in workload["schedule"]["offered_req_s"] if rate is not None]
    offered = f", {number(sum(rates) / len(rates))} requests a second" if rates else ""
    return f"sent by the clock, {workload['load']}{offered}"


def refusal(delta: dict[str, Any]) -> str:
    """Why a difference has no interval: "n too small", or nothing where it has one."""
    reasons = {"too_few_samples": "n too small", "too_few_blocks": f"{delta['blocks']} blocks are too few"}
    return reasons.get(delta["reason"], "")


def stop_sentence(stop: dict[str, Any] | None) -> str:
    """Why no more blocks were measured, from the manifest's "stop"; while they are still added, how far it has come."""
    if stop is None:
        return "The number of blocks was fixed before the run."
    reached, aim = stop["reached_half_width"], _log_width(stop["half_width"])
    width = "has no interval yet" if reached is None else f"is known to {_log_width(reached)}"
    spent = f"not to {aim} as asked for, and the budget of"
    reasons = {
        "narrow_enough": f"as narrow as was asked for ({aim})",
        "blocks_spent": f"{spent} {stop['max_blocks']} blocks is spent",
        "seconds_spent": f"{spent} {stop['max_seconds']:g} s of measuring is spent",
        None: f"and {aim} is asked for: blocks are added",
    }
    return f"The difference of the median {width}, {reasons[stop['reason']]}."


def _log_width(half_width: float) -> str:
    """Half the width of an interval on the log scale: "±1.5 %", and where that is not nearly percent a factor.

    exp(0.2) is 1.22: beyond it the ends lie visibly apart from plus and minus the width.
    """
    if half_width > PERCENT_UP_TO:
        return f"within a factor of {math.exp(half_width):.1f}"
    return f"\N{PLUS-MINUS SIGN}{100 * half_width:.2g}\N{NO-BREAK SPACE}%"


def environment() -> jinja2.Environment:
    """The templates beside this file, with the functions above as filters; a name that is missing is an error."""
    templates = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    templates.filters.update(
        number=number,
        percent=percent,
        share=share,
        percent_interval=percent_interval,
        interval=interval,
        size=size,
        decimal_bytes=decimal_bytes,
        devices=devices,
        machine=machine,
        pretty=pretty,
        refusal=refusal,
        stop_sentence=stop_sentence,
    )
    return templates
