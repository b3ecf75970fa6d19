"""Parity: what counts as the same model, worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from skote.eval.parity import (
    NEAR_TIE_LOGITS,
    are_choices,
    find_divergences,
    forced_errors,
    forced_parity,
    token_gaps,
    token_parity,
)


def test_equal_outputs_have_no_divergence():
    outputs = {"a": (1, 2, 3), "b": (4,)}

    entry = token_parity(2, find_divergences(outputs, dict(outputs), lambda *_: pytest.fail("not asked")))

    assert (entry["passed"], entry["equal"], entry["compared"]) == (True, 2, 2)
    assert entry["sentence"] == "Greedy tokens are equal on 2 of 2 requests."


def test_a_near_tie_is_named_and_let_pass():
    """From the first differing token on, the largest gap counts: the one before it is nobody's choice."""
    asked = []

    def gaps(request_id, ids):
        asked.append((request_id, ids))
        return [5.0, NEAR_TIE_LOGITS / 2, 0.0]

    found = find_divergences({"a": (1, 9, 3)}, {"a": (1, 2, 3)}, gaps)
    entry = token_parity(4, found)

    assert asked == [("a", (1, 9, 3))]
    assert (entry["passed"], entry["near_ties"], entry["equal"]) == (True, 1, 3)
    assert entry["divergences"] == [
        {
            "request_id": "a",
            "position": 1,
            "gap": NEAR_TIE_LOGITS / 2,
            "candidate_token": 9,
            "baseline_token": 2,
            "near_tie": True,
        }
    ]


def test_after_a_near_tie_the_tokens_must_still_be_the_models_choice():
    found = find_divergences({"a": (9, 7)}, {"a": (1, 2)}, lambda *_: [NEAR_TIE_LOGITS / 2, 4.0])

    assert not token_parity(1, found)["passed"]


def test_a_real_difference_fails_and_says_where():
    found = find_divergences({"a": (1, 2, 9)}, {"a": (1, 2, 3)}, lambda *_: [0.0, 0.0, 0.25])
    entry = token_parity(1, found)

    assert not entry["passed"]
    assert "request a, token 2" in entry["sentence"]
    assert "0.25 logits" in entry["sentence"]


@pytest.mark.parametrize("candidate", [(1, 2), (), (1, 2, 3, 4)])
def test_an_output_of_another_length_is_no_near_tie(candidate):
    found = find_divergences({"a": candidate}, {"a": (1, 2, 3)}, lambda *_: pytest.fail("no token differs"))

    assert [divergence.gap for divergence in found] == [None]
    assert not token_parity(1, found)["passed"]


def test_requests_that_only_one_arm_finished_are_not_compared():
    assert find_divergences({"a": (1,)}, {"a": (1,), "b": (2,)}, lambda *_: pytest.fail("not asked")) == []


def test_token_gaps():
    best, chosen = np.array([3.0, 2.0, np.nan], dtype=np.float32), np.array([0.5, 2.0, 1.0], dtype=np.float32)

    assert token_gaps(chosen, best).tolist() == [2.5, 0.0, np.inf]


def test_forced_errors_by_hand():
    """Two tokens. The reference gives 1/2 each; the candidate 1/4 and 3/4; the baseline is the reference."""
    reference = np.log(np.array([[0.5, 0.5]], dtype=np.float32))
    candidate = np.log(np.array([[0.25, 0.75]], dtype=np.float32)) + 7.0  # logits are free up to a constant

    errors = forced_errors(candidate, reference, reference, (0,))

    assert errors.candidate_kl == pytest.approx(0.5 * math.log(2) + 0.5 * math.log(2 / 3), abs=1e-6)
    assert errors.candidate_nll == pytest.approx(math.log(2), abs=1e-6)
    assert (errors.baseline_kl, errors.baseline_nll) == (0.0, 0.0)
    assert (errors.agreeing, errors.positions) == (0, 1)  # argmax of a tie is the first, the candidate's the second


@pytest.mark.parametrize(
    ("best", "second", "dtype", "allowed"),
    [
        (8.0, 7.9995, "fp32", True),
        (8.0, 7.998, "fp32", False),
        (8.0, 7.9, "bf16", True),  # two roundings of 8 are 0.125
        (8.0, 7.8, "bf16", False),
        (8.0, 7.99, "fp16", True),  # two roundings of 8 are 0.0156
        (8.0, 7.98, "fp16", False),
        (math.nan, 1.0, "bf16", False),
    ],
)
def test_what_a_greedy_reader_may_choose(best, second, dtype, allowed):
    assert are_choices(np.array([second], np.float32), np.array([best], np.float32), dtype) is allowed


