"""Validity findings: what a reader must know before believing a run's figures, as data.

A finding of severity "invalid" makes the run invalid (exit 2), whatever its speed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, cast

import pandas as pd

from skote.eval.cache_findings import cache_findings
from skote.eval.derive import Measured
from skote.eval.finding import SEVERITIES, Finding, requests
from skote.eval.machine_findings import machine_findings
from skote.eval.parity_findings import both_arms, output_findings, parity_findings
from skote.eval.physics import physics_findings
from skote.eval.replica_findings import caveat_findings, idle_option_findings, option_findings, replica_findings
from skote.eval.stats import MIN_BLOCKS, minimum_samples
from skote.eval.survivors import survivor_findings


def find(measured: Measured, manifest: dict[str, Any]) -> list[Finding]:
    """Every finding of a run, the worst first; within a severity in the order of the checks."""
    found = [
        *_arms(measured, manifest),
        *parity_findings(measured, manifest),
        *_weights(measured, manifest),
        *_workloads(measured, manifest),
        *_flags(manifest),
        *_stamps(measured),
        *_counts(measured, manifest),
        *cache_findings(measured, manifest),
        *_early_end(measured, manifest),
        *output_findings(measured, manifest),
        *_missing(measured, manifest),
        *_status(measured, manifest),
        *_failures(measured),
        *option_findings(manifest),
        *idle_option_findings(manifest),
        *replica_findings(manifest),
        *survivor_findings(measured),
        *_samples(measured),
        *_blocks(measured, manifest),
        *machine_findings(measured, manifest),
        *physics_findings(measured, manifest),
        *_slow_paths(manifest),
        *caveat_findings(manifest),
        *_late_captures(manifest),
    ]
    return sorted(found, key=lambda finding: SEVERITIES.index(finding.severity))


def _arms(measured: Measured, manifest: dict[str, Any]) -> Iterator[Finding]:
    if manifest["status"] != "complete":
        return  # the status has its own finding
    for arm in manifest["arms"]:
        if arm not in measured.arms:
            yield Finding("invalid", "arm_not_measured", 0, 1, f"The {arm} arm has no measured request.")


def _weights(measured: Measured, manifest: dict[str, Any]) -> Iterator[Finding]:
    if len(measured.arms) < 2:
        return
    replicas = [(arm, replica) for arm in measured.arms for replica in _replicas(manifest, arm)]
    if replicas and all(replica["info"].get("parameters") == 0 for _, replica in replicas):
        return  # engines without a model
    prints = {
        arm: {replica["info"].get("weights_fingerprint") for a, replica in replicas if a == arm} for arm, _ in replicas
    }
    known = set().union(*prints.values()) - {None}
    if len(known) > 1:
        shown = "; ".join(f"{arm}: {', '.join(sorted(str(p)[:12] for p in found))}" for arm, found in prints.items())
        yield Finding(
            "invalid",
            "weights_differ",
            len(known),
            1,
            f"The replicas did not run the same weights ({shown}).",
        )
    elif any(None in found or not found for found in prints.values()):
        yield Finding(
            "warning",
            "weights_unverified",
            None,
            None,
            "Not every replica reported a fingerprint of its weights, so equal weights are assumed, not checked.",
        )


def _workloads(measured: Measured, manifest: dict[str, Any]) -> Iterator[Finding]:
    """Every row belongs to the manifest's workload, and a request has prompts of the same length in both arms."""
    hashes = set(measured.requests["workload_sha256"]) | {manifest["workload"]["sha256"]}
    if len(hashes) > 1:
        yield Finding(
            "invalid",
            "workloads_differ",
            len(hashes),
            1,
            f"The rows come from different workloads ({', '.join(sorted(name[:12] for name in hashes))}).",
        )
    both = both_arms(measured)
    differ = both[both["input_tokens_candidate"] != both["input_tokens_baseline"]]
    if len(differ):
        row = differ.iloc[0]
        yield Finding(
            "invalid",
            "prompts_differ",
            len(differ),
            0,
            f"{requests(len(differ))} had prompts of different lengths in the two arms, first {row['request_id']} in "
            f"block {row['block']}: {row['input_tokens_candidate']} and {row['input_tokens_baseline']} tokens.",
        )


def _flags(manifest: dict[str, Any]) -> Iterator[Finding]:
    # With other devices the cores are split over another number of replicas.
    own_threads = (manifest["config"].get("other") or {}).get("devices") is not None
    seen = {
        json.dumps(
            {k: v for k, v in replica["info"]["flags"].items() if k != "threads" or not own_threads}, sort_keys=True
        )
        for content in manifest["arms"].values()
        for replica in content["replicas"]
        if "flags" in replica["info"]
    }
    if len(seen) > 1:
        yield Finding(
            "invalid",
            "flags_differ",
            len(seen),
            1,
            f"The replicas did not run with the same numeric flags and threads: {' and '.join(sorted(seen))}.",
        )


def _stamps(measured: Measured) -> Iterator[Finding]:
    ok = measured.requests[measured.requests["status"] == "ok"]
    order = ["scheduled_ns", "dispatched_ns", "admitted_ns", "first_token_ns", "last_token_ns", "end_ns"]
    wrong = ok[(ok[order].diff(axis=1).iloc[:, 1:] < 0).any(axis=1)]
    if len(wrong):
        row = wrong.iloc[0]
        yield Finding(
            "invalid",
            "stamps_out_of_order",
            len(wrong),
            0,
            f"{requests(len(wrong))} have stamps that do not follow each other, first {row['request_id']} in block "
            f"{row['block']} ({row['arm']}).",
        )


