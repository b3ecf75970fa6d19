"""E12: what the choice of a replica does to the padding of batches, and to the slowest requests."""

from __future__ import annotations

import random
import statistics
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack

from skote.contracts.check import REPEATS, Figures, Subject
from skote.contracts.dispatching import Counting
from skote.runtime.dispatch import ReplicaDispatcher
from skote.runtime.replica import Replica
from skote.types import Completion, Emit, EngineSpec, Request, RowEnded

POLICIES = ("round_robin", "least_work", "length_aware")
REPLICAS = 2
REQUESTS = 160
LENGTHS = (32, 64, 128, 512)
NEW_TOKENS = 8
WINDOW_MS, BATCH = 5.0, 8

Lengths = Sequence[int]


class Launches(Counting):
    """A replica that notes the prompt lengths of each launch."""

    def __init__(self, replica: Replica) -> None:
        super().__init__(replica)
        self._lengths: list[Lengths] = []

    def generate(
        self, requests: Sequence[Request], hear: Emit | None = None, ended: RowEnded | None = None
    ) -> Future[list[Completion]]:
        """As `Replica.generate`."""
        self._lengths.append([len(request.input_ids) for request in requests])
        return super().generate(requests, hear, ended)

    def take(self) -> list[Lengths]:
        """The lengths of each launch since the last call."""
        taken, self._lengths = self._lengths, []
        return taken


def length_routing(subject: Subject) -> Figures:
    """Bursts of 160 prompts of 32 to 512 tokens, drawn anew for each repeat, over two simulated replicas that batch 8.

    `padding_pct`: by how many percent length_aware's padded tokens exceed round_robin's. `p95_pct`: its p95 of latency
    against least_work's. A step of the simulated engine takes as long for 8 rows as for one, padded or not.
    """
    repeats: list[dict[str, tuple[float, float]]] = [{} for _ in range(REPEATS)]
    with ExitStack() as stack:
        replicas = [
            Launches(stack.enter_context(Replica(_simulated(), index=index, device="cpu", log=subject.log(index))))
            for index in range(REPLICAS)
        ]
        for number, found in enumerate(repeats):
            rng = random.Random(number)  # noqa: S311
            requests = [
                Request(f"{number}-{index}", (index + 1,) * rng.choice(LENGTHS), NEW_TOKENS)
                for index in range(REQUESTS)
            ]
            for policy in POLICIES:
                with ReplicaDispatcher(
                    replicas, policy, microbatch_window_ms=WINDOW_MS, microbatch_max=BATCH
                ) as dispatcher:
                    futures = [dispatcher.dispatch(request) for request in requests]
                    completions = [future.result() for future in futures]
                launches = [lengths for replica in replicas for lengths in replica.take()]
                found[policy] = (padded_share(launches), _p95_ms(completions))
    return routing_figures(repeats)


def routing_figures(repeats: Sequence[Mapping[str, tuple[float, float]]]) -> Figures:
    """`length_routing`'s figures, from each repeat's padded share and p95 by policy."""
    return {
        "padding_pct": [100 * (each["length_aware"][0] / each["round_robin"][0] - 1) for each in repeats],
        "p95_pct": [100 * (each["length_aware"][1] / each["least_work"][1] - 1) for each in repeats],
    }


def padded_share(launches: Sequence[Lengths]) -> float:
    """Of the tokens that launches with prompts of these lengths prefill, those that are padding."""
    return 1 - sum(map(sum, launches)) / sum(len(lengths) * max(lengths) for lengths in launches)


def _p95_ms(completions: Sequence[Completion]) -> float:
    return statistics.quantiles([(each.end_ns - each.dispatched_ns) / 1e6 for each in completions], n=20)[-1]


def _simulated() -> EngineSpec:
    return EngineSpec("skote.engines.simulated.SimulatedEngine", {"prefill_ms": 1.0, "token_ms": 1.0})
