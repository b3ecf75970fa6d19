"""The gate, with arms whose outputs and logits are scripted."""

from __future__ import annotations

import random
from concurrent.futures import Future
from contextlib import nullcontext

import numpy as np
import pytest

from skote.eval.gate import ParityGate, _sample
from skote.eval.record import ids_sha256
from skote.runtime.choices import choices
from skote.runtime.stops import Stopping
from skote.types import Completion, EngineError, Request, Sampling

STOPPING = Stopping(None)
REQUESTS = [Request("a", (1, 2), 3), Request("b", (3,), 3, Sampling(temperature=1.0, seed=5))]


class Arm:
    """Answers with `outputs`, scores with `logits`, and remembers what it was asked."""

    def __init__(self, name, outputs, logits=None, error=None, scores=True):
        self.name, self._outputs, self._logits, self._error = name, outputs, logits, error
        self._scores = scores
        self.dispatcher = self
        self.replicas = [self]
        self.seen, self.scored = [], []

    def salted(self, requests):
        return requests

    def dispatch(self, request):
        self.seen.append(request)
        failed = self._error is not None
        return _done(
            Completion(
                request.request_id,
                len(request.input_ids),
                () if failed else self._outputs[request.request_id],
                (),
                0,
                0,
                0,
                "error" if failed else "ok",
                error=self._error,
            )
        )

    def call(self, method, request=None, forced=()):
        if method == "describe":
            return _done({} if self._scores else {"scores": False})
        assert self._scores
        self.scored.append((request.request_id, forced))
        logits = self._logits[: len(forced)]
        return _done({"score": lambda: logits, "choices": lambda: choices(logits, forced)}[method]())


def _done(value):
    future = Future()
    future.set_result(value)
    return future


OUTPUTS = {"a": (0, 1, 0), "b": (1, 1, 1)}
LOGITS = np.array([[9.0, 0.0], [1.0, 1.0005], [3.0, 0.0]], dtype=np.float32)  # what they choose is 0, 1, 0


def gate(candidate, baseline, reference=None, eos_ids=()):
    dtype = "fp32" if reference is None else "bf16"
    return ParityGate(
        candidate, baseline, dtype=dtype, reference=reference, eos_ids=eos_ids, stopping=STOPPING, vocab=2, seed=0
    )


def test_the_probe_asks_greedily_and_records_hashes():
    candidate, baseline = Arm("candidate", OUTPUTS), Arm("baseline", OUTPUTS)

    entry = gate(candidate, baseline).probe(REQUESTS[1:])

    assert entry["passed"]
    assert [request.sampling.greedy for request in candidate.seen] == [True]
    assert entry["outputs"] == {arm: {"b": ids_sha256((1, 1, 1))} for arm in ("candidate", "baseline")}


def test_a_difference_is_judged_by_the_baseline_fed_with_the_candidates_tokens():
    """The candidate chose 0 where the baseline has 1.0 and 1.0005: a near tie of 0.0005 logits."""
    candidate, baseline = Arm("candidate", {**OUTPUTS, "a": (0, 0, 0)}), Arm("baseline", OUTPUTS, LOGITS)

    entry = gate(candidate, baseline).probe(REQUESTS)

    assert baseline.scored == [("a", (0, 0, 0))]
    assert entry["divergences"][0]["gap"] == pytest.approx(0.0005, rel=1e-3)
    assert entry["passed"]


def test_a_difference_from_a_baseline_that_cannot_score_is_judged_by_the_reference():
    candidate, baseline = Arm("candidate", {**OUTPUTS, "a": (0, 0, 0)}), Arm("baseline", OUTPUTS, scores=False)
    reference = Arm("reference", {}, LOGITS)
    judge = ParityGate(
        candidate,
        baseline,
        dtype="fp32",
        reference=lambda: nullcontext(reference),
        eos_ids=(),
        stopping=STOPPING,
        vocab=2,
        seed=0,
    )

    entry = judge.probe(REQUESTS)

    assert reference.scored == [("a", (0, 0, 0))]
    assert entry["divergences"][0]["gap"] == pytest.approx(0.0005, rel=1e-3)
    assert entry["passed"]