def _counts(measured: Measured, manifest: dict[str, Any]) -> Iterator[Finding]:
    both = both_arms(measured)
    differ = both[both["output_tokens_candidate"] != both["output_tokens_baseline"]]
    if len(differ):
        row = differ.iloc[0]
        # Where a model may stop early, outputs that differ by rounding may end at different tokens.
        yield Finding(
            "warning" if _may_end_early(differ["request_id"], manifest).all() else "invalid",
            "token_count_mismatch",
            len(differ),
            0,
            f"{requests(len(differ))} of {len(both)} have different token counts in the two arms, first "
            f"{row['request_id']} in block {row['block']}: {row['output_tokens_candidate']} and "
            f"{row['output_tokens_baseline']}.",
        )


def _early_end(measured: Measured, manifest: dict[str, Any]) -> Iterator[Finding]:
    ok = measured.requests[measured.requests["status"] == "ok"]
    asked = ok["request_id"].map(manifest["requested_tokens"]).astype("float64")
    short = ok["output_tokens"] < asked
    short &= ~(_may_end_early(ok["request_id"], manifest) & (ok["finish_reason"] == "stop"))
    if short.any():
        row = ok[short].iloc[0]
        yield Finding(
            "invalid",
            "early_end",
            int(short.sum()),
            0,
            f"{requests(int(short.sum()))} ended before the tokens that were asked for, first {row['request_id']} "
            f"({row['arm']}, block {row['block']}): {row['output_tokens']} of {int(asked[short].iloc[0])}.",
        )


def _may_end_early(request_ids: pd.Series[str], manifest: dict[str, Any]) -> pd.Series[bool]:
    """Of each request whether its answer may end before its limit."""
    everyone = bool(manifest["workload"]["respect_eos"])
    return request_ids.isin(manifest.get("may_stop", [])) | everyone


def _missing(measured: Measured, manifest: dict[str, Any]) -> Iterator[Finding]:
    asked = manifest["workload"]["blocks"] * manifest["workload"]["requests_per_block"]
    counts = measured.requests.groupby("arm").size()
    for arm in measured.arms:
        if manifest["status"] == "complete" and counts[arm] < asked:
            yield Finding(
                "invalid",
                "rows_missing",
                int(counts[arm]),
                asked,
                f"The {arm} arm has {counts[arm]} rows for the {requests(asked)} that it was sent: some are missing.",
            )


def _status(measured: Measured, manifest: dict[str, Any]) -> Iterator[Finding]:
    if manifest["status"] == "interrupted":
        yield Finding(
            "warning",
            "interrupted",
            len(measured.requests),
            None,
            f"The run was interrupted: the figures cover the {len(measured.requests)} measured requests that had "
            "finished or failed by then.",
        )
    elif manifest["status"] == "failed":
        reason = manifest["error"] or "no reason was recorded"
        yield Finding("warning", "run_failed", reason, None, f"The run did not come to its end: {reason}")


def _failures(measured: Measured) -> Iterator[Finding]:
    for arm in measured.arms:
        rows = measured.requests[measured.requests["arm"] == arm]
        failed = rows[rows["status"] != "ok"]
        if len(failed):
            row = failed.iloc[0]
            first = row["error"].rstrip(".") if isinstance(row["error"], str) else row["status"]
            yield Finding(
                "warning",
                "requests_failed",
                len(failed),
                0,
                f"{len(failed)} of {len(rows)} requests failed in the {arm} arm, first {row['request_id']} ({first}). "
                "The percentiles cover the others, the adj_ ones count each failure as infinitely slow.",
            )


def _samples(measured: Measured) -> Iterator[Finding]:
    limit = minimum_samples(95)
    finished = measured.requests[measured.requests["status"] == "ok"].groupby("arm").size()
    least = min((int(finished.get(arm, 0)) for arm in measured.arms), default=0)
    if least < limit:
        yield Finding(
            "warning",
            "too_few_samples",
            least,
            limit,
            f"{requests(least)} an arm are too few to state an interval of p95: it takes {limit}.",
        )


def _blocks(measured: Measured, manifest: dict[str, Any]) -> Iterator[Finding]:
    blocks = len(measured.paired_blocks)
    if len(manifest["arms"]) == 2 and blocks < MIN_BLOCKS:
        yield Finding(
            "warning",
            "too_few_blocks",
            blocks,
            MIN_BLOCKS,
            f"{blocks} blocks with the same requests in both arms are too few for an interval of the difference: it "
            f"takes {MIN_BLOCKS}.",
        )


def _slow_paths(manifest: dict[str, Any]) -> Iterator[Finding]:
    for arm, content in manifest["arms"].items():
        notes = [note for replica in content["replicas"] for note in replica["info"].get("notes", [])]
        for note in dict.fromkeys(notes):
            yield Finding("warning", "slow_path", arm, None, f"A slow path ran in the {arm} arm: {note}")


def _late_captures(manifest: dict[str, Any]) -> Iterator[Finding]:
    """What was captured or allocated while requests ran: it stood in somebody's latency."""
    for arm in manifest["arms"]:
        infos = [replica["info"] for replica in _replicas(manifest, arm)]
        for key, what in (("captures_after_warmup", "captured graphs"), ("allocations_after_warmup", "device memory")):
            count = sum(info.get(key, 0) for info in infos)
            if count:
                verb = "captured" if key.startswith("captures") else "allocated"
                yield Finding(
                    "warning", key, count, 0, f"The {arm} arm {verb} {what} {count} time(s) after its warm-up."
                )


def _replicas(manifest: dict[str, Any], arm: str) -> list[dict[str, Any]]:
    """What the replicas of `arm` said of themselves; nothing where the run ended before they were asked."""
    return cast("list[dict[str, Any]]", manifest["arms"].get(arm, {}).get("replicas", []))