@pytest.mark.parametrize(("second", "allowed"), [(7.65, True), (7.55, False)])
def test_a_choice_may_trail_by_twice_the_rows_own_error_where_the_truth_is_known(second, allowed):
    chosen, best, errors = (np.array([each], dtype=np.float32) for each in (second, 8.0, 0.2))

    assert not are_choices(chosen, best, "bf16")
    assert are_choices(chosen, best, "bf16", errors) is allowed


def _noisy(scale, requests=40, positions=8, vocab=50):
    rng = np.random.default_rng(0)
    found = []
    for _ in range(requests):
        reference = rng.normal(0, 2, (positions, vocab)).astype(np.float32)
        baseline = reference + rng.normal(0, 0.02, reference.shape).astype(np.float32)
        candidate = reference + rng.normal(0, 0.02 * scale, reference.shape).astype(np.float32)
        found.append(forced_errors(candidate, baseline, reference, tuple(range(positions))))
    return found


@pytest.mark.parametrize(("scale", "passed"), [(0.5, True), (0.9, True), (1.2, False), (5.0, False)])
def test_a_candidate_passes_where_its_error_is_no_larger(scale, passed):
    entry = forced_parity(_noisy(scale), equal=0, inconsistent=[], checked=9, seed=0)

    assert entry["passed"] is passed
    assert entry["kl_ratio"]["value"] == pytest.approx(scale**2, rel=0.15)
    assert entry["kl_ratio"]["upper"] >= entry["kl_ratio"]["value"]


def test_errors_of_fp32_rounding_are_none():
    """Both arms equal the reference: the ratio of two zeros is 1, not a failure."""
    entry = forced_parity(_noisy(0.0)[:1], equal=1, inconsistent=[], checked=9, seed=0)
    logits = np.zeros((3, 4), dtype=np.float32)
    errors = [forced_errors(logits, logits, logits, (0, 1, 2))]
    same = forced_parity(errors, equal=1, inconsistent=[], checked=9, seed=0)

    assert entry["passed"]
    assert same["passed"]
    assert same["kl_ratio"] == {"value": 1.0, "upper": 1.0}


def test_too_few_tokens_are_named_as_what_they_are():
    """Four requests of two tokens: the errors are smaller than the baseline's, and the bound does not show it."""
    entry = forced_parity(_noisy(0.9, requests=4, positions=2), equal=0, inconsistent=[], checked=9, seed=0)
    hopeless = forced_parity(_noisy(5.0), equal=0, inconsistent=[], checked=9, seed=0)

    assert not entry["passed"]
    assert entry["kl_ratio"]["value"] < 1.0 < 1.05 < entry["kl_ratio"]["upper"]
    assert "these are too few tokens to show it: give more." in entry["sentence"]
    assert "too few" not in hopeless["sentence"]


def test_an_output_that_the_arms_own_logits_do_not_choose_fails():
    inconsistent = ["candidate b00-r01", "candidate b00-r02"]
    entry = forced_parity(_noisy(0.5), equal=0, inconsistent=inconsistent, checked=9, seed=0)

    assert not entry["passed"]
    assert entry["sentence"].endswith("2 output(s) are not what the arm's own logits choose, first candidate b00-r01.")


def test_logits_that_are_not_finite_fail_without_a_ratio():
    bad = np.zeros((2, 4), dtype=np.float32)
    bad[1, 2] = np.nan
    good = np.zeros((2, 4), dtype=np.float32)

    entry = forced_parity([forced_errors(bad, good, good, (0, 1))], equal=0, inconsistent=[], checked=9, seed=0)

    assert not entry["passed"]
    assert entry["kl_ratio"] == {"value": None, "upper": None}
    assert "not finite" in entry["sentence"]


def test_likelihoods_that_differ_by_the_rounding_of_fp32_do_not_decide():
    """Logits off by 1e-5 in the candidate, by half of that in the baseline: neither is an error."""
    reference = np.zeros((8, 4), dtype=np.float32)
    candidate, baseline = reference.copy(), reference.copy()
    candidate[:, 0] += 1e-5
    baseline[:, 0] += 0.5e-5

    errors = [forced_errors(candidate, baseline, reference, (0,) * 8)]
    entry = forced_parity(errors, equal=1, inconsistent=[], checked=9, seed=0)

    assert entry["passed"]
    assert 1.0 < entry["nll_ratio"]["value"] < 1.05
