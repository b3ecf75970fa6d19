"""The gate, with arms whose outputs and logits are scripted."""

from __future__ import annotations

from concurrent.futures import Future

import numpy as np
import pytest

from skote.eval.gate import ParityGate
from skote.eval.record import ids_sha256
from skote.types import Completion, EngineError, Request, Sampling

REQUESTS = [Request("a", (1, 2), 3), Request("b", (3,), 3, Sampling(temperature=1.0, seed=5))]


class Arm:
    """Answers with `outputs`, scores with `logits`, and remembers what it was asked."""

    def __init__(self, name, outputs, logits=None, error=None):
        self.name, self._outputs, self._logits, self._error = name, outputs, logits, error
        self.dispatcher = self
        self.replicas = [self]
        self.seen, self.scored = [], []

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

    def call(self, method, request, forced):
        assert method == "score"
        self.scored.append((request.request_id, forced))
        return _done(self._logits[: len(forced)])


def _done(value):
    future = Future()
    future.set_result(value)
    return future


OUTPUTS = {"a": (5, 6, 7), "b": (1, 1, 1)}
LOGITS = np.array([[0.0, 9.0], [1.0, 1.0005], [3.0, 0.0]], dtype=np.float32)


def test_the_gate_asks_greedily_and_records_hashes():
    candidate, baseline = Arm("candidate", OUTPUTS), Arm("baseline", OUTPUTS)

    entry = ParityGate(candidate, baseline, REQUESTS).compare_tokens(["b"])

    assert entry["passed"]
    assert [request.sampling.greedy for request in candidate.seen] == [True]
    assert entry["outputs"] == {arm: {"b": ids_sha256((1, 1, 1))} for arm in ("candidate", "baseline")}


def test_a_difference_is_scored_by_the_baseline_at_its_position():
    candidate, baseline = Arm("candidate", {**OUTPUTS, "a": (5, 0, 7)}), Arm("baseline", OUTPUTS, LOGITS)

    entry = ParityGate(candidate, baseline, REQUESTS).compare_tokens(["a", "b"])

    assert baseline.scored == [("a", (5, 6))]
    assert entry["divergences"][0]["margin"] == pytest.approx(0.0005, rel=1e-3)
    assert entry["passed"]


def test_settling_compares_every_timed_output():
    """The gate saw request a alone; request b differs when timed, by a margin of 3 logits."""
    candidate, baseline = Arm("candidate", OUTPUTS), Arm("baseline", OUTPUTS, LOGITS)
    gate = ParityGate(candidate, baseline, REQUESTS)
    before = gate.compare_tokens(["a"])

    after = gate.settle({**OUTPUTS, "b": (1, 1, 0)}, OUTPUTS)

    assert before["passed"]
    assert not after["passed"]
    assert (after["compared"], after["equal"]) == (2, 1)
    assert baseline.scored == [("b", (1, 1, 1))]


def test_a_failing_arm_ends_the_gate():
    gate = ParityGate(Arm("candidate", OUTPUTS, error="out of cheese"), Arm("baseline", OUTPUTS), REQUESTS)

    with pytest.raises(EngineError, match="candidate failed on request a: out of cheese"):
        gate.compare_tokens(["a"])


def test_forcing_feeds_every_arm_the_baselines_tokens():
    candidate, baseline = Arm("candidate", {**OUTPUTS, "a": (0, 0, 0)}, LOGITS), Arm("baseline", OUTPUTS, LOGITS)
    reference = Arm("reference", {}, LOGITS)
    forced = {"a": (0, 1, 0), "b": (1, 1, 1)}
    baseline._outputs = forced

    entry = ParityGate(candidate, baseline, REQUESTS).compare_forced(reference, seed=0)

    assert candidate.scored == baseline.scored == reference.scored == list(forced.items())
    assert entry["passed"]
    assert entry["agreement"] == 1.0
    assert entry["equal"] == 1
