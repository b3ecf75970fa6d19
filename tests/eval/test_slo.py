from __future__ import annotations

import pytest
from scipy.stats import binomtest

from skote.eval.derive import Measured
from skote.eval.page import report_html
from skote.eval.record import read_run
from skote.eval.slo import SloConfig, Watch, check_slo, wilson
from skote.eval.summary import summarize
from skote.types import Chunk, Completion, UsageError

# Ten requests a block, in ms after dispatch: first token, the gap to the second; 0 fails, 1 has one token alone.
SHAPES = [(10, 5), (10, 5), (10, 5), (50, 5), (10, 20), (50, 20), None, (10, None), (30, 5), (10, 5)]


@pytest.fixture
def run(synthetic, timeline):
    def shape(arm, block, request):
        if block < 0 or SHAPES[request] is not None:
            first, gap = SHAPES[max(request, 0)] or (10, 5)
            return timeline(1, first, [] if gap is None else [gap] * 3)
        return timeline(1, 10, [5], ok=False)

    return read_run(synthetic(blocks=2, requests=10, tokens=4, arms={"candidate": "skotergy"}).write(shape))


def attained(run, **limits):
    run.manifest["config"]["slo"] = vars(SloConfig(**limits))
    return summarize(run)["slo"]["arms"]["candidate"]


def test_every_scheduled_request_counts_and_a_failed_one_keeps_nothing(run):
    figures = attained(run, ttft_ms=30.0, tpot_ms=10.0)
    # Late: two first tokens at 50 ms; slow: two of 20 ms a token (one of them late as well); one failed.
    assert (figures["scheduled"], figures["met"]) == (20, 12)
    assert figures["attainment"] == 0.6
    assert figures["by_limit"] == {"ttft_ms": 0.7, "tpot_ms": 0.7}
    assert figures["by_block"] == [0.6, 0.6]
    assert figures["attained"] is False
    assert attained(run, ttft_ms=30.0, attainment=0.7)["attained"] is True


def test_a_single_token_has_no_pace_to_keep(run):
    assert attained(run, tpot_ms=0.001)["met"] == 2


def test_the_limit_itself_is_kept_and_end_to_end_has_one_too(run):
    assert attained(run, e2el_ms=25.0)["by_limit"] == {"e2el_ms": 0.5}  # 10 + 3 x 5, and the one of one token


def test_goodput_is_what_was_kept_in_the_arms_windows(run):
    figures = attained(run, ttft_ms=30.0)
    seconds = float(Measured(run).passes["window_s"].sum())
    assert figures["goodput_req_s"] == pytest.approx(14 / seconds)


def test_time_that_the_client_lost_counts(run):
    measured = run.requests["phase"] == "measure"
    run.requests.loc[measured, "scheduled_ns"] -= 21_000_000
    assert attained(run, ttft_ms=30.0)["met"] == 0


def test_runs_without_limits_have_no_section(run):
    assert "slo" not in summarize(run)
    run.manifest["config"]["slo"] = vars(SloConfig())
    assert "slo" not in summarize(run)


def test_the_page_says_what_was_asked_and_kept(run):
    run.manifest["config"]["slo"] = vars(SloConfig(ttft_ms=30.0, tpot_ms=10.0))
    page = report_html(run.manifest, summarize(run), Measured(run))
    assert "Requests within TTFT 30.00 ms, TPOT 10.00 ms, of all that were scheduled" in page
    assert "12 of 20" in page
    assert "missed" in page


@pytest.mark.parametrize(("successes", "trials"), [(0, 12), (12, 12), (7, 9), (360, 400)])
def test_wilson_is_scipys(successes, trials):
    expected = binomtest(successes, trials).proportion_ci(method="wilson")
    assert wilson(successes, trials) == pytest.approx((expected.low, expected.high))


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"ttft_ms": 0.0}, r"slo\.ttft_ms must be above 0"),
        ({"tpot_ms": -1.0}, r"slo\.tpot_ms must be above 0"),
        ({"attainment": 0.0}, r"slo\.attainment must lie in \(0, 1\]"),
        ({"attainment": 1.5}, r"slo\.attainment must lie in \(0, 1\]"),
    ],
)
def test_a_wrong_limit_is_named(options, sentence):
    with pytest.raises(UsageError, match=sentence):
        check_slo(SloConfig(**options))


def test_the_watch_and_the_figures_agree(run):
    """What is counted while a run goes on is what its rows say: 8 of 20 miss."""
    config = SloConfig(ttft_ms=30.0, tpot_ms=10.0, attainment=0.9, stop=True)
    watch = Watch(config, 20)
    tokens = run.tokens[run.tokens["phase"] == "measure"].groupby(["block", "request_id"], observed=True)
    states = []
    for row in run.requests[run.requests["phase"] == "measure"].itertuples():
        rows = tokens.get_group((row.block, row.request_id)) if row.output_tokens else run.tokens.iloc[:0]
        chunks = tuple(Chunk(int(t_ns), int(n)) for t_ns, n in rows[["t_ns", "n_tokens"]].to_numpy())
        watch.note(
            int(row.scheduled_ns),
            Completion(
                row.request_id, 1, (0,) * int(row.output_tokens), chunks, 0, 0, 0, row.status,
            ),
        )  # fmt: skip
        states.append(watch.is_hopeless)
    missed = 20 - attained(run, ttft_ms=30.0, tpot_ms=10.0)["met"]
    assert watch._missed == missed == 8
    # With 6 of 20 missed the interval reaches to 85.5 %, with 5 to 88.8 %, with 4 to 91.9 %.
    assert states.index(True) == 13


def test_nothing_is_hopeless_unless_it_was_asked():
    watch = Watch(SloConfig(ttft_ms=1.0), 2)
    for _ in range(2):
        watch.note(0, Completion("a", 1, (), (), 0, None, 0, "error"))
    assert not watch.is_hopeless
