"""What is judged of a server's outputs: likely choices under a reference, texts, or nothing, which is said."""

from __future__ import annotations

import json
from concurrent.futures import Future
from contextlib import nullcontext

import numpy as np
import pytest

from skote.eval.check import judge_checks
from skote.eval.gate import ParityGate
from skote.eval.served_parity import are_likely_choices, text_parity
from skote.runtime.choices import choices
from skote.types import UNKNOWN_ID, Completion, Request, Sampling

REQUESTS = [Request("a", (1, 2), 3), Request("b", (3,), 3)]
TRUTH = np.array([[9.0, 0.0], [1.0, 1.6], [3.0, 0.0]], dtype=np.float32)
OWN = np.array([[9.1, 0.1], [1.1, 1.5], [3.1, 0.1]], dtype=np.float32)  # off by 0.1


class Arm:
    """Answers with `outputs` and `texts`, and scores with `logits`, or not at all."""

    def __init__(self, name, outputs, logits=None, texts=None):
        self.name, self.outputs, self.logits, self.texts = name, outputs, logits, texts
        self.dispatcher, self.replicas = self, [self]

    def salted(self, requests):
        return requests

    def dispatch(self, request):
        ids = self.outputs[request.request_id]
        return _done(Completion(request.request_id, len(request.input_ids), ids, (), 0, 0, 0, "ok"))

    def call(self, method, request=None, forced=()):
        if method == "describe":
            return _done({"scores": self.logits is not None})
        if method == "answer":
            return _done(self.texts[request.request_id])
        logits = self.logits[: len(forced)]
        return _done(logits if method == "score" else choices(logits, forced))


def _done(value):
    future = Future()
    future.set_result(value)
    return future


def judged(candidate, baseline, dtype="bf16", decode=None, requests=REQUESTS):
    reference = Arm("reference", {}, TRUTH)
    gate = ParityGate(
        candidate, baseline, dtype=dtype, reference=lambda: nullcontext(reference), eos_ids=(), vocab=2, seed=0,
        decode=decode,
    )  # fmt: skip
    return gate.probe(requests)


def engine(ids=(0, 1, 0)):
    return Arm("candidate", {"a": ids, "b": ids}, OWN)


def server(ids=(0, 1, 0), texts=None):
    return Arm("baseline", {"a": (0, 1, 0), "b": ids}, texts=texts)


def test_a_token_may_trail_by_two_errors_of_three_times_the_engines():
    """Off by 0.1, the engine allows 2 x 3 x 0.1 = 0.6 logits: the second token trails by 0.6, or a little less."""
    near, far = TRUTH.copy(), TRUTH.copy()
    near[1, 1], far[1, 1] = 1.55, 1.75
    assert are_likely_choices(near, near + 0.1, (0, 0, 0), "fp16")
    assert not are_likely_choices(far, far + 0.1, (0, 0, 0), "fp16")
    assert not are_likely_choices(near, near + 0.1, (1, 1, 0), "fp16")
    assert not are_likely_choices(near, near * np.nan, (0, 1, 0), "fp16")


@pytest.mark.parametrize(
    ("ids", "passed", "equal"),
    [((0, 1, 0), True, 2), ((0, 0, 0), True, 1), ((1, 1, 0), False, 1), ((0, 1), False, 1)],
    ids=["equal", "a likely choice", "no choice", "ends early"],
)
def test_a_server_that_tells_ids_is_judged_by_the_reference(ids, passed, equal):
    entry = judged(engine(), server(ids))
    assert (entry["mode"], entry["passed"], entry["compared"], entry["equal"]) == (
        "reference_choices",
        passed,
        2,
        equal,
    )
    assert (entry["checked"], entry["kl_ratio"]) == (2, None)
    if not passed:
        assert entry["sentence"] == "1 output(s) are not what their arm would choose, first baseline b."


def test_the_engine_beside_a_server_is_still_held_to_its_own_logits():
    entry = judged(engine((1, 1, 0)), server())
    assert entry["sentence"] == "2 output(s) are not what their arm would choose, first candidate a."


def test_a_server_as_the_candidate_is_judged_alike():
    served = Arm("candidate", {"a": (0, 1, 0), "b": (1, 1, 0)})
    entry = judged(served, Arm("baseline", {"a": (0, 1, 0), "b": (0, 1, 0)}, OWN))
    assert (entry["passed"], entry["sentence"][-12:]) == (False, "candidate b.")


