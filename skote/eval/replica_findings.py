"""Replicas that ended or came back while a run was measured, as findings."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from skote.eval.finding import Finding
from skote.eval.wording import arm_options


def replica_findings(manifest: dict[str, Any]) -> Iterator[Finding]:
    """One where the arms differ in devices or router, and one for each arm in which a replica ended."""
    options = arm_options(manifest)
    if options:
        yield Finding(
            "info",
            "arms_differ",
            ", ".join(options["candidate"]),
            ", ".join(options["baseline"]),
            "The arms differ on purpose in devices or router: the candidate has "
            f"{', '.join(options['candidate'])}, the baseline {', '.join(options['baseline'])}.",
        )
    for arm, entry in manifest["arms"].items():
        events = entry.get("events", ())
        ended = [event for event in events if event["what"] == "ended"]
        if ended:
            told = " ".join(event["sentence"] for event in events)
            yield Finding("warning", "replica_ended", len(ended), 0, f"In the {arm} arm: {told}")
