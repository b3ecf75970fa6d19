from __future__ import annotations

import pandas as pd
import pytest

from skote.eval.record import read_run
from skote.eval.summary import summarize
from skote.eval.traffic import padded_share

MS = 1_000_000


def rows(*launches: tuple[int, int, list[int]]) -> pd.DataFrame:
    """Rows of one pass: (replica, admitted_ns, prompt lengths) a launch."""
    return pd.DataFrame(
        [
            {"arm": "candidate", "block": 0, "round": 0, "replica": replica, "admitted_ns": at, "input_tokens": length}
            for replica, at, lengths in launches
            for length in lengths
        ]
    )


def test_padding_is_counted_launch_by_launch():
    # 2 x 30 computed for 40, 3 x 10 for 30: 70 of 90 are prompts'.
    assert padded_share(rows((0, 5, [10, 30]), (1, 5, [10, 10, 10]))) == pytest.approx(20 / 90)
    assert padded_share(rows((0, 5, [10]), (0, 6, [30]))) == 0.0
    assert padded_share(rows((0, None, [10]))) is None  # type: ignore[arg-type]


def test_lag_and_rates_are_over_the_schedule(synthetic):
    run = read_run(synthetic(blocks=2, requests=4, arms={"candidate": "skotergy"}).write())
    assert "traffic" not in summarize(run)
    run.manifest["workload"] |= {"load": "trace", "concurrency": None, "schedule": {}}
    measured = run.requests["phase"] == "measure"
    order = run.requests[measured].groupby("block").cumcount()
    start = run.requests.loc[measured].groupby("block")["dispatched_ns"].transform("min")
    run.requests.loc[measured, "scheduled_ns"] = start + order * 1000 * MS
    run.requests.loc[measured, "dispatched_ns"] = start + order * 1001 * MS  # 0 to 3 ms late
    run.requests.loc[measured, "end_ns"] = run.requests.loc[measured, "dispatched_ns"] + 10 * MS
    figures = summarize(run)["traffic"]["candidate"]
    assert figures["offered_req_s"] == 1.0
    assert figures["sent_req_s"] == pytest.approx(1 / 1.001)
    assert figures["dispatch_lag_ms"] == pytest.approx({"p50": 1.5, "p95": 3.0, "p99": 3.0, "max": 3.0}, abs=0.01)
    assert figures["padded_share"] == 0.0
    assert figures["backlog_share"] == 0.25  # the last of four


def test_a_queue_that_grows_leaves_a_backlog(synthetic, timeline):
    """Requests of 99 ms, one at a time, due every 25 ms: when the last of 8 is, after 175 ms, one was answered."""
    shape = timeline(0, 98, [1])
    run = read_run(synthetic(blocks=1, requests=8, arms={"candidate": "skotergy"}).write(lambda *_: shape))
    run.manifest["workload"] |= {"load": "constant", "concurrency": None, "schedule": {}}
    measured = run.requests["phase"] == "measure"
    start = run.requests.loc[measured, "dispatched_ns"].min()
    run.requests.loc[measured, "scheduled_ns"] = [start + index * 25 * MS for index in range(8)]
    assert summarize(run)["traffic"]["candidate"]["backlog_share"] == 7 / 8
