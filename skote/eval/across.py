"""One run's candidate against another's: the effect over the requests that both finished, or why there is none."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from skote.eval.derive import Measured, Samples
from skote.eval.stats import Effect, Verdict, percentile_effect
from skote.eval.summary import PRIMARY
from skote.eval.wording import hardware
from skote.types import ExitCode

INVALID = "a run is invalid"


@dataclass(frozen=True, slots=True)
class Candidate:
    """A run as far as another is compared with it.

    `requests` has a row a measured request of the candidate: block, request_id, and the primary latency in ms, NaN
    where it failed.
    """

    manifest: dict[str, Any]
    metrics: dict[str, Any]
    requests: pd.DataFrame


@dataclass(frozen=True, slots=True)
class Across:
    """A run's candidate against the first run's: the effect and its verdict, or why there is none.

    `left_out` are the requests that only one of the two finished.
    """

    effect: Effect | None
    verdict: Verdict | None
    refused: str = ""
    left_out: int = 0

    @property
    def interval_pct(self) -> list[float] | None:
        """The effect's 95 % interval, in percent."""
        interval = self.effect.interval if self.effect else None
        return [100 * interval.low, 100 * interval.high] if interval else None

    @property
    def code(self) -> ExitCode:
        """0 where there is a verdict, 2 where a run is invalid, 3 where the two do not compare."""
        if not self.refused:
            return ExitCode.DONE
        return ExitCode.INVALID if self.refused == INVALID else ExitCode.INCONCLUSIVE


def candidate_of(measured: Measured, manifest: dict[str, Any], metrics: dict[str, Any]) -> Candidate:
    """What a comparison takes of the run that all three are of."""
    rows = measured.requests
    return Candidate(manifest, metrics, rows.loc[rows["arm"] == "candidate", ["block", "request_id", PRIMARY[0]]])


def same_weights(one: dict[str, Any], other: dict[str, Any]) -> bool | None:
    """Whether the runs of two manifests had the same weights; None where nothing tells.

    The hash is over the weights as they were computed with, so it depends on the dtype; across dtypes only another
    number of parameters (another model, fewer layers) tells.
    """
    hashes = [manifest["model"]["weights_sha256"] for manifest in (one, other)]
    if None not in hashes:
        if hashes[0] == hashes[1]:
            return True
        if one["dtype"] == other["dtype"]:
            return False
    return None if one["model"]["parameters"] == other["model"]["parameters"] else False


def compare_candidates(run: Candidate, first: Candidate, *, across_machines: bool) -> Across:
    """`run` against `first`; a verdict between different hardware only with `across_machines`."""
    refused = _refused(run, first, across_machines)
    if refused:
        return Across(None, None, refused)
    q, seed = float(PRIMARY[1][1:]), int(first.manifest["seed"])
    pairs = _paired(run, first)
    finished = pairs.notna().all(axis=1)
    blocks = pairs.loc[finished, "block"].to_numpy(dtype=np.int64)
    ours, theirs = (Samples(pairs.loc[finished, name].to_numpy(dtype=np.float64), blocks) for name in ("run", "first"))
    effect = percentile_effect(ours.by_block(), theirs.by_block(), np.unique(blocks).tolist(), q, seed)
    alone = int(pairs[["run", "first"]].notna().any(axis=1).sum() - finished.sum())
    return Across(effect, effect.verdict(), left_out=alone)


def _refused(run: Candidate, first: Candidate, across_machines: bool) -> str:
    one, other = run.manifest, first.manifest
    if one["workload"]["sha256"] != other["workload"]["sha256"]:
        return "other requests"
    if same_weights(one, other) is False:
        return "other weights"
    if not across_machines and hardware(one["machine"]) != hardware(other["machine"]):
        return "other hardware"
    if not (run.metrics["verdict"]["valid"] and first.metrics["verdict"]["valid"]):
        return INVALID
    return "" if one["status"] == other["status"] == "complete" else "a run is incomplete"


def _paired(run: Candidate, first: Candidate) -> pd.DataFrame:
    """A row a request of the blocks in which both ran the same ones: block, and its latency in each, `run` and `first`.

    Sorted by block.
    """
    ids = [{block: sorted(each) for block, each in r.requests.groupby("block")["request_id"]} for r in (run, first)]
    common = [block for block, found in ids[0].items() if found == ids[1].get(block)]
    ours, theirs = (r.requests[r.requests["block"].isin(common)] for r in (run, first))
    columns = {f"{PRIMARY[0]}_x": "run", f"{PRIMARY[0]}_y": "first"}
    return ours.merge(theirs, on=["block", "request_id"]).rename(columns=columns).sort_values("block", kind="stable")
