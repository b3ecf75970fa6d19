"""Derived metrics: from raw rows to milliseconds a request, gaps between chunks, and tokens a second.

Only the rows of the measured phase count. A request that failed has no latency; it counts as +inf in the `adj_`
percentiles, and its tokens are not finished work.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
import pandas as pd

from skote.eval.record import Run
from skote.eval.stats import Floats

KEYS = ["arm", "block", "round", "request_id"]  # of a request within the measured phase
PASS = ["arm", "block", "round"]
THROUGHPUTS = ("output_tok_s", "total_tok_s", "req_s")


@dataclass(frozen=True, slots=True)
class Metric:
    """A latency: its name, how it is defined, what it is sampled over, and whether the arms' ratio is of interest."""

    name: str
    definition: str
    per: Literal["request", "token", "chunk"] = "request"
    compared: bool = True


METRICS = (
    Metric("e2el_ms", "last token - dispatched"),
    Metric("e2el_sched_ms", "last token - scheduled"),
    Metric("ttft_ms", "first token - dispatched"),
    Metric("ttft_sched_ms", "first token - scheduled"),
    Metric("tpot_ms", "(last token - first token) / (output tokens - tokens of the first chunk)"),
    Metric("itl_ms", "gap before a chunk / its tokens", per="token"),
    Metric("icl_ms", "gap before a chunk", per="chunk"),
    Metric("itl_max_ms", "the longest gap before a chunk of the request"),
    Metric("dispatch_delay_ms", "dispatched - scheduled", compared=False),
    Metric("queue_ms", "admitted - dispatched", compared=False),
)
ADJUSTED = (
    "e2el_ms",
    "e2el_sched_ms",
    "ttft_ms",
    "ttft_sched_ms",
    "tpot_ms",
)  # those that a failure leaves without end


@dataclass(frozen=True, slots=True)
class Samples:
    """Values of one metric in one arm, and the block of each: both `[n]`."""

    values: Floats
    blocks: np.ndarray[tuple[int], np.dtype[np.int64]]

    def by_block(self) -> dict[int, Floats]:
        """The values of each block."""
        order = np.argsort(self.blocks, kind="stable")
        names, starts = np.unique(self.blocks[order], return_index=True)
        parts = np.split(self.values[order], starts[1:])
        return {int(name): part for name, part in zip(names, parts, strict=False)}


class Measured:
    """The measured phase of a run.

    `requests` has a row a request: the columns of the record and one a request metric, NaN where it is undefined.
    `gaps` has a row a chunk after the first of its request, finished requests only: the columns of `KEYS`, `position`
    (tokens of the request before this chunk), `n_tokens`, `gap_ms`.
    """

    def __init__(self, run: Run) -> None:
        requests = run.requests[run.requests["phase"] == "measure"].reset_index(drop=True)
        tokens = run.tokens[run.tokens["phase"] == "measure"].reset_index(drop=True)
        self.gaps = _chunk_gaps(_in_request_order(tokens), requests)
        self.requests = _with_metrics(requests, self.gaps)

    @property
    def arms(self) -> list[str]:
        """The arms that have measured requests, the candidate first."""
        present = set(self.requests["arm"])
        return [arm for arm in ("candidate", "baseline") if arm in present]

    @cached_property
    def paired_blocks(self) -> list[int]:
        """Blocks in which both arms ran the same requests; a block that was cut short compares nothing."""
        candidate, baseline = (self._ids_by_block(arm) for arm in ("candidate", "baseline"))
        return [block for block, ids in candidate.items() if ids == baseline.get(block)]

    def _ids_by_block(self, arm: str) -> dict[int, list[str]]:
        rows = self.requests[self.requests["arm"] == arm]
        return {int(str(block)): sorted(ids) for block, ids in rows.groupby("block")["request_id"]}

    def samples(self, arm: str, metric: Metric) -> Samples:
        """The finite samples of `metric` in `arm`."""
        if metric.per == "request":
            rows = self.requests[(self.requests["arm"] == arm) & self.requests[metric.name].notna()]
            return Samples(rows[metric.name].to_numpy(dtype=np.float64), rows["block"].to_numpy(dtype=np.int64))
        gaps = self.gaps[self.gaps["arm"] == arm]
        values = gaps["gap_ms"].to_numpy(dtype=np.float64)
        blocks = gaps["block"].to_numpy(dtype=np.int64)
        if metric.per == "chunk":
            return Samples(values, blocks)
        counts = gaps["n_tokens"].to_numpy()
        return Samples(np.repeat(values / counts, counts), np.repeat(blocks, counts))

    def failures(self, arm: str) -> int:
        """How many requests of `arm` did not finish."""
        return int(((self.requests["arm"] == arm) & (self.requests["status"] != "ok")).sum())

    @cached_property
    def passes(self) -> pd.DataFrame:
        """A row a pass: `PASS`, `window_s` (last token - first dispatch), and the work finished in it.

        Columns of the work: `input_tokens`, `output_tokens`, `requests`. A pass without a single token has window 0.
        """
        grouped = self.requests.groupby(PASS, sort=True)
        passes = ((grouped["last_token_ns"].max() - grouped["dispatched_ns"].min()) / 1e9).rename("window_s").to_frame()
        finished = self.requests[self.requests["status"] == "ok"].groupby(PASS, sort=True)
        work = finished[["input_tokens", "output_tokens"]].sum().assign(requests=finished.size())
        return passes.join(work).fillna(0.0).reset_index()

    def throughput(self, arm: str) -> dict[str, float]:
        """`THROUGHPUTS` of `arm` over all of its passes; empty where nothing was finished."""
        return _rates(self.passes[self.passes["arm"] == arm])

    def block_throughput(self, arm: str) -> dict[int, dict[str, float]]:
        """`THROUGHPUTS` of each block of `arm`."""
        passes = self.passes[self.passes["arm"] == arm]
        return {int(str(block)): _rates(rows) for block, rows in passes.groupby("block")}


