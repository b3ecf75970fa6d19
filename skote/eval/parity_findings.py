"""Findings about outputs: whether the arms were shown to give the same, and whether those are what was timed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import pandas as pd

from skote.eval.derive import Measured
from skote.eval.finding import Finding, Severity, requests


def parity_findings(measured: Measured, manifest: dict[str, Any]) -> Iterator[Finding]:
    """Whether the arms were shown to give the same output."""
    parity = manifest["parity"]
    if len(measured.arms) < 2:
        return
    if parity is None:
        yield Finding(
            "invalid",
            "parity_missing",
            None,
            "passed",
            "Two arms were timed, but nothing shows that they give the same output: parity was not checked.",
        )
    elif parity["passed"] is None:
        yield Finding("invalid", "parity_not_judged", parity["mode"], "passed", parity["sentence"])
    elif not parity["passed"]:
        yield Finding("invalid", "parity_failed", parity["mode"], "passed", f"Parity failed: {parity['sentence']}")


def output_findings(measured: Measured, manifest: dict[str, Any]) -> Iterator[Finding]:
    """Whether what was timed is what parity checked, and in fp32 the same in both arms."""
    yield from _parity_outputs(measured, manifest)
    yield from _greedy_outputs(measured, manifest)


def both_arms(measured: Measured) -> pd.DataFrame:
    """Finished requests that have a counterpart: request_id, block, both arms' token counts and output hashes."""
    ok = measured.requests[measured.requests["status"] == "ok"]
    columns = ["request_id", "block", "input_tokens", "output_tokens", "output_sha256"]
    candidate, baseline = (ok.loc[ok["arm"] == arm, columns] for arm in ("candidate", "baseline"))
    return candidate.merge(baseline, on=["request_id", "block"], suffixes=("_candidate", "_baseline"))


def _parity_outputs(measured: Measured, manifest: dict[str, Any]) -> Iterator[Finding]:
    if manifest["parity"] is None:
        return
    if not manifest["workload"]["greedy"]:
        yield from _sampled_outputs(manifest["parity"])
        return
    ok = measured.requests[measured.requests["status"] == "ok"]
    for arm in measured.arms:
        rows = ok[ok["arm"] == arm]
        expected = rows["request_id"].map(manifest["parity"]["outputs"].get(arm, {}))
        differ = rows[expected.notna() & (expected != rows["output_sha256"])]
        if len(differ):
            row = differ.iloc[0]
            yield Finding(
                "invalid",
                "output_differs_from_parity",
                len(differ),
                0,
                f"{requests(len(differ))} of the {arm} arm have other tokens than the output that was checked, first "
                f"{row['request_id']} in block {row['block']}: what was timed is not what was checked.",
            )
        if expected.isna().any():
            unchecked = int(expected.isna().sum())
            yield Finding(
                "warning",
                "output_unchecked",
                unchecked,
                0,
                f"The output of {requests(unchecked)} of the {arm} arm was not checked.",
            )


def _sampled_outputs(parity: dict[str, Any]) -> Iterator[Finding]:
    judged = parity.get("sampled")
    if judged is None:
        yield Finding(
            "warning",
            "sampled_outputs",
            None,
            None,
            "The workload samples, and nothing shows that its timed outputs are draws from the model's distribution: "
            "parity was checked greedily, on other prompts.",
        )
        return
    for found in judged.values():
        if not found["passed"]:
            yield Finding(
                "invalid",
                "sampled_outputs",
                None if found["z"] is None else round(found["z"], 4),
                found["limit"],
                found["sentence"],
            )


def _greedy_outputs(measured: Measured, manifest: dict[str, Any]) -> Iterator[Finding]:
    """In fp32 every timed output of one arm equals the other's, but for the near ties that parity has named."""
    if manifest["dtype"] != "fp32" or not manifest["workload"]["greedy"]:
        return
    both = both_arms(measured)
    parity = manifest["parity"] or {"mode": None, "divergences": []}
    if parity["mode"] in ("text_equal", "not_judged"):
        return  # an arm tells no ids, and has no hash of them
    near_ties = {_session(each["request_id"]) for each in parity["divergences"] if each["near_tie"]}
    differ = both[both["output_sha256_candidate"] != both["output_sha256_baseline"]]
    named = differ["request_id"].map(_session).isin(near_ties)
    for severity, code, rows, cause in (
        ("invalid", "greedy_outputs_differ", differ[~named], ""),
        ("warning", "near_tie", differ[named], ", from a near tie on"),
    ):
        if len(rows):
            row = rows.iloc[0]
            yield Finding(
                cast("Severity", severity),
                code,
                len(rows),
                0,
                f"{requests(len(rows))} of {len(both)} gave different greedy tokens in the two arms in fp32{cause}, "
                f"first {row['request_id']} in block {row['block']}.",
            )


def _session(request_id: str) -> str:
    """The conversation that a request is a turn of, as later turns go on from its answers; or the request itself."""
    return request_id.partition("-t")[0]