def test_settling_judges_every_timed_output():
    """Nothing differed on the probe's prompts; when timed, request b does, by 3 logits."""
    candidate, baseline = Arm("candidate", {"p": (0,)}), Arm("baseline", {"p": (0,)}, LOGITS)
    judge = gate(candidate, baseline)
    before = judge.probe([Request("p", (1,), 1)])

    after = judge.settle(REQUESTS, {"candidate": {**OUTPUTS, "b": (1, 1, 1)}, "baseline": {**OUTPUTS, "b": (1, 1, 0)}})

    assert before["passed"]
    assert not after["passed"]
    assert (after["compared"], after["equal"]) == (3, 2)
    assert baseline.scored == [("b", (1, 1, 1))]
    assert set(after["outputs"]["candidate"]) == {"p", "a", "b"}


def test_a_request_that_failed_when_timed_is_left_to_the_findings():
    candidate, baseline = Arm("candidate", OUTPUTS), Arm("baseline", OUTPUTS)

    entry = gate(candidate, baseline).settle(REQUESTS, {"candidate": {"a": (0, 1, 0)}, "baseline": OUTPUTS})

    assert (entry["passed"], entry["compared"]) == (True, 1)


def test_an_arm_that_fails_on_the_probe_ends_the_run():
    with pytest.raises(EngineError, match="candidate failed on request a: out of cheese"):
        gate(Arm("candidate", OUTPUTS, error="out of cheese"), Arm("baseline", OUTPUTS)).probe(REQUESTS)


class Forced:
    """A gate for a rounded dtype: request a alone, both arms and the reference with the same logits."""

    def __init__(self, candidate_output, eos_ids=()):
        self.candidate = Arm("candidate", {"a": candidate_output}, LOGITS)
        self.baseline = Arm("baseline", {"a": (0, 1, 0)}, LOGITS)
        self.reference = Arm("reference", {}, LOGITS)
        judge = gate(self.candidate, self.baseline, lambda: nullcontext(self.reference), eos_ids)
        self.entry = judge.probe(REQUESTS[:1])


def test_forcing_feeds_every_arm_the_baselines_tokens():
    forced = Forced((0, 1, 0))

    assert forced.candidate.scored == forced.baseline.scored == forced.reference.scored == [("a", (0, 1, 0))]
    assert forced.entry["passed"]
    assert (forced.entry["agreement"], forced.entry["equal"]) == (1.0, 1)


def test_an_output_that_was_not_computed_is_not_what_the_logits_choose():
    forced = Forced((1, 1, 1))

    assert forced.candidate.scored == [("a", (0, 1, 0)), ("a", (1, 1, 1))]
    assert not forced.entry["passed"]
    assert "first candidate a" in forced.entry["sentence"]


@pytest.mark.parametrize(("stop_ids", "output", "passed"), [
    ((1,), (0, 1), True), ((7,), (0, 1), False), ((1,), (0, 1, 0), False), ((0,), (0, 1), False),
])  # fmt: skip
def test_an_answer_with_stops_ends_at_the_first_and_nowhere_else(stop_ids, output, passed):
    asked = Request("a", (1, 2), 3, stop_ids=stop_ids)
    arms = [Arm(name, {"a": output}, LOGITS) for name in ("candidate", "baseline")]
    truth = Arm("reference", {}, LOGITS)
    judge = ParityGate(
        *arms, dtype="bf16", reference=lambda: nullcontext(truth), eos_ids=(), stopping=STOPPING, vocab=2, seed=0
    )
    assert judge.settle([asked], {name: {"a": output} for name in ("candidate", "baseline")})["passed"] is passed


@pytest.mark.parametrize(("eos_ids", "passed"), [((1,), True), ((7,), False)])
def test_an_early_end_needs_an_end_of_sequence_token(eos_ids, passed):
    assert Forced((0, 1), eos_ids).entry["passed"] is passed


@pytest.mark.parametrize(("tokens", "forced"), [(256, 12), (64, 16), (16, 64), (1, 72)])
def test_the_sample_has_twelve_requests_and_a_thousand_tokens_where_there_are_as_many(tokens, forced):
    assert len(_sample([tokens] * 72, random.Random(0))) == forced


