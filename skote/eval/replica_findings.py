"""Replicas that ended or came back while a run was measured, as findings."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from skote.eval.finding import Finding


def replica_findings(manifest: dict[str, Any]) -> Iterator[Finding]:
    """One for each arm in which a replica ended: from then on its load was another."""
    for arm, entry in manifest["arms"].items():
        events = entry.get("events", ())
        ended = [event for event in events if event["what"] == "ended"]
        if ended:
            told = " ".join(event["sentence"] for event in events)
            yield Finding("warning", "replica_ended", len(ended), 0, f"In the {arm} arm: {told}")
