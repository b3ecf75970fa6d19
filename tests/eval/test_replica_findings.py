"""What a report says of replicas that ended."""

from __future__ import annotations

from typing import Any

from skote.eval.replica_findings import idle_option_findings, option_findings, replica_findings
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


def test_a_run_in_the_place_of_another_says_so() -> None:
    manifest = {"config": {}, "arms": {}}
    assert not list(option_findings(manifest))
    (finding,) = option_findings(manifest | {"stands_for": {"experiment": "big", "sentence": "It runs instead."}})
    assert (finding.severity, finding.code, finding.limit) == ("info", "stand_in", "big")
    assert finding.sentence == "It runs instead."


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


def test_options_on_batches_that_the_router_keeps_from_working_are_told() -> None:
    def found(engine: dict[str, Any], router: dict[str, Any], **more: Any) -> list[str]:
        config = {"engine": engine, "compare": {"name": "baseline"}, "router": router, **more}
        findings = list(idle_option_findings({"config": config, "arms": {"candidate": {}, "baseline": {}}}))
        assert {(each.severity, each.code) for each in findings} <= {("warning", "idle_option")}
        return [each.sentence for each in findings]

    one = {"max_concurrency_per_device": 1, "microbatch_window_ms": 0.0, "microbatch_max": 8, "tpot_slo_ms": None}
    four = one | {"max_concurrency_per_device": 4}
    cause = "router.max_concurrency_per_device=1 gives the candidate arm's replicas 1 at a time: raise it."
    rows = "engine.max_batch=4 had less than its effect: it lets 4 requests run together, and"
    limit = "router.tpot_slo_ms=8 had no effect: it limits how many requests run together, and"
    assert found({"max_batch": 4}, one) == [f"{rows} {cause}"]
    slow = one | {"tpot_slo_ms": 8.0}
    assert found({}, slow, other={"router": {"max_concurrency_per_device": 2}}) == [f"{limit} {cause}"]
    assert len(found({}, slow)) == 2
    assert not found({"max_batch": 4}, four | {"tpot_slo_ms": 8.0}, other={"router": {}})
    assert not found({"max_batch": 8}, one | {"microbatch_window_ms": 5.0})
    assert not found({}, one, other=None)