def _with_metrics(requests: pd.DataFrame, gaps: pd.DataFrame) -> pd.DataFrame:
    # Columns that hold a null come back from parquet as float64: exact to the nanosecond for 104 days of uptime.
    ok = requests["status"] == "ok"
    scheduled, dispatched, admitted, first, last = (
        requests[name].astype("float64").where(ok)
        for name in ("scheduled_ns", "dispatched_ns", "admitted_ns", "first_token_ns", "last_token_ns")
    )
    later = (requests["output_tokens"] - requests["first_chunk_tokens"]).where(lambda count: count > 0)
    derived: pd.DataFrame = requests.assign(
        e2el_ms=(last - dispatched) / 1e6,
        e2el_sched_ms=(last - scheduled) / 1e6,
        ttft_ms=(first - dispatched) / 1e6,
        ttft_sched_ms=(first - scheduled) / 1e6,
        tpot_ms=(last - first) / 1e6 / later,
        dispatch_delay_ms=(dispatched - scheduled) / 1e6,
        queue_ms=(admitted - dispatched) / 1e6,
    )
    worst = gaps.groupby(KEYS, sort=False)["gap_ms"].max().rename("itl_max_ms").reset_index()
    return derived.merge(worst, on=KEYS, how="left")


def _chunk_gaps(tokens: pd.DataFrame, requests: pd.DataFrame) -> pd.DataFrame:
    first = tokens["index"].to_numpy() == 0
    request = np.cumsum(first) - 1
    counts = tokens["n_tokens"].to_numpy().astype(np.int64)
    before = np.cumsum(counts) - counts
    stamps = tokens["t_ns"].to_numpy()
    starts = tokens.loc[first, KEYS].merge(requests[[*KEYS, "status"]], on=KEYS, how="left")
    finished = (starts["status"] == "ok").to_numpy(dtype=bool)
    keep = ~first & finished[request]
    gaps: pd.DataFrame = tokens.loc[keep, [*KEYS, "n_tokens"]].reset_index(drop=True)
    gaps["position"] = (before - before[first][request])[keep]
    gaps["gap_ms"] = (np.diff(stamps, prepend=stamps[:1]) / 1e6)[keep]
    return gaps


def _rates(passes: pd.DataFrame) -> dict[str, float]:
    seconds = float(passes["window_s"].sum())
    if seconds <= 0:
        return {}
    output, total = float(passes["output_tokens"].sum()), float(passes["input_tokens"].sum())
    rates = (output / seconds, (total + output) / seconds, float(passes["requests"].sum()) / seconds)
    return dict(zip(THROUGHPUTS, rates, strict=True))


def _in_request_order(tokens: pd.DataFrame) -> pd.DataFrame:
    """Rows with each request's chunks together and in order: as the writer leaves them, so a check comes first."""
    index = tokens["index"].to_numpy()
    follows = np.zeros(len(tokens), dtype=bool)
    if len(tokens):
        same = np.ones(len(tokens) - 1, dtype=bool)
        for key in KEYS:
            column = tokens[key]
            same &= (column.iloc[1:].reset_index(drop=True) == column.iloc[:-1].reset_index(drop=True)).to_numpy(bool)
        follows[1:] = same & (index[1:] == index[:-1] + 1)
    if bool(np.all(follows | (index == 0))):
        return tokens
    return tokens.sort_values([*KEYS, "index"], kind="stable", ignore_index=True)