def test_of_many_timed_outputs_a_sample_is_forced_and_every_one_of_the_candidates_is_checked(monkeypatch):
    monkeypatch.setattr("skote.eval.gate.FORCED_TOKENS", 30)
    requests = [Request(f"r{index:02d}", (1,), 3) for index in range(20)]
    outputs = {request.request_id: (0, 1, 0) for request in requests}
    candidate, baseline, reference = (Arm(name, outputs, LOGITS) for name in ("candidate", "baseline", "reference"))
    judge = gate(candidate, baseline, lambda: nullcontext(reference))

    entry = judge.settle(requests, {"candidate": outputs, "baseline": outputs})

    assert (entry["passed"], entry["compared"], entry["equal"], entry["checked"]) == (True, 12, 12, 20)
    assert [request_id for request_id, _ in candidate.scored] == sorted(outputs)
    assert len(baseline.scored) == len(reference.scored) == 12
    for request_id in outputs:
        judge = gate(candidate, baseline, lambda: nullcontext(reference))
        cheating = judge.settle(requests, {"candidate": outputs | {request_id: (1, 1, 0)}, "baseline": outputs})
        assert not cheating["passed"]
        assert f"first candidate {request_id}" in cheating["sentence"]


def test_a_baseline_that_does_not_repeat_its_bits_is_given_its_own_error_and_the_candidate_is_not():
    """Both arms' logits are 0.3 off the truth where their output trails by 0.5."""
    rough = np.array([[9.0, 8.5], [1.0, 1.0005], [3.0, 0.0]], dtype=np.float32)
    truth = rough + np.array([[-0.3, 0.0], [0.0, 0.0], [0.0, 0.0]], dtype=np.float32)
    inconsistent = {}
    for name in ("candidate", "baseline"):
        arms = [Arm(each, {"a": (1, 1, 0) if each == name else (0, 1, 0)}, rough) for each in ("candidate", "baseline")]
        judge = gate(*arms, lambda: nullcontext(Arm("reference", {}, truth)))
        inconsistent[name] = "not what the arm's own logits choose" in judge.probe(REQUESTS[:1])["sentence"]

    assert inconsistent == {"baseline": False, "candidate": True}


def drawing_gate(candidate_outputs, baseline_outputs, logits, dtype="fp32"):
    """A gate after its probe, in which all agree; the reference's logits are `logits`."""
    arms = [Arm(name, {"p": (0, 1, 0)}, LOGITS) for name in ("candidate", "baseline")]
    truth = Arm("reference", {}, LOGITS)
    judge = ParityGate(
        *arms, dtype=dtype, reference=lambda: nullcontext(truth), eos_ids=(), stopping=STOPPING, vocab=2, seed=0
    )
    assert judge.probe([Request("p", (1,), 3)])["passed"]
    truth._logits = logits
    requests = [Request(each, (1,), 64, Sampling(temperature=1.0)) for each in baseline_outputs]
    entry = judge.settle_sampled(requests, {"candidate": candidate_outputs, "baseline": baseline_outputs})
    return entry, truth.scored[-2 * len(candidate_outputs) :]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_sampled_outputs_are_held_against_the_reference(dtype):
    """A tenth of ones is a draw where 1 has a tenth; nothing but ones is none."""
    rng = np.random.default_rng(0)
    logits = np.log(np.tile(np.array([[0.9, 0.1]], dtype=np.float32), (64, 1)))
    honest = {f"r{index}": tuple((rng.random(64) < 0.1).astype(int).tolist()) for index in range(4)}

    entry, scored = drawing_gate(honest, honest, logits, dtype)
    assert entry["passed"]
    assert scored == [(each, ids) for each, ids in honest.items() for _ in range(2)]
    assert entry["sampled"]["candidate"]["tokens"] == entry["sampled"]["baseline"]["tokens"] == 4 * 64
    assert entry["outputs"] == {arm: {"p": ids_sha256((0, 1, 0))} for arm in ("candidate", "baseline")}

    entry, _ = drawing_gate(dict.fromkeys(honest, (1,) * 64), honest, logits, dtype)
    assert not entry["passed"]
    assert {arm: judged["passed"] for arm, judged in entry["sampled"].items()} == {"candidate": False, "baseline": True}
    assert entry["sampled"]["candidate"]["z"] > 40


def test_sampled_requests_that_an_arm_did_not_finish_are_left_to_the_findings():
    logits = np.zeros((64, 2), dtype=np.float32)

    entry, scored = drawing_gate({"a": (0,) * 64, "c": ()}, {"a": (1,) * 64, "b": (0,) * 64, "c": (0,) * 64}, logits)

    assert {request_id for request_id, _ in scored} == {"a"}
    assert entry["sampled"]["candidate"]["requests"] == 1


