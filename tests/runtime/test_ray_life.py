"""A Ray replica's lives over a Ray that the test plays: what is left of it where a restart and a close meet."""

from __future__ import annotations

import threading
from collections import defaultdict
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from skote.runtime import ray_replica
from skote.runtime.ray_replica import RayReplica
from skote.runtime.replica_host import Hosted
from skote.types import EngineSpec, ReplicaError, SkoteError

WAIT_S = 10.0


class Actor:
    """Notes what it is asked; the test answers."""

    def __init__(self) -> None:
        self.asked: defaultdict[str, list[Future[Any]]] = defaultdict(list)
        self.opened = threading.Event()
        self.killed = False

    def __getattr__(self, method: str) -> Any:
        return SimpleNamespace(remote=lambda *_: self._ask(method))

    def _ask(self, method: str) -> Any:
        future: Future[Any] = Future()
        self.asked[method].append(future)
        if self.killed:
            future.set_exception(RuntimeError("The actor is dead."))
        if method == "open":
            self.opened.set()
        return SimpleNamespace(future=lambda: future)

    def kill(self) -> None:
        self.killed = True
        for futures in self.asked.values():
            for future in futures:
                if not future.done():
                    future.set_exception(RuntimeError("The actor is dead."))

    def is_ready(self) -> None:
        self.asked["open"][0].set_result(Hosted("here", 1, "clock", None, None))


class Cluster:
    """Gives an actor after another; `wait_for(n)` returns number n once it was asked to open."""

    def __init__(self) -> None:
        self.given: list[Actor] = []
        self._changed = threading.Condition()

    def actors(self, *_: object) -> Any:
        def new_actor() -> Actor:
            with self._changed:
                self.given.append(Actor())
                self._changed.notify_all()
                return self.given[-1]

        return new_actor

    def wait_for(self, number: int) -> Actor:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.given) > number, WAIT_S)
        assert self.given[number].opened.wait(WAIT_S)
        return self.given[number]


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    ray = SimpleNamespace(
        kill=lambda actor: actor.kill(),
        wait=lambda refs, timeout: None,
        exceptions=SimpleNamespace(RayTaskError=ZeroDivisionError),
    )
    monkeypatch.setattr(ray_replica, "import_ray", lambda: ray)
    monkeypatch.setattr(ray_replica, "clock_id", lambda: "clock")
    return Cluster()


def lose(actor: Actor, replica: RayReplica) -> None:
    actor.kill()
    with pytest.raises(ReplicaError, match="was lost with its Ray actor"):
        replica.call("describe").result(WAIT_S)


def in_a_thread(act: Any) -> tuple[threading.Thread, list[SkoteError]]:
    """`act`, running, and what it raised."""
    raised: list[SkoteError] = []

    def run() -> None:
        try:
            act()
        except SkoteError as error:
            raised.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, raised


def test_a_replica_that_is_closed_while_it_is_started_again_leaves_no_actor(cluster: Cluster) -> None:
    replica = RayReplica(cluster, EngineSpec("none"), index=0, device="cpu")  # type: ignore[arg-type]
    first = cluster.wait_for(0)
    first.is_ready()
    replica.wait_ready(WAIT_S)
    lose(first, replica)
    restarting, raised = in_a_thread(replica.restart)
    cluster.wait_for(1)
    closing, _ = in_a_thread(replica.close)
    closing.join(WAIT_S)
    restarting.join(WAIT_S)
    assert not closing.is_alive()
    assert not restarting.is_alive()
    assert all(actor.killed for actor in cluster.given)
    assert "was closed" in str(raised[0])


def test_a_replica_that_was_closed_is_not_started_again(cluster: Cluster) -> None:
    replica = RayReplica(cluster, EngineSpec("none"), index=0, device="cpu")  # type: ignore[arg-type]
    cluster.wait_for(0).is_ready()
    replica.close(0.0)
    with pytest.raises(ReplicaError, match="was closed"):
        replica.restart()
    assert len(cluster.given) == 1


def test_a_machine_that_is_lost_while_it_is_chosen_again_is_tried_again(cluster: Cluster) -> None:
    with RayReplica(cluster, EngineSpec("none"), index=0, device="cpu") as replica:  # type: ignore[arg-type]
        cluster.wait_for(0).is_ready()
        replica.wait_ready(WAIT_S)
        lose(cluster.given[0], replica)
        restarting, raised = in_a_thread(replica.restart)
        cluster.wait_for(1).kill()
        cluster.wait_for(2).is_ready()
        restarting.join(WAIT_S)
        assert not raised
        assert replica.death is None
