"""What a report says of replicas that ended."""

from __future__ import annotations

from skote.eval.replica_findings import replica_findings


def test_an_arm_whose_replica_ended_is_named_with_what_became_of_it() -> None:
    events = [
        {"t_ns": 1, "replica": 1, "what": "ended", "sentence": "Replica 1 (cpu) was killed by SIGKILL."},
        {"t_ns": 2, "replica": 1, "what": "restarted", "sentence": "Replica 1 was ready again after 2.0 s."},
    ]
    arms = {"baseline": {"events": []}, "candidate": {"events": events}, "older": {}}
    (finding,) = replica_findings({"arms": arms})
    assert (finding.severity, finding.code, finding.observed, finding.limit) == ("warning", "replica_ended", 1, 0)
    assert finding.sentence == (
        "In the candidate arm: Replica 1 (cpu) was killed by SIGKILL. Replica 1 was ready again after 2.0 s."
    )
