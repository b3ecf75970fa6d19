"""The parity gate: asks the arms for their outputs and logits, and lets `parity` judge them. Comes before timing.

In fp32 the gate runs the first block's requests; the timed rows of the two arms are then compared with each other, all
of them (`settle`). In other dtypes tokens may differ, so the gate runs every request and scores each one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from skote.eval.arms import Arm
from skote.eval.measure import run_pass
from skote.eval.parity import (
    Divergence,
    ForcedErrors,
    Ids,
    find_divergences,
    forced_errors,
    forced_parity,
    token_parity,
    top_two_margin,
)
from skote.eval.record import ids_sha256
from skote.runtime.replica import Replica
from skote.types import Completion, EngineError, Request, Sampling


def greedy(request: Request) -> Request:
    """The same request, greedy: sampled outputs of two engines cannot be compared token by token."""
    return Request(request.request_id, request.input_ids, request.max_new_tokens, Sampling(), request.ignore_eos)


class ParityGate:
    """Compares candidate and baseline on greedy forms of `requests`, which both arms have."""

    def __init__(self, candidate: Arm, baseline: Arm, requests: Sequence[Request]) -> None:
        self._candidate, self._baseline = candidate, baseline
        self._requests = {request.request_id: greedy(request) for request in requests}
        self._checked: list[Request] = []
        self._divergences: list[Divergence] = []
        self._outputs: dict[str, dict[str, Ids]] = {}

    def compare_tokens(self, request_ids: Sequence[str]) -> dict[str, Any]:
        """The fp32 gate over these requests: the manifest's parity entry.

        Raises:
            EngineError: an arm failed on a request.
        """
        self._generate(request_ids)
        self._divergences = find_divergences(self._outputs["candidate"], self._outputs["baseline"], self._margin)
        return token_parity(len(self._checked), self._divergences) | self._hashes()

    def settle(self, candidate: dict[str, Ids], baseline: dict[str, Ids]) -> dict[str, Any]:
        """The fp32 entry again, with the timed outputs of both arms for all greedy requests in the comparison."""
        known = {divergence.request_id for divergence in self._divergences}
        merged = self._divergences + [
            divergence
            for divergence in find_divergences(candidate, baseline, self._margin)
            if divergence.request_id not in known
        ]
        compared = set(self._outputs["baseline"]) | set(baseline)
        return token_parity(len(compared), merged) | self._hashes()

    def compare_forced(self, reference: Replica, seed: int) -> dict[str, Any]:
        """The gate for rounded dtypes over every request: the manifest's parity entry.

        Each arm, and the fp32 `reference`, is fed the baseline's own greedy tokens one by one.

        Raises:
            EngineError: an arm or the reference failed on a request.
        """
        self._generate(list(self._requests))
        errors: list[ForcedErrors] = []
        for request in self._checked:
            forced = self._outputs["baseline"][request.request_id]
            # One after another: arms that compute at the same time would take each other's cores.
            logits = [
                replica.call("score", request, forced).result()
                for replica in (self._candidate.replicas[0], self._baseline.replicas[0], reference)
            ]
            errors.append(forced_errors(logits[0], logits[1], logits[2], forced))
        equal = sum(self._outputs["candidate"][key] == ids for key, ids in self._outputs["baseline"].items())
        return forced_parity(errors, equal, seed) | self._hashes()

    def _generate(self, request_ids: Sequence[str]) -> None:
        self._checked = [self._requests[request_id] for request_id in request_ids]
        self._outputs = {arm.name: _outputs(arm, self._checked) for arm in (self._candidate, self._baseline)}

    def _margin(self, request_id: str, position: int) -> float:
        request = self._requests[request_id]
        forced = self._baseline_output(request, position + 1)
        logits = self._baseline.replicas[0].call("score", request, forced).result()
        return top_two_margin(logits[position])

    def _baseline_output(self, request: Request, tokens: int) -> Ids:
        known = self._outputs["baseline"].get(request.request_id)
        return (known or _outputs(self._baseline, [request])[request.request_id])[:tokens]

    def _hashes(self) -> dict[str, Any]:
        return {
            "outputs": {
                arm: {request_id: ids_sha256(ids) for request_id, ids in outputs.items()}
                for arm, outputs in self._outputs.items()
            }
        }


def _outputs(arm: Arm, requests: Sequence[Request]) -> dict[str, Ids]:
    outputs: dict[str, Ids] = {}

    def note(_: int, completion: Completion) -> None:
        if completion.status != "ok":
            raise EngineError(f"The {arm.name} failed on request {completion.request_id}: {completion.error}")
        outputs[completion.request_id] = completion.output_ids

    run_pass(arm.dispatcher, requests, "closed", 1, note)
    return outputs
