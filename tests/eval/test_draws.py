"""Whether tokens are draws: sums worked out by hand, a generator that draws, and engines that do not."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest

from skote.eval.draws import Z_LIMIT, Draws, draws, judge_draws, sampled_parity
from skote.types import Request, Sampling

HOT = Sampling(temperature=1.0)
FP32 = 1e-3


def rows(*probabilities):
    return np.log(np.array(probabilities, dtype=np.float32))


def test_surprise_by_hand():
    """q = 1/2, 1/4, 1/4: surprises of 1, 2 and 2 bits, of 1.5 in the mean, with a variance of a quarter."""
    found = draws(rows([0.5, 0.25, 0.25], [0.5, 0.25, 0.25]), (0, 2), HOT, 0.0)

    bit = math.log(2)
    assert (found.tokens, found.outside, found.allowance) == (2, 0, 0.0)
    assert found.excess == pytest.approx((-0.5 + 0.5) * bit, abs=1e-7)
    assert found.variance == pytest.approx(2 * 0.25 * bit**2, rel=1e-6)


def test_logits_are_free_up_to_a_constant_and_divided_by_the_temperature():
    """At temperature 1/2 probabilities are squared: 16, 4 and 4 of 24."""
    hot = draws(rows([16, 4, 4]), (0,), HOT, 0.0)
    cold = draws(rows([4, 2, 2]) + 7, (0,), Sampling(temperature=0.5), 0.0)

    assert cold.excess == pytest.approx(hot.excess, rel=1e-5)
    assert cold.variance == pytest.approx(hot.variance, rel=1e-5)


@pytest.mark.parametrize(
    ("sampling", "left"),
    [
        (Sampling(1.0, top_k=1), 1),
        (Sampling(1.0, top_k=3), 3),
        (Sampling(1.0, top_k=9), 4),
        (Sampling(1.0, top_p=0.49), 1),  # the first reaches it
        (Sampling(1.0, top_p=0.51), 2),
        (Sampling(1.0, top_k=2, top_p=0.62), 1),  # of the two the first has five eighths
        (Sampling(1.0, top_k=2, top_p=0.63), 2),
    ],
)
def test_tokens_outside_of_what_top_k_and_top_p_leave(sampling, left):
    """Of 0.5, 0.3, 0.15 and 0.05 the first `left` may be drawn; far from a border rounding explains nothing."""
    logits = rows([0.5, 0.3, 0.15, 0.05])

    assert [draws(logits, (token,), sampling, 1e-6).outside for token in range(4)] == [0] * left + [1] * (4 - left)
    inside = draws(logits, (0,), sampling, 1e-6)
    kept = np.array([0.5, 0.3, 0.15, 0.05][:left]) / sum([0.5, 0.3, 0.15, 0.05][:left])
    entropy = -(kept * np.log(kept)).sum()
    assert inside.excess == pytest.approx(-math.log(kept[0]) - entropy, abs=1e-6)
    assert inside.variance == pytest.approx((kept * (np.log(kept) + entropy) ** 2).sum(), abs=1e-6)


@pytest.mark.parametrize(("rounding", "outside"), [(0.02, 0), (0.005, 1)])
def test_a_token_that_rounding_puts_inside_is_let_pass(rounding, outside):
    """The second of 1.0 and 0.9 may be first where each logit is off by 0.05: four times 0.02, not four times 0.005."""
    logits = np.array([[1.0, 0.9, -9.0]], dtype=np.float32)

    assert draws(logits, (1,), Sampling(1.0, top_k=1), rounding).outside == outside
    assert draws(logits, (1,), Sampling(1.0, top_p=0.4), rounding).outside == outside
    assert draws(logits, (2,), Sampling(1.0, top_k=1), rounding).outside == 1
    assert draws(logits, (2,), Sampling(1.0, top_p=0.9), rounding).outside == 1


def test_ties_with_the_last_stay():
    assert draws(rows([0.4, 0.2, 0.2, 0.2]), (3,), Sampling(1.0, top_k=2), 0.0).outside == 0
    assert draws(rows([0.4, 0.2, 0.2, 0.2]), (3,), Sampling(1.0, top_p=0.5), 0.0).outside == 0


def test_what_rounding_may_add():
    """Logits off by a tenth of the temperature: a hundredth of the standard deviation, which is half a bit."""
    found = draws(rows([0.5, 0.25, 0.25]), (0,), HOT, 0.1)

    assert found.allowance == pytest.approx(0.01 * 0.5 * math.log(2), rel=1e-6)


def test_the_verdict_by_hand():
    """(40 - 4) nats beyond the allowance, over sqrt(27 + 9) = 6: 6 standard deviations."""
    judged = judge_draws([Draws(30, 0, 25.0, 20.0, 3.0), Draws(10, 0, 15.0, 7.0, 1.0)])

    assert judged == {
        "passed": False, "requests": 2, "tokens": 40, "outside": 0, "excess": 40.0, "variance": 27.0, "allowance": 4.0,
        "z": 6.0, "limit": Z_LIMIT,
    }  # fmt: skip
    assert judge_draws([Draws(30, 0, -40.0, 27.0, 4.0)])["z"] == -6.0
    assert judge_draws([Draws(30, 0, 34.0, 27.0, 4.0)])["passed"]
    assert judge_draws([Draws(30, 0, -3.0, 27.0, 4.0)])["z"] == 0.0
    assert not judge_draws([Draws(30, 1, 0.0, 27.0, 4.0)])["passed"]
    assert judge_draws([])["passed"]


def test_logits_that_are_not_finite_pass_nothing():
    judged = judge_draws([draws(np.array([[0.0, np.nan]], dtype=np.float32), (0,), HOT, FP32)])

    assert (judged["passed"], judged["z"], judged["excess"]) == (False, None, None)
    json.dumps(judged, allow_nan=False)


def sampled(rng, logits, temperature):
    weights = np.exp((logits - logits.max(-1, keepdims=True)) / temperature)
    weights /= weights.sum(-1, keepdims=True)
    return tuple(int(rng.choice(len(row), p=row)) for row in weights)


@pytest.mark.parametrize("temperature", [0.05, 0.3, 1.0, 3.0])
@pytest.mark.parametrize("rounding", [0.0, 0.05])
def test_honest_draws_pass_at_every_temperature_though_logits_are_rounded(temperature, rounding):
    rng = np.random.default_rng(1)
    logits = (3 * rng.normal(size=(600, 80))).astype(np.float32)
    blurred = logits + rounding * rng.normal(size=logits.shape)
    sampling = Sampling(temperature)

    found = draws(logits, sampled(rng, blurred, temperature), sampling, max(rounding, FP32))

    assert judge_draws([found])["passed"]


@pytest.mark.parametrize(
    "drawn",
    [
        lambda rng, logits: (7,) * len(logits),
        lambda rng, logits: tuple(int(token) for token in logits.argmax(-1)),
        lambda rng, logits: sampled(rng, logits, 0.7),
        lambda rng, logits: sampled(rng, np.roll(logits, 1, axis=0), 1.0),  # the right numbers, of another position
    ],
    ids=["a constant", "greedy", "colder", "another prompt"],
)
def test_what_is_no_draw_fails(drawn):
    rng = np.random.default_rng(2)
    logits = (3 * rng.normal(size=(600, 80))).astype(np.float32)

    judged = judge_draws([draws(logits, drawn(rng, logits), HOT, 0.05)])

    assert not judged["passed"]
    assert abs(judged["z"]) > Z_LIMIT


def test_the_entry_of_the_held_out_prompts_is_extended():
    honest, cheat = Draws(30, 0, 1.0, 27.0, 0.0), Draws(30, 0, 60.0, 27.0, 0.0)
    parity = {"mode": "token_equal", "passed": True, "sentence": "Greedy tokens are equal."}

    entry = sampled_parity(parity, {"candidate": [cheat], "baseline": [honest]})

    assert (entry["mode"], entry["passed"]) == ("token_equal", False)
    assert [arm for arm, judged in entry["sampled"].items() if judged["passed"]] == ["baseline"]
    assert entry["sentence"] == (
        "Greedy tokens are equal. The 30 sampled tokens of the candidate are no draws from the model's distribution "
        "(z = 10.0, limit 5). The 30 sampled tokens of the baseline are as surprising as draws from the model's "
        "distribution (z = 0.2, limit 5)."
    )
    assert sampled_parity(parity, {"candidate": [honest]})["passed"]
    assert not sampled_parity(parity | {"passed": False}, {"candidate": [honest]})["passed"]


@pytest.mark.parametrize("sampling", [HOT, Sampling(0.7, top_k=20, top_p=0.9)])
def test_the_real_engine_draws(make_checkpoint, sampling):
    from skote.engines.transformers import TransformersEngine
    from skote.runtime.engine import SkotergyEngine

    options = {"local_dir": str(make_checkpoint()), "device": "cpu", "dtype": "fp32"}
    engine, truth = SkotergyEngine(**options, compile=False), TransformersEngine(**options, score_at_once=True)
    found = []
    for seed in range(8):
        request = Request(f"{seed}", (3, 5 + seed, 9), 24, replace(sampling, seed=seed), ignore_eos=True)
        output = []
        engine.generate([request], lambda row, ids, output=output: output.extend(ids))
        found.append(draws(truth.score(request, output), output, request.sampling, FP32))

    assert judge_draws(found)["passed"]