def test_the_rounding_that_draws_are_allowed_is_the_baselines_on_the_held_out_prompts():
    """Both logits of the worst row are 0.3 off in the baseline: a token that trails the only one left by 2 may pass."""
    rough = LOGITS + np.array([[0.0, 0.0], [0.3, 0.3], [0.0, 0.1]], dtype=np.float32)
    truth = Arm("reference", {}, LOGITS)
    arms = [Arm(name, {"p": (0, 1, 0)}, rough) for name in ("candidate", "baseline")]
    judge = ParityGate(
        *arms, dtype="bf16", reference=lambda: nullcontext(truth), eos_ids=(), stopping=STOPPING, vocab=2, seed=0
    )
    judge.probe([Request("p", (1,), 3)])
    outside = {}
    for trailing in (2.0, 3.0):
        truth._logits = np.array([[trailing, 0.0]], dtype=np.float32)
        request = Request("a", (1,), 1, Sampling(temperature=1.0, top_k=1))
        entry = judge.settle_sampled([request], {"candidate": {"a": (1,)}, "baseline": {"a": (0,)}})
        outside[trailing] = entry["sampled"]["candidate"]["outside"]

    assert outside == {2.0: 0, 3.0: 1}  # two logits, each 4 x 0.3 off, meet 2.4 apart


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("arm", ["candidate", "baseline"])
def test_an_arm_that_answers_beyond_the_vocabulary_fails_parity_and_nobody_is_asked_to_score_it(dtype, arm):
    outputs = {name: {"a": (0, 7, 0) if name == arm else (0, 1, 0)} for name in ("candidate", "baseline")}
    arms = [Arm(name, answers, LOGITS) for name, answers in outputs.items()]
    reference = Arm("reference", {}, LOGITS)
    judge = gate(*arms, reference=None if dtype == "fp32" else lambda: nullcontext(reference))

    before = judge.probe(REQUESTS[:1])
    after = judge.settle(REQUESTS[:1], outputs)

    assert [each.scored for each in (*arms, reference)] == [[], [], []]
    for entry in (before, after):
        assert not entry["passed"]
        assert f"The {arm} answered request a with token 7" in entry["sentence"]
        assert set(entry["outputs"]) == {"candidate", "baseline"}


def test_arms_that_agree_in_fp32_are_not_asked_about_the_vocabulary():
    """Two engines without a model, as in tests of the harness itself: equal tokens, and nothing to score."""
    arms = [Arm(name, {"a": (0, 7, 0)}, LOGITS) for name in ("candidate", "baseline")]

    assert gate(*arms).probe(REQUESTS[:1])["passed"]


def test_logits_of_another_vocabulary_fail_parity():
    arms = [Arm("candidate", {"a": (0, 1, 0)}, LOGITS[:, :1]), Arm("baseline", {"a": (0, 1, 0)}, LOGITS)]
    entry = gate(*arms, lambda: nullcontext(Arm("reference", {}, LOGITS))).probe(REQUESTS[:1])

    assert not entry["passed"]
    assert "The candidate scored 1 tokens a position" in entry["sentence"]


def test_sampled_outputs_beyond_the_vocabulary_fail_parity():
    logits = np.zeros((64, 2), dtype=np.float32)

    entry, _ = drawing_gate({"a": (2,) * 64}, {"a": (1,) * 64}, logits)

    assert not entry["passed"]
    assert "The candidate answered request a with token 2" in entry["sentence"]


def test_greedy_and_sampled_requests_of_one_run_are_each_judged_their_own_way():
    arms = [Arm(name, {"p": (0, 1, 0)}, LOGITS) for name in ("candidate", "baseline")]
    truth = Arm("reference", {}, np.zeros((64, 2), dtype=np.float32))
    judge = ParityGate(
        *arms, dtype="fp32", reference=lambda: nullcontext(truth), eos_ids=(), stopping=STOPPING, vocab=2, seed=0
    )
    judge.probe([Request("p", (1,), 3)])
    requests = [Request("a", (1,), 3), Request("s", (1,), 4, Sampling(temperature=1.0))]
    outputs = {"a": (0, 1, 0), "s": (0, 1, 1, 0)}

    entry = judge.settle_all(requests, {"candidate": outputs, "baseline": outputs})
    assert (entry["passed"], entry["compared"], entry["sampled"]["candidate"]["requests"]) == (True, 2, 1)
    assert {request_id for request_id, _ in truth.scored} == {"s"}

    other = outputs | {"a": (1, 1, 0)}
    assert not judge.settle_all(requests, {"candidate": other, "baseline": outputs})["passed"]
