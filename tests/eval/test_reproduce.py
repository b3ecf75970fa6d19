from __future__ import annotations

import dataclasses
import math

import pytest

from skote.eval.record import read_run
from skote.eval.reproduce import compare_runs


@pytest.fixture
def build(synthetic, tmp_path):
    """`build("a", change, timeline, blocks=5)` is a run of its own folder; `change` may edit the manifest."""

    def read(name, change=None, timeline=None, **options):
        builder = synthetic(**({"requests": 4, "blocks": 5} | options))
        builder.directory = tmp_path / name
        run = read_run(builder.write(timeline))
        if change:
            change(run.manifest)
        return run

    return read


def outcomes(run, against):
    return {check.name: check.outcome for check in compare_runs(run, against)}


def test_a_run_reproduces_itself(build):
    run = build("a")
    assert outcomes(run, build("b")) == dict.fromkeys(("workload", "weights", "outputs", "ratio"), "passed")


def test_other_requests_and_other_weights(build):
    other = build("b", lambda m: (m["workload"].update(sha256="00" * 32), m["model"].update(weights_sha256=None)))
    found = outcomes(other, build("a"))
    assert (found["workload"], found["weights"]) == ("failed", "failed")


def test_without_weights_there_is_nothing_to_compare(build):
    def forget(manifest):
        manifest["model"]["weights_sha256"] = None

    assert outcomes(build("a", forget), build("b", forget))["weights"] == "skipped"


def test_one_other_token_in_one_output(build):
    run, against = build("a"), build("b")
    rows = run.requests.copy()
    row = rows.index[(rows.phase == "measure") & (rows.arm == "candidate") & (rows.request_id == "chat-02")][-1]
    rows.loc[row, "output_sha256"] = "00" * 32
    (check,) = (c for c in compare_runs(dataclasses.replace(run, requests=rows), against) if c.name == "outputs")

    assert check.outcome == "failed"
    assert "candidate chat-02" in check.sentence


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda m: m["machine"].update(cpu="Xeon"), "hardware"),
        (lambda m: m["machine"]["packages"].update(torch="3.0"), "torch"),
        (lambda m: m.update(dtype="bf16"), "dtype"),
    ],
)
def test_outputs_are_compared_under_equal_conditions_only(build, change, named):
    (check,) = (c for c in compare_runs(build("a", change), build("b")) if c.name == "outputs")
    assert check.outcome == "skipped"
    assert check.sentence.endswith(f"these differ: {named}.")


def test_the_name_of_the_machine_and_the_reader_of_parquet_are_no_condition(build):
    def change(manifest):
        manifest["machine"]["host"] = "elsewhere"
        manifest["machine"]["packages"]["pandas"] = "9"

    assert outcomes(build("a", change), build("b"))["outputs"] == "passed"


def test_intervals_that_do_not_overlap(build, timeline):
    def steady(factor):
        return lambda arm, block, request: timeline(
            0.2, 100.0 + block, [(10.0 * factor if arm == "candidate" else 10.0) + 0.01 * block] * 15
        )

    slow, fast = build("a", timeline=steady(1.0)), build("b", timeline=steady(0.5))
    assert outcomes(slow, fast)["ratio"] == "failed"


def test_too_few_blocks_and_one_arm(build):
    assert outcomes(build("a", blocks=3), build("b", blocks=3))["ratio"] == "inconclusive"
    alone = {"arms": {"candidate": "skotergy"}}
    assert outcomes(build("c", **alone), build("d", **alone))["ratio"] == "skipped"


@pytest.mark.parametrize(
    ("spread", "outcome", "said"),
    [
        (0.04, "passed", "by more than 8.2 % would have shown."),
        (0.05, "inconclusive", "But only a change of the ratio by more than 10.3 % would have shown, and 10 % is "),
    ],
)
def test_wide_intervals_that_overlap_show_nothing(build, timeline, spread, outcome, said):
    """Log ratios of -a, -a/2, 0, a/2, a: s = a sqrt(2.5 / 4), half width t(4) s / sqrt(5) = 0.98162 a, in both runs.

    exp(2 x 0.98162 x 0.04) - 1 = 8.17 %, and 10.31 % with 0.05.
    """

    def choose(arm, block, request):
        total = 1000 * math.exp(spread * (block - 2) / 2 if arm == "candidate" else 0.0)
        return timeline(0.2, total / 16, [total / 16] * 15)

    checks = compare_runs(build("a", timeline=choose), build("b", timeline=choose))
    (check,) = (check for check in checks if check.name == "ratio")
    assert check.outcome == outcome
    assert said in check.sentence


def test_wide_intervals_that_do_not_overlap_fail(build, timeline):
    def wide(factor):
        def choose(arm, block, request):
            total = 1000 * math.exp(0.1 * (block - 2)) * factor if arm == "candidate" else 1000
            return timeline(0.2, total / 16, [total / 16] * 15)

        return choose

    assert outcomes(build("a", timeline=wide(1.0)), build("b", timeline=wide(0.4)))["ratio"] == "failed"
