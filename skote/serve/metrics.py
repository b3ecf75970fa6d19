"""What /metrics tells, in Prometheus' text form: load and speed by replica."""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Iterator, Sequence
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from skote.runtime.lane import ReplicaLoad
from skote.runtime.revivals import ReplicaEvent
from skote.serve.generation import Outcome
from skote.types import Completion

TTFT_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
TPOT_S = (0.0002, 0.0005, 0.001, 0.002, 0.003, 0.004, 0.005, 0.0075, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)


class Replicas(Protocol):
    """Whose load is told (`skote.runtime.router.Router`)."""

    @property
    def loads(self) -> list[ReplicaLoad]:
        """What each replica has to do now."""

    @property
    def events(self) -> list[ReplicaEvent]:
        """What befell them."""


class Metrics:
    """Counts requests as they end; loads are read when somebody asks.

    A replica's label is its index; -1 stands for requests that none took. Times are those of METRICS.md, `ttft_ms` and
    `tpot_ms`, in seconds, by stamps that are taken in the replica's process.
    """

    def __init__(self, replicas: Replicas) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_Loads(replicas))
        ProcessCollector(registry=self._registry)
        each = ("replica",)
        self._requests = self._counter("skote_requests", "Requests that have ended, by how.", (*each, "outcome"))
        self._prompt_tokens = self._counter("skote_prompt_tokens", "Tokens of prompts that were taken.", each)
        self._cached_tokens = self._counter("skote_cached_prompt_tokens", "Of these, found in the prefix cache.", each)
        self._output_tokens = self._counter("skote_output_tokens", "Tokens that were generated.", each)
        self._refused = self._counter(
            "skote_refused_requests", "HTTP requests that were refused, by status.", ("status",)
        )
        self._ttft = self._histogram("skote_ttft_seconds", "From the dispatch to the first token.", TTFT_S)
        self._tpot = self._histogram("skote_tpot_seconds", "Between two tokens, the mean of a request.", TPOT_S)

    def ended(self, completion: Completion, outcome: Outcome) -> None:
        """Count a request that the router has answered."""
        replica = str(completion.replica)
        self._requests.labels(replica, outcome).inc()
        if completion.admitted_ns is not None:
            self._prompt_tokens.labels(replica).inc(completion.input_tokens)
            self._cached_tokens.labels(replica).inc(completion.cached_tokens or 0)
        self._output_tokens.labels(replica).inc(len(completion.output_ids))
        if not completion.chunks:
            return
        first, last = completion.chunks[0], completion.chunks[-1]
        self._ttft.labels(replica).observe((first.t_ns - completion.dispatched_ns) / 1e9)
        later_tokens = len(completion.output_ids) - first.n_tokens
        if later_tokens:
            self._tpot.labels(replica).observe((last.t_ns - first.t_ns) / 1e9 / later_tokens)

    def refused(self, status: int) -> None:
        """Count an HTTP request that got no answer but a sentence."""
        self._refused.labels(str(status)).inc()

    def text(self) -> bytes:
        """All of it, as Prometheus reads it."""
        return generate_latest(self._registry)

    def _counter(self, name: str, what: str, labels: Sequence[str]) -> Counter:
        return Counter(name, what, labels, registry=self._registry)

    def _histogram(self, name: str, what: str, buckets: Sequence[float]) -> Histogram:
        return Histogram(name, what, ("replica",), buckets=buckets, registry=self._registry)


class _Loads:
    """What is true at the moment when somebody asks."""

    def __init__(self, replicas: Replicas) -> None:
        self._replicas = replicas

    def collect(self) -> Iterator[Metric]:
        """As prometheus_client's collectors."""
        waiting = GaugeMetricFamily("skote_requests_waiting", "Requests in a replica's queue.", labels=["replica"])
        running = GaugeMetricFamily("skote_requests_running", "Requests that a replica has.", labels=["replica"])
        free = GaugeMetricFamily("skote_free_slots", "Launches that a replica could take at once.", labels=["replica"])
        mean = GaugeMetricFamily(
            "skote_recent_prompt_tokens", "The recent mean length of a replica's prompts.", labels=["replica"]
        )
        kept = GaugeMetricFamily(
            "skote_kept_prompt_tokens", "Tokens of prompts that a replica has in store.", labels=["replica"]
        )
        alive = GaugeMetricFamily("skote_replica_alive", "Whether a replica takes requests.", labels=["replica"])
        restarts = CounterMetricFamily(
            "skote_replica_restarts", "Replicas that were started again.", labels=["replica"]
        )
        restarted = Tally(event.replica for event in self._replicas.events if event.what == "restarted")
        for load in self._replicas.loads:
            replica = [str(load.index)]
            waiting.add_metric(replica, load.waiting)
            running.add_metric(replica, load.running)
            free.add_metric(replica, load.free_slots)
            mean.add_metric(replica, load.mean_prompt_tokens or 0.0)
            kept.add_metric(replica, load.kept_tokens)
            alive.add_metric(replica, load.alive)
            restarts.add_metric(replica, restarted[load.index])
        yield from (waiting, running, free, mean, kept, alive, restarts)
