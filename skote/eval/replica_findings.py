"""Findings about replicas: arms that have others on purpose, and replicas that ended while a run was measured."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from skote.eval.finding import Finding
from skote.eval.wording import arm_options


def option_findings(manifest: dict[str, Any]) -> Iterator[Finding]:
    """One where the arms were given other devices or routers (`other`)."""
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


def replica_findings(manifest: dict[str, Any]) -> Iterator[Finding]:
    """One for each arm in which a replica ended: from then on its load was another."""
    for arm, entry in manifest["arms"].items():
        events = entry.get("events", ())
        ended = [event for event in events if event["what"] == "ended"]
        if ended:
            told = " ".join(event["sentence"] for event in events)
            yield Finding("warning", "replica_ended", len(ended), 0, f"In the {arm} arm: {told}")
