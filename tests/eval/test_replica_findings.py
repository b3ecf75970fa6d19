"""What a report says of replicas that ended."""

from __future__ import annotations

from typing import Any

from skote.eval.replica_findings import option_findings, replica_findings
from skote.eval.wording import arm_labels


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


def different(**other: Any) -> dict[str, Any]:
    """A run of one engine in both arms, the candidate on two devices with a window of 5 ms."""
    devices = {"candidate": ["cuda:0", "cuda:1"], "baseline": ["cuda:0"]}
    return {
        "config": {"devices": 2, "router": {"microbatch_window_ms": 5.0}, "other": other},
        "arms": {
            arm: {"engine": "skotergy", "replicas": [{"device": name} for name in names]}
            for arm, names in devices.items()
        },
    }


def test_arms_that_differ_on_purpose_are_called_by_what_they_differ_in() -> None:
    labels = arm_labels(different(devices=1))
    assert labels == {"candidate": "skotergy (cuda:0, cuda:1)", "baseline": "skotergy (cuda:0)"}
    manifest = different(devices=None, router={"microbatch_window_ms": 0.0})
    assert arm_labels(manifest) == {
        "candidate": "skotergy (microbatch_window_ms=5.0)",
        "baseline": "skotergy (microbatch_window_ms=0.0)",
    }
    (finding,) = option_findings(manifest)
    assert (finding.severity, finding.code) == ("info", "arms_differ")
    assert "the candidate has microbatch_window_ms=5.0, the other arm microbatch_window_ms=0.0." in finding.sentence


def test_arms_that_are_alike_keep_their_names() -> None:
    for manifest in (different(), different(devices=None, router={})):
        assert list(option_findings(manifest)) == []
        assert arm_labels(manifest)["candidate"] == "skotergy (candidate)"
