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


def test_replicas_with_clocks_of_other_machines_are_told_with_what_their_stamps_are_worth() -> None:
    def replica(uncertainty_ns: int | None) -> dict[str, object]:
        return {"clock": None if uncertainty_ns is None else {"offset_ns": 5, "uncertainty_ns": uncertainty_ns}}

    near = {"candidate": {"replicas": [replica(None), replica(120_000), replica(80_000)]}}
    (finding,) = replica_findings({"arms": near})
    assert (finding.severity, finding.code, finding.observed, finding.limit) == ("info", "other_clock", 0.12, 1.0)
    assert finding.sentence == (
        "2 replica(s) of the candidate arm were on other machines, which this record does not describe: times from a "
        "dispatch to a token are known to 0.12 ms, times between tokens are not concerned."
    )
    (finding,) = replica_findings({"arms": {"candidate": {"replicas": [replica(1_500_000)]}}})
    assert finding.severity == "warning"
    assert not list(replica_findings({"arms": {"candidate": {"replicas": [replica(None), {}]}}}))