def test_a_library_beside_a_server_may_be_off_its_own_logits_by_twice_its_error():
    """Its second token trails the best by 0.4; it is 0.1 off the reference, or 0.25."""
    served = Arm("candidate", {"a": (0, 1, 0), "b": (0, 1, 0)})
    for off, passed in ((0.1, False), (0.25, True)):
        baseline = Arm(
            "baseline", {"a": (0, 1, 0), "b": (0, 0, 0)}, TRUTH + np.float32([[off, off], [off, off - 0.2], [off, off]])
        )
        entry = judged(served, baseline)
        assert (entry["passed"], entry["checked"]) == (passed, 2)


def test_two_servers_are_not_judged_but_in_fp32():
    entry = judged(Arm("candidate", {"a": (0, 1, 0), "b": (0, 1, 0)}), server())
    assert (entry["mode"], entry["passed"], entry["compared"]) == ("not_judged", None, 0)
    assert entry["sentence"] == (
        "The arms' outputs were not judged: neither hands over logits, by which arms in bf16 are compared."
    )


BLIND = (UNKNOWN_ID,) * 3


def words(ids):
    return " ".join("xy"[token] for token in ids)


def test_a_server_without_ids_is_judged_by_its_texts_in_fp32():
    entry = judged(engine(), server(BLIND, {"a": "x y x", "b": " x y x\n"}), "fp32", words)
    assert (entry["mode"], entry["passed"], entry["equal"], entry["compared"]) == ("text_equal", True, 2, 2)
    entry = judged(engine(), server(BLIND, {"a": "x y x", "b": "x x x"}), "fp32", words)
    assert (entry["passed"], entry["equal"]) == (False, 1)
    assert entry["sentence"] == (
        "An arm tells no ids; the texts of greedy answers are equal on 1 of 2 requests. First difference: request b, "
        "character 2, 'y x' and 'x x'."
    )


@pytest.mark.parametrize(
    ("dtype", "decode", "why"),
    [
        ("bf16", words, "the baseline tells no ids, and in bf16 texts may differ."),
        ("fp32", None, "the baseline tells no ids, and the model has no tokenizer."),
    ],
)
def test_a_server_without_ids_that_cannot_be_judged(dtype, decode, why):
    entry = judged(engine(), server(BLIND, {}), dtype, decode)
    assert (entry["passed"], entry["sentence"]) == (None, f"The arms' outputs were not judged: {why}")
    metrics = {"parity": entry, "exit_code": 0, "status": "complete", "arms": {}, "deltas": {}}
    names = ("error_rate_max", "p50_delta_max", "ratio_to_baseline_max", "tok_s_min")
    config = {"check": {"name": "ci", "parity": True} | dict.fromkeys(names)}
    content = judge_checks({"config": config}, metrics)
    assert (content["checks"][0]["outcome"], content["exit_code"]) == ("inconclusive", 3)
    json.dumps(entry)


def test_an_engine_that_scores_has_to_tell_its_ids():
    entry = judged(engine(BLIND), server(), "fp32", words)
    assert not entry["passed"]
    assert entry["sentence"].startswith("The candidate answered request a with token -1, and the model's vocabulary")


def test_sampled_outputs_of_a_server_without_ids_are_left_to_the_finding_that_says_so():
    arms = engine(), server(BLIND, {"a": "x y x", "b": "x y x"})
    gate = ParityGate(*arms, dtype="fp32", reference=None, eos_ids=(), vocab=2, seed=0, decode=words)
    entry = gate.probe(REQUESTS)
    sampled = [Request("b", (3,), 3, Sampling(temperature=1.0))]
    assert gate.settle_all(sampled, {arm.name: arm.outputs for arm in arms}) == entry


@pytest.mark.parametrize(
    ("one", "other", "place"),
    [("abc", "abd", "character 2, 'c' and 'd'"), ("abc", "ab", "character 2, 'c' and ''")],
)
def test_where_texts_part(one, other, place):
    entry = text_parity({"a": "same", "b": one}, {"a": "same\N{REPLACEMENT CHARACTER}", "b": other})
    assert entry["sentence"].endswith(f"First difference: request b, {place}.")
