"""The parity gate: asks the arms for outputs and logits, and lets `parity` judge them.

Before timing it runs held-out requests, which no measured one repeats, so that an engine learns nothing from the gate.
After timing it judges the timed outputs themselves. In fp32 the two arms' tokens must be equal, all of them. In other
dtypes tokens may differ: every output of the candidate must be what its own logits choose, and on the held-out requests
and a sample of the timed ones the baseline's tokens are forced through both arms and an fp32 reference, one by one.
Where timed outputs are sampled, those of a sample of the requests must be draws from the reference's distribution.
An arm that answers in tokens that the model does not have has failed, and is compared no further. A server's tokens are
judged by the reference, since it hands over no logits; one that does not tell its tokens' ids by its texts.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import Any

import numpy as np

from skote.eval.arms import Arm
from skote.eval.draws import Draws, draws, sampled_parity
from skote.eval.measure import Arm as ArmName
from skote.eval.measure import run_pass
from skote.eval.parity import (
    NEAR_TIE_LOGITS,
    Divergence,
    ForcedErrors,
    Ids,
    are_choices,
    find_divergences,
    forced_errors,
    forced_parity,
    token_gaps,
    token_parity,
)
from skote.eval.record import ids_sha256
from skote.eval.served_parity import are_likely_choices, choice_parity, text_parity, unjudged_parity
from skote.eval.vocabulary import OtherVocabularyError, check_ids, check_width, vocabulary_parity
from skote.runtime.backend import AnyReplica
from skote.runtime.choices import Choices, choices
from skote.runtime.stops import Stopping
from skote.types import UNKNOWN_ID, Completion, EngineError, Request, Sampling

FORCED_REQUESTS, FORCED_TOKENS = 12, 1024
"""At least so many of the timed requests, with so many tokens together, are forced through both arms, where there are
as many; each takes the baseline as long as when it was timed. As many sampled ones are held against the reference."""

Outputs = Mapping[ArmName, Mapping[str, Ids]]
Reference = Callable[[], AbstractContextManager[AnyReplica]]


def greedy(request: Request) -> Request:
    """The same request, greedy: sampled outputs of two engines cannot be compared token by token."""
    return Request(request.request_id, request.input_ids, request.max_new_tokens, Sampling(), request.ignore_eos)


class ParityGate:
    """Compares candidate and baseline; remembers what it has compared.

    Args:
        candidate, baseline: the started arms.
        dtype: of both arms.
        reference: starts an fp32 replica for a while. In fp32, where greedy tokens must be equal, sampled ones need it.
        eos_ids: what may end a text early.
        stopping: finds where else an answer to a request with stops has to end.
        vocab: how many tokens an arm's model has, one for padding among them.
        seed: of the bootstrap.
        decode: the text of token ids, where the model has a tokenizer.
    """

    def __init__(
        self,
        candidate: Arm,
        baseline: Arm,
        *,
        dtype: str,
        reference: Reference,
        eos_ids: Sequence[int],
        stopping: Stopping,
        vocab: int,
        seed: int,
        decode: Callable[[Sequence[int]], str] | None = None,
    ) -> None:
        self._arms: dict[ArmName, Arm] = {"candidate": candidate, "baseline": baseline}
        self._dtype, self._reference, self._seed = dtype, reference, seed
        self._eos_ids = frozenset(eos_ids)
        self._stopping = stopping
        self._vocab = vocab
        self._decode = decode
        self._texts: dict[ArmName, dict[str, str]] = {"candidate": {}, "baseline": {}}
        self._foreign: OtherVocabularyError | None = None
        self._requests: dict[str, Request] = {}
        self._outputs: dict[ArmName, dict[str, Ids]] = {"candidate": {}, "baseline": {}}
        self._divergences: list[Divergence] = []
        self._errors: list[ForcedErrors] = []
        self._inconsistent: list[str] = []
        self._forced: list[str] = []
        self._rounding = NEAR_TIE_LOGITS
        self._entry: dict[str, Any] = {}

    def probe(self, requests: Sequence[Request]) -> dict[str, Any]:
        """Run `requests`, greedily, through both arms: the manifest's parity entry so far.

        Raises:
            EngineError: an arm or the reference failed on a request.
        """
        asked = [greedy(request) for request in requests]
        self._entry = self._judge_known(asked, {name: _outputs(arm, asked) for name, arm in self._arms.items()})
        return self._entry

    def settle_all(self, requests: Sequence[Request], timed: Outputs) -> dict[str, Any]:
        """Judge the `timed` outputs of `requests`, of greedy ones as `settle` and of others as `settle_sampled`.

        Raises:
            EngineError: an arm or the reference failed on a request.
        """
        known = [request for request in requests if request.sampling.greedy]
        drawn = [request for request in requests if not request.sampling.greedy]
        if known:
            self._entry = self.settle(known, timed)
        return self.settle_sampled(drawn, timed) if drawn else self._entry

    def settle(self, requests: Sequence[Request], timed: Outputs) -> dict[str, Any]:
        """Judge the `timed` outputs of greedy `requests`, of those that both arms finished: the whole entry.

        Raises:
            EngineError: an arm or the reference failed on a request.
        """
        return self._judge_known(requests, timed)

    def settle_sampled(self, requests: Sequence[Request], timed: Outputs) -> dict[str, Any]:
        """Judge the `timed` outputs of a sample of the sampled `requests` that both arms finished: the whole entry.

        The arms' logits may be off the reference's by the most that the baseline's were, in the root mean square over a
        row, on the held-out prompts, and by a near tie in any case.

        Raises:
            EngineError: the reference failed on a request.
        """
        if self._without_ids(timed):
            return (
                self._entry
            )  # which has nothing of sampled outputs, and so a finding says that nothing shows them right
        self._check_vocabulary(timed)  # the reference is asked for all of them
        if self._foreign is not None:
            return self._entry | vocabulary_parity(self._foreign, self._dtype, len(self._requests))
        both = [each for each in requests if all(timed[name].get(each.request_id) for name in self._arms)]
        rng = random.Random(f"{self._seed}/sampled")  # noqa: S311 - drawn after timing, so that no engine can know it
        sample = _sample([len(timed["candidate"][each.request_id]) for each in both], rng)
        found: dict[ArmName, list[Draws]] = {name: [] for name in self._arms}
        with self._reference() as reference:
            for request in (both[index] for index in sorted(sample)):
                for name, draw in found.items():
                    ids = timed[name][request.request_id]
                    logits = reference.call("score", request, ids).result()
                    draw.append(draws(logits, ids, request.sampling, self._rounding))
        return sampled_parity(self._entry, found)

    def _check_vocabulary(self, outputs: Outputs) -> None:
        try:
            for name in self._arms:
                check_ids(name, outputs[name], self._vocab)
        except OtherVocabularyError as error:
            self._foreign = self._foreign or error

    def _judge_known(self, requests: Sequence[Request], outputs: Outputs) -> dict[str, Any]:
        """`_judge`, of arms whose tokens are the model's; of others, and from then on, an entry that says so."""
        both = [each for each in requests if all(each.request_id in outputs[name] for name in self._arms)]
        self._requests |= {request.request_id: request for request in both}
        for name in self._arms:
            self._outputs[name] |= {request.request_id: outputs[name][request.request_id] for request in both}
        if self._foreign is None and (blind := self._without_ids(outputs)):
            return self._judge_texts(both, blind) | self._hashes()
        differing = [
            each.request_id for each in both if len({outputs[name][each.request_id] for name in self._arms}) > 1
        ]
        scored = differing if self._dtype == "fp32" else [each.request_id for each in both]
        self._check_vocabulary({name: {each: outputs[name][each] for each in scored} for name in self._arms})
        if self._foreign is None:
            try:
                return self._judge(both)
            except OtherVocabularyError as error:
                self._foreign = error
        return vocabulary_parity(self._foreign, self._dtype, len(self._requests)) | self._hashes()

    def _judge(self, both: Sequence[Request]) -> dict[str, Any]:
        if self._dtype == "fp32":
            return self._judge_tokens(both) | self._hashes()
        rng = random.Random(f"{self._seed}/forced")  # noqa: S311 - drawn after timing, so that no engine can know it
        sample = _sample([len(self._outputs["baseline"][request.request_id]) for request in both], rng)
        served = [name for name in self._arms if not self._scores(name)]
        if served:
            return self._judge_served(both, served, sample) | self._hashes()
        with self._reference() as reference:
            for index, request in enumerate(both):
                if index in sample:
                    self._judge_forced(request, reference)
                else:
                    self._check_choices("candidate", request, None)
        candidate, baseline = self._outputs["candidate"], self._outputs["baseline"]
        equal = sum(candidate[request_id] == baseline[request_id] for request_id in self._forced)
        checked = len(candidate)
        return forced_parity(self._errors, equal, self._inconsistent, checked, self._seed) | self._hashes()

    def _judge_served(self, both: Sequence[Request], served: Sequence[ArmName], sample: set[int]) -> dict[str, Any]:
        """Judge a server's outputs of the `sample` by the reference, and by how far the other arm is off it there."""
        if len(served) == len(self._arms):
            return unjudged_parity(f"neither hands over logits, by which arms in {self._dtype} are compared.")
        [server], [other] = served, [name for name in self._arms if name not in served]
        with self._reference() as reference:
            for index, request in enumerate(both):
                if index in sample:
                    self._judge_served_request(request, server, other, reference)
                elif other == "candidate":
                    self._check_choices(other, request, None)
        equal = sum(len({self._outputs[name][each] for name in self._arms}) == 1 for each in self._forced)
        checked = len(self._outputs[other]) if other == "candidate" else len(self._forced)
        return choice_parity(self._inconsistent, len(self._forced), checked, equal)

    def _judge_served_request(self, request: Request, server: ArmName, other: ArmName, reference: AnyReplica) -> None:
        ids, theirs = (self._outputs[name][request.request_id] for name in (server, other))
        own, truth = self._score(other, request, ids), reference.call("score", request, ids).result()
        self._rounding = max(self._rounding, *map(_root_mean_square_error, own, truth))
        self._forced.append(request.request_id)
        if not self._has_ended(request, ids) or not are_likely_choices(truth, own, ids, self._dtype):
            self._inconsistent.append(f"{server} {request.request_id}")
        if theirs != ids:
            own = self._score(other, request, theirs)
        if other == "candidate":
            self._check_choices(other, request, own)
        else:  # a library, as in `_judge_forced`
            truth = truth if theirs == ids else reference.call("score", request, theirs).result()
            self._check_choices(other, request, own, truth)

    def _judge_texts(self, both: Sequence[Request], blind: Sequence[ArmName]) -> dict[str, Any]:
        """Judge arms of which those in `blind` tell no ids."""
        if self._dtype != "fp32":
            return unjudged_parity(
                f"the {' and the '.join(blind)} tells no ids, and in {self._dtype} texts may differ."
            )
        decode = self._decode
        if decode is None:
            return unjudged_parity(f"the {' and the '.join(blind)} tells no ids, and the model has no tokenizer.")
        for name, arm in self._arms.items():
            self._texts[name] |= {
                each.request_id: arm.replicas[0].call("answer", each).result()
                if name in blind
                else decode(self._outputs[name][each.request_id])
                for each in both
            }
        return text_parity(self._texts["candidate"], self._texts["baseline"])

    def _without_ids(self, outputs: Outputs) -> list[ArmName]:
        """The servers that have not told the ids of all their tokens; an engine that scores has no excuse."""
        silent = [name for name in self._arms if any(UNKNOWN_ID in ids for ids in outputs[name].values())]
        return [name for name in silent if not self._scores(name)]

    def _scores(self, name: ArmName) -> bool:
        scores: bool = self._arms[name].replicas[0].call("describe").result().get("scores", True)
        return scores

    def _judge_tokens(self, requests: Sequence[Request]) -> dict[str, Any]:
        candidate, baseline = (
            {request.request_id: self._outputs[name][request.request_id] for request in requests} for name in self._arms
        )
        with ExitStack() as stack:
            told = self._truth(stack) if candidate != baseline else None

            def gaps(request_id: str, ids: Ids) -> Sequence[float]:
                assert told is not None  # there is a difference
                found = told(self._requests[request_id], ids)
                return list(token_gaps(found.chosen, found.best))

            self._divergences += find_divergences(candidate, baseline, gaps)
        return token_parity(len(self._requests), self._divergences)

    def _truth(self, stack: ExitStack) -> Callable[[Request, Ids], Choices]:
        """What tells of tokens in fp32: the baseline, or the reference where the baseline cannot."""
        if self._scores("baseline"):
            return partial(self._choices, "baseline")
        reference = stack.enter_context(self._reference())
        return lambda request, ids: reference.call("choices", request, ids).result()

    def _judge_forced(self, request: Request, reference: AnyReplica) -> None:
        forced = self._outputs["baseline"][request.request_id]
        # One after another: arms that compute at the same time would take each other's cores.
        logits = {name: self._score(name, request, forced) for name in self._arms}
        truth = reference.call("score", request, forced).result()
        self._errors.append(forced_errors(logits["candidate"], logits["baseline"], truth, forced))
        self._rounding = max(self._rounding, *map(_root_mean_square_error, logits["baseline"], truth))
        self._forced.append(request.request_id)
        # The baseline is a library that need not give the same bits twice; the candidate is held to its own.
        self._check_choices("baseline", request, logits["baseline"], truth)
        same = self._outputs["candidate"][request.request_id] == forced
        self._check_choices("candidate", request, logits["candidate"] if same else None)

    def _check_choices(
        self,
        name: ArmName,
        request: Request,
        logits: Any,  # noqa: ANN401 (see Engine.score)
        reference: Any = None,  # noqa: ANN401
    ) -> None:
        """Note an output that its arm's `logits` (None: yet to be asked for) do not choose, or that ends early."""
        own = self._outputs[name][request.request_id]
        ended = self._has_ended(request, own)
        found = self._choices(name, request, own) if logits is None else choices(logits, own)
        errors = None if reference is None else np.abs(logits - reference).max(-1)
        if not ended or not are_choices(found.chosen, found.best, self._dtype, errors):
            self._inconsistent.append(f"{name} {request.request_id}")

    def _has_ended(self, request: Request, ids: Ids) -> bool:
        """Whether an answer to `request` may be `ids`: neither short of its end nor longer."""
        stops = self._stopping.watch(request)
        end = None if stops is None else stops.end(ids)
        if end is not None:
            return end == len(ids)
        return len(ids) == request.max_new_tokens or ids[-1] in self._eos_ids

    def _choices(self, name: ArmName, request: Request, ids: Ids) -> Choices:
        found: Choices = self._ask(name, "choices", request, ids)
        check_width(name, found.vocab, self._vocab)
        return found

    def _score(self, name: ArmName, request: Request, ids: Ids) -> Any:  # noqa: ANN401 (logits, see Engine.score)
        logits = self._ask(name, "score", request, ids)
        check_width(name, logits.shape[-1], self._vocab)
        return logits

    def _ask(self, name: ArmName, method: str, request: Request, ids: Ids) -> Any:  # noqa: ANN401 (what it gives)
        arm = self._arms[name]
        return arm.replicas[0].call(method, arm.salted([request])[0], ids).result()

    def _hashes(self) -> dict[str, Any]:
        return {
            "outputs": {
                name: {request_id: ids_sha256(ids) for request_id, ids in outputs.items()}
                for name, outputs in self._outputs.items()
            }
        }


def _root_mean_square_error(row: Any, truth: Any) -> float:  # noqa: ANN401 (logits of one position)
    return float(np.sqrt(np.square(np.subtract(row, truth, dtype=np.float64)).mean()))


def _sample(tokens: Sequence[int], rng: random.Random) -> set[int]:
    """Indices of requests with so many `tokens` each, drawn until there are enough of both."""
    chosen: set[int] = set()
    together = 0
    for index in rng.sample(range(len(tokens)), len(tokens)):
        if len(chosen) >= FORCED_REQUESTS and together >= FORCED_TOKENS:
            break
        chosen.add(index)
        together += tokens[index]
    return chosen


def _outputs(arm: Arm, requests: Sequence[Request]) -> dict[str, Ids]:
    outputs: dict[str, Ids] = {}

    def note(_: int, completion: Completion) -> None:
        if completion.status != "ok":
            raise EngineError(f"The {arm.name} failed on request {completion.request_id}: {completion.error}")
        outputs[completion.request_id] = completion.output_ids

    run_pass(arm.dispatcher, arm.salted(requests), "closed", 1, note)
    return outputs
