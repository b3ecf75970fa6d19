from __future__ import annotations

import numpy as np
import pytest

from skote.eval.derive import Measured
from skote.eval.record import read_run
from skote.eval.report import render_run
from skote.eval.steady import steady_state
from skote.eval.summary import summarize

CLOSED = {"load": "closed", "concurrency": 2}


def test_ramp_and_drain_by_hand(synthetic, timeline):
    """Two at a time, requests of 100, 200, 150, 150, 250 and 100 ms, and 0.5 ms from the last token to the end.

    One slot: request 0 from 0, 2 from 100.5, 4 from 251 to 501.5. The other: 1 from 0, 3 from 200.5, 5 from 351 to
    451.5. Ends in order: 100.5, 200.5 | 251, 351 | 451.5, 501.5: two requests end in the 150.5 ms from 200.5 to 351.
    """
    e2el = [100, 200, 150, 150, 250, 100]
    run = read_run(
        synthetic(blocks=1, requests=6, tokens=2, concurrency=2, arms={"candidate": "baseline"}).write(
            lambda arm, block, request: timeline(0, e2el[request] - 50, [50])
        )
    )
    measured = Measured(run)
    ends = np.sort(measured.requests["end_ns"] - measured.requests["dispatched_ns"].min()) / 1e6
    steady = steady_state(measured, CLOSED)["candidate"]

    assert ends.tolist() == [100.5, 200.5, 251, 351, 451.5, 501.5]
    assert sorted(steady.latencies["e2el_ms"].values.tolist()) == [150, 150]  # 0, 1 came first, and 4, 5 last
    assert steady.requests == 2
    assert steady.output_tok_s == pytest.approx(2 * 2 / 0.1505)
    assert steady.block_output_tok_s == {0: pytest.approx(2 * 2 / 0.1505)}


def test_an_even_load_has_the_rate_of_its_slots(synthetic, timeline):
    """Four slots, each with a request of 16 tokens in some 103.5 ms."""
    directory = synthetic(blocks=5, concurrency=4, requests=40).write(
        lambda arm, block, request: timeline(0, 40 + request % 7, [4] * 15)
    )
    metrics = summarize(read_run(directory))
    steady = metrics["steady"]

    mean_slot_s = np.mean([40 + request % 7 + 60 + 0.5 for request in range(40)]) / 1000
    assert steady["arms"]["candidate"]["throughput"]["output_tok_s"] == pytest.approx(4 * 16 / mean_slot_s, rel=0.02)
    assert steady["arms"]["candidate"]["requests"] == 5 * (40 - 8)
    assert steady["deltas"]["e2el_ms"]["p50"]["delta_pct"] == 0
    assert steady["deltas"]["output_tok_s"]["verdict"] == "SAME"
    roles = {delta["role"] for name in ("e2el_ms", "ttft_ms", "tpot_ms") for delta in steady["deltas"][name].values()}
    assert roles == {"secondary"}


def test_passes_too_short_to_be_steady_have_no_figures(synthetic):
    metrics = summarize(read_run(synthetic(concurrency=6).write()))["steady"]

    assert metrics["arms"]["candidate"]["requests"] == 0
    assert metrics["arms"]["candidate"]["metrics"]["e2el_ms"]["p50"]["value"] is None
    assert metrics["arms"]["candidate"]["throughput"]["output_tok_s"] is None
    assert metrics["deltas"]["e2el_ms"]["p50"]["reason"] == "too_few_blocks"


def test_failed_requests_hold_their_slot_and_have_no_latency(synthetic, timeline):
    directory = synthetic(blocks=1, concurrency=2, requests=6, arms={"candidate": "baseline"}).write(
        lambda arm, block, request: timeline(0, 100, [10] * 15, ok=request != 3)
    )
    steady = steady_state(Measured(read_run(directory)), CLOSED)["candidate"]

    assert steady.requests == 1
    assert steady.latencies["e2el_ms"].values.tolist() == [250]


@pytest.mark.parametrize("workload", [{"load": "burst", "concurrency": 12}, {"load": "closed", "concurrency": 1}])
def test_a_burst_and_a_single_stream_have_none(synthetic, workload):
    assert steady_state(Measured(read_run(synthetic().write())), workload) is None


def test_the_report_shows_it_beside_the_whole_run(synthetic):
    page = render_run(synthetic(concurrency=3).write())[0].read_text(encoding="utf-8")
    alone = render_run(synthetic().write())[0].read_text(encoding="utf-8")

    assert "Steady state: of every pass the 3 requests that came first and the 3 that came last" in page
    assert "one request at a time: nothing ramps or drains" in alone
