"""Findings about replicas: that differ on purpose, that options cannot reach, that ended, live elsewhere, or guess."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from skote.eval.finding import Finding
from skote.eval.wording import arm_options


def option_findings(manifest: dict[str, Any]) -> Iterator[Finding]:
    """One where the run stands in for another one, one where the arms were given other devices or routers (`other`)."""
    if "stands_for" in manifest:
        asked = manifest["stands_for"]
        yield Finding("info", "stand_in", None, asked["experiment"], asked["sentence"])
    options = arm_options(manifest)
    if options:
        candidate, baseline = (", ".join(options[arm]) for arm in ("candidate", "baseline"))
        yield Finding(
            "info",
            "arms_differ",
            candidate,
            baseline,
            "The arms differ on purpose in devices or router: the candidate has "
            f"{candidate}, the other arm {baseline}.",
        )


def idle_option_findings(manifest: dict[str, Any]) -> Iterator[Finding]:
    """For each arm: options on batches that had no effect, as the router gave a replica fewer requests at a time."""
    config = manifest["config"]
    overridden = (config.get("other") or {}).get("router") or {}
    for arm, group, changed in (("candidate", "engine", {}), ("baseline", "compare", overridden)):
        if arm not in manifest["arms"]:
            continue
        router = config.get("router", {}) | changed
        launches = router.get("max_concurrency_per_device", 1)
        most = launches * (router.get("microbatch_max", 1) if router.get("microbatch_window_ms") else 1)
        cause = (
            f"router.max_concurrency_per_device={launches} gives the {arm} arm's replicas {most} at a time: raise it."
        )
        limit_ms = router.get("tpot_slo_ms")
        if limit_ms is not None and most == 1:
            said = (
                f"router.tpot_slo_ms={limit_ms:g} had no effect: it limits how many requests run together, and {cause}"
            )
            yield Finding("warning", "idle_option", most, 2, said)
        rows = config.get(group, {}).get("max_batch") or 1
        if rows > most:
            said = (
                f"{group}.max_batch={rows} had less than its effect: it lets {rows} requests run together, and {cause}"
            )
            yield Finding("warning", "idle_option", most, rows, said)


def caveat_findings(manifest: dict[str, Any]) -> Iterator[Finding]:
    """For each arm: what its engine says that its figures leave open, once."""
    for arm, entry in manifest["arms"].items():
        said = [caveat for replica in entry["replicas"] for caveat in replica["info"].get("caveats", [])]
        for caveat in dict.fromkeys(said):
            yield Finding("warning", "caveat", arm, None, f"Of the {arm} arm: {caveat}")


CLOCK_LIMIT_MS = 1.0
"""Of the uncertainty of another machine's clock: up to here it is information, beyond a warning."""


def replica_findings(manifest: dict[str, Any]) -> Iterator[Finding]:
    """For each arm: a replica ended, so that then the load was another; replicas had other machines' clocks."""
    for arm, entry in manifest["arms"].items():
        events = entry.get("events", ())
        ended = [event for event in events if event["what"] == "ended"]
        if ended:
            told = " ".join(event["sentence"] for event in events)
            yield Finding("warning", "replica_ended", len(ended), 0, f"In the {arm} arm: {told}")
        yield from _other_clocks(arm, entry.get("replicas", ()))


def _other_clocks(arm: str, replicas: Sequence[dict[str, Any]]) -> Iterator[Finding]:
    clocks = [replica["clock"]["uncertainty_ns"] / 1e6 for replica in replicas if replica.get("clock")]
    if clocks:
        most = round(max(clocks), 3)
        yield Finding(
            "warning" if most > CLOCK_LIMIT_MS else "info",
            "other_clock",
            most,
            CLOCK_LIMIT_MS,
            f"{len(clocks)} replica(s) of the {arm} arm were on other machines, which this record does not describe: "
            f"times from a dispatch to a token are known to {most:g} ms, times between tokens are not concerned.",
        )
