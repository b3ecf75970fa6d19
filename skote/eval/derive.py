"""Derived metrics: from raw rows to milliseconds a request, gaps between chunks, and tokens a second.

Only the rows of the measured phase count. A request that failed has no latency; it counts as +inf in the `adj_`
percentiles, and its tokens are not finished work.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
import pandas as pd

from skote.eval.record import Run
from skote.eval.stats import Floats

Ints = np.ndarray[tuple[int], np.dtype[np.int64 | np.int32]]
Flags = np.ndarray[tuple[int], np.dtype[np.bool_]]

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
    blocks: Ints

    def by_block(self) -> dict[int, Floats]:
        """The values of each block."""
        values, blocks = self.values, self.blocks
        if (blocks[1:] < blocks[:-1]).any():  # a run's rows are in order as they were written
            order = np.argsort(blocks, kind="stable")
            values, blocks = values[order], blocks[order]
        starts = np.flatnonzero(np.diff(blocks, prepend=blocks[:1] - 1))
        return {int(blocks[start]): part for start, part in zip(starts, np.split(values, starts[1:]), strict=False)}


class Measured:
    """The measured phase of a run.

    `requests` has a row a request: the columns of the record and one a request metric, NaN where it is undefined.
    `gaps` has a row a chunk after the first of its request, finished requests only: `request` (its row in `requests`),
    `position` (tokens of the request before this chunk), `n_tokens`, `gap_ms`; the rows of a request lie together.
    `telemetry` has the rows of telemetry.parquet, none where the run was not sampled.
    """

    def __init__(self, run: Run) -> None:
        self.telemetry = run.telemetry
        requests = measured_rows(run.requests)
        self.gaps = _chunk_gaps(in_request_order(measured_rows(run.tokens)), requests)
        self.requests = _with_metrics(requests, self.gaps)

    @cached_property
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

    @cached_property
    def finished_by_all(self) -> Flags:
        """Which of the `requests` every arm finished: `[n]`."""
        ok = (self.requests["status"] == "ok").to_numpy(dtype=bool)
        keys = pd.MultiIndex.from_frame(self.requests[["block", "request_id"]].astype({"request_id": object}))
        for arm in self.arms:
            ok = ok & keys.isin(keys[ok & (self.requests["arm"] == arm).to_numpy(dtype=bool)])
        return ok

    @cached_property
    def pairs_survivors(self) -> bool:
        """Whether differences of latencies are over `finished_by_all`: where a request of two arms failed.

        Each arm's own survivors would be different requests: an arm that breaks at the long ones would look fast.
        """
        return len(self.arms) > 1 and bool((self.requests["status"] != "ok").any())

    def samples(self, arm: str, metric: Metric, *, compared: bool = False) -> Samples:
        """The finite samples of `metric` in `arm`; with `compared` those that differences are over."""
        paired = compared and self.pairs_survivors
        if metric.per == "request":
            chosen = (self.requests["arm"] == arm) & self.requests[metric.name].notna()
            rows = self.requests[chosen & self.finished_by_all if paired else chosen]
            return Samples(rows[metric.name].to_numpy(dtype=np.float64), rows["block"].to_numpy(dtype=np.int64))
        mine = self.of_arm(arm)
        if paired:
            mine = mine & self.finished_by_all[self.gaps["request"].to_numpy()]
        counts, values = (self.gaps[name].to_numpy()[mine] for name in ("n_tokens", "gap_ms"))
        blocks = self.requests["block"].to_numpy(dtype=np.int64)[self.gaps["request"].to_numpy()[mine]]
        if metric.per == "chunk" or bool(np.all(counts == 1)):
            return Samples(values, blocks)
        return Samples(np.repeat(values / counts, counts), np.repeat(blocks, counts))

    def of_arm(self, arm: str) -> Flags:
        """Which of the `gaps` are those of `arm`: `[n]`."""
        mine: Flags = (self.requests["arm"] == arm).to_numpy(dtype=bool)[self.gaps["request"].to_numpy()]
        return mine

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
    worst = np.full(len(requests), np.nan)
    request = gaps["request"].to_numpy()
    starts = np.flatnonzero(np.diff(request, prepend=-1))
    if starts.size:
        worst[request[starts]] = np.maximum.reduceat(gaps["gap_ms"].to_numpy(dtype=np.float64), starts)
    return derived.assign(itl_max_ms=worst)


def _chunk_gaps(tokens: pd.DataFrame, requests: pd.DataFrame) -> pd.DataFrame:
    """`Measured.gaps`. Narrow columns and short-lived arrays are for runs of many millions of tokens."""
    first = tokens["index"].to_numpy() == 0
    rows = requests[[*KEYS, "status"]].assign(request=np.arange(len(requests), dtype=np.int32))
    starts = tokens.loc[first, KEYS].astype({"arm": object, "request_id": object})
    rows = starts.merge(rows.astype({"arm": object, "request_id": object}), on=KEYS, how="left")
    finished = (rows["status"] == "ok").to_numpy(dtype=bool)
    order = np.cumsum(first, dtype=np.int32) - 1  # which of the requests in `tokens` a chunk belongs to
    keep = ~first & finished[order]
    counts, stamps = tokens["n_tokens"].to_numpy(), tokens["t_ns"].to_numpy()
    columns = {"gap_ms": (stamps[1:] - stamps[:-1])[keep[1:]] / 1e6}
    columns["position"] = _tokens_before(counts, first, order)[keep]
    columns["request"] = rows["request"].fillna(-1).to_numpy(dtype=np.int32)[order[keep]]
    columns["n_tokens"] = counts[keep]
    return pd.DataFrame(columns, copy=False)


def _tokens_before(counts: Ints, first: Flags, order: Ints) -> Ints:
    """How many tokens of its request came before each chunk: `[n]`."""
    narrow = int(counts.sum()) < 2**31
    before: Ints = np.cumsum(counts, dtype=np.int32 if narrow else np.int64)
    before -= counts
    before -= before[first][order]
    return before


def _rates(passes: pd.DataFrame) -> dict[str, float]:
    seconds = float(passes["window_s"].sum())
    if seconds <= 0:
        return {}
    output, total = float(passes["output_tokens"].sum()), float(passes["input_tokens"].sum())
    rates = (output / seconds, (total + output) / seconds, float(passes["requests"].sum()) / seconds)
    return dict(zip(THROUGHPUTS, rates, strict=True))


def measured_rows(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows of the measured phase: a view where they lie together, as they do but for damaged files."""
    measured = (rows["phase"] == "measure").to_numpy(dtype=bool)
    first, count = int(measured.argmax()) if len(rows) else 0, int(measured.sum())
    together = bool(measured[first : first + count].all())
    return (rows.iloc[first : first + count] if together else rows[measured]).reset_index(drop=True)


def in_request_order(tokens: pd.DataFrame) -> pd.DataFrame:
    """Rows with each request's chunks together and in order: as the writer leaves them, so a check comes first."""
    index = tokens["index"].to_numpy()
    follows = (index[1:] == index[:-1] + 1) & ~request_starts(tokens)[1:]
    if bool(np.all(follows | (index[1:] == 0))) and not index[:1].any():
        return tokens
    return tokens.sort_values([*KEYS, "index"], kind="stable", ignore_index=True)


def request_starts(tokens: pd.DataFrame) -> Flags:
    """Which rows are of another request than the row before: `[n]`."""
    starts = np.zeros(len(tokens), dtype=np.bool_)
    starts[:1] = True
    for key in KEYS:
        codes = _codes(tokens[key])
        starts[1:] |= codes[1:] != codes[:-1]
    return starts


def _codes(column: pd.Series[Any]) -> np.ndarray[tuple[int], np.dtype[Any]]:
    """A number a row, equal where the values are."""
    if isinstance(column.dtype, pd.CategoricalDtype):
        return column.cat.codes.to_numpy()
    return column.to_numpy() if column.dtype.kind == "i" else pd.factorize(column)[0]
