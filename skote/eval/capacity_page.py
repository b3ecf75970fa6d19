"""capacity.json and capacity.html: what a search has found of each arm, from the runs of its probes."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from skote.eval import figures
from skote.eval.record import write_text
from skote.eval.search import SATURATED_BACKLOG, Bracket, Tried, bracket, knee
from skote.eval.slo import SINCE_SCHEDULED, SloConfig
from skote.eval.wording import environment
from skote.types import RecordError

SCHEMA_VERSION = 1
SHOWN = ("ttft_ms", "tpot_ms", "e2el_ms")


def probe_entry(directory: Path, root: Path, load: float) -> dict[str, Any]:
    """What the run in `directory` found of one arm at `load`; latencies count every failed request as +inf."""
    metrics = json.loads((directory / "metrics.json").read_text(encoding="utf-8"))
    arm, slo = metrics["arms"]["candidate"], metrics["slo"]["arms"]["candidate"]
    traffic = metrics["traffic"]["candidate"]
    adjusted = {name: arm["metrics"][f"adj_{SINCE_SCHEDULED.get(name, name)}"] for name in SHOWN}
    return {
        "run": directory.relative_to(root).as_posix(),
        "load": load,
        "valid": metrics["verdict"]["valid"],
        "offered_req_s": traffic["offered_req_s"],
        "backlog_share": traffic["backlog_share"],
        "lag_p99_ms": traffic["dispatch_lag_ms"]["p99"],
        **{key: slo[key] for key in ("scheduled", "met", "attainment", "interval", "goodput_req_s")},
        "latency": {name: {q: adjusted[name][q]["value"] for q in ("p50", "p95")} for name in SHOWN},
    }


def tried_loads(probes: Sequence[dict[str, Any]]) -> list[Tried]:
    """The probes of an arm by load, those of one load together, in the order in which loads were first tried."""
    tried: dict[float, list[dict[str, Any]]] = {}
    for probe in probes:
        tried.setdefault(probe["load"], []).append(probe)
    return [
        Tried(
            load,
            sum(each["scheduled"] for each in same),
            sum(each["met"] for each in same),
            len(same),
            any(each["backlog_share"] > SATURATED_BACKLOG for each in same),
        )
        for load, same in tried.items()
    ]


def capacity_content(arms: dict[str, dict[str, Any]], slo: SloConfig, what: str) -> dict[str, Any]:
    """The content of capacity.json: of each arm its engine, its probes, and what they say.

    `what` names the load that was searched. `capacity_req_s` is what the highest load that kept the limits offered, and
    `missed_req_s` the lowest above it that did not; the ratio of the arms has the bounds that those leave.
    """
    found = {name: content | _found(content["probes"], slo) for name, content in arms.items()}
    return {
        "schema_version": SCHEMA_VERSION,
        "load": what,
        "slo": vars(slo) | {"limits": slo.limits},
        "arms": found,
        "ratio": _ratio(found["candidate"], found["baseline"]) if "baseline" in found else None,
    }


def rebuild_capacity(directory: Path) -> Path:
    """Compute capacity.json and capacity.html of a search again, from the metrics.json of its probes; the page's path.

    Raises:
        RecordError: there is no search in `directory`, or a file of it cannot be read or written.
    """
    try:
        old = json.loads((directory / "capacity.json").read_text(encoding="utf-8"))
        arms = {
            name: {
                "engine": arm["engine"],
                "probes": [probe_entry(directory / each["run"], directory, each["load"]) for each in arm["probes"]],
            }
            for name, arm in sorted(old["arms"].items(), reverse=True)  # the candidate first
        }
        slo = SloConfig(**{field.name: old["slo"][field.name] for field in fields(SloConfig)})
    except OSError as error:
        raise RecordError(f"{error.filename} cannot be read: {error.strerror}.") from error
    except (ValueError, KeyError, TypeError) as error:
        raise RecordError(f"{directory} holds no search that can be read, a file is damaged: {error}.") from error
    return render_capacity(directory, capacity_content(arms, slo, old["load"]))


def _found(probes: Sequence[dict[str, Any]], slo: SloConfig) -> dict[str, Any]:
    tried = tried_loads(probes)
    known: Bracket = bracket(tried, slo.attainment)
    offered = {probe["load"]: probe["offered_req_s"] for probe in probes}
    name = "e2el_ms" if "e2el_ms" in slo.limits else next(iter(slo.limits))
    tails = [(probe["offered_req_s"], probe["latency"][name]["p95"]) for probe in probes]
    return {
        "kept_load": known.kept,
        "missed_load": known.missed,
        "capacity_req_s": None if known.kept is None else offered[known.kept],
        "missed_req_s": None if known.missed is None else offered[known.missed],
        "undecided": [each.load for each in tried if each.outcome(slo.attainment) == "undecided"],
        "knee_req_s": knee([(load, tail) for load, tail in tails if load is not None and isinstance(tail, float)]),
    }


def _ratio(candidate: dict[str, Any], baseline: dict[str, Any]) -> dict[str, float | None]:
    def over(above: float | None, below: float | None) -> float | None:
        return above / below if above is not None and below else None

    return {
        "value": over(candidate["capacity_req_s"], baseline["capacity_req_s"]),
        "low": over(candidate["capacity_req_s"], baseline["missed_req_s"]),
        "high": over(candidate["missed_req_s"], baseline["capacity_req_s"]),
    }


def render_capacity(directory: Path, content: dict[str, Any]) -> Path:
    """Write capacity.json and capacity.html into `directory`; the page's path.

    Raises:
        RecordError: they cannot be written.
    """
    labels = {name: arm["engine"] for name, arm in content["arms"].items()}
    if len(set(labels.values())) < len(labels):
        labels = {name: f"{engine} ({name})" for name, engine in labels.items()}
    charts = [_chart(content, name, labels) for name in SHOWN]
    page = environment().get_template("capacity.html.j2").render(content=content, labels=labels, charts=charts)
    write_text(directory / "capacity.json", json.dumps(content, indent=2, sort_keys=True, allow_nan=False) + "\n")
    write_text(directory / "capacity.html", page)
    return directory / "capacity.html"


def _chart(content: dict[str, Any], name: str, labels: dict[str, str]) -> figures.Chart | None:
    curves = {
        arm: [
            (probe["offered_req_s"], latency["p50"], latency["p95"])
            for probe in found["probes"]
            if probe["offered_req_s"] is not None and _is_drawn(latency := probe["latency"][name])
        ]
        for arm, found in content["arms"].items()
    }
    return figures.load_curve(curves, name, content["slo"]["limits"].get(name), labels)


def _is_drawn(latency: dict[str, Any]) -> bool:
    """Whether both percentiles are numbers: "inf" is where too many failed, null where a request has one token."""
    return all(isinstance(value, float) and math.isfinite(value) and value > 0 for value in latency.values())
