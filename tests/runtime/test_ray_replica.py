"""What Ray adds to a replica: placement, machines that are lost, clocks, and sentences of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from skote.runtime import ray_replica
from skote.runtime.backend import backend_devices, check_backend
from skote.runtime.dispatch import ReplicaDispatcher
from skote.runtime.ray_cluster import RayCluster, check_address, ray_devices, threads_per_bundle
from skote.runtime.ray_replica import RayReplica
from skote.types import CapacityError, EngineSpec, ReplicaError, Request, UsageError

ROOT = Path(__file__).parent.parent.parent
SIMULATED = "skote.engines.simulated.SimulatedEngine"
WAIT_S = 60.0


def node_of(cluster: RayCluster, index: int) -> str:
    """Ray's id of the machine that holds a bundle."""
    from ray.util import placement_group_table

    return placement_group_table(cluster._group)["bundles_to_node_id"][index]


@pytest.mark.slow
def test_replicas_are_spread_over_machines_and_share_their_cores(ray_nodes: Any) -> None:
    with RayCluster(ray_nodes.address, ["cpu", "cpu"]) as cluster:
        assert cluster.threads == 8
        assert node_of(cluster, 0) != node_of(cluster, 1)


@pytest.mark.slow
def test_a_lost_machine_fails_what_it_had_begun_and_the_replica_comes_back_on_another(ray_nodes: Any) -> None:
    spec = EngineSpec(SIMULATED, {"prefill_ms": 50.0})
    with RayCluster(ray_nodes.address, ["cpu", "cpu"]) as cluster:
        ray_nodes.add_node(num_cpus=8, object_store_memory=100 * 2**20, include_dashboard=False)
        lost = node_of(cluster, 0)
        with (
            RayReplica(cluster, spec, index=0, device="cpu") as first,
            RayReplica(cluster, spec, index=1, device="cpu") as second,
        ):
            first.wait_ready(WAIT_S)
            second.wait_ready(WAIT_S)
            with ReplicaDispatcher([first, second], max_restarts=1) as dispatcher:
                futures = [dispatcher.dispatch(Request(str(number), (1,), 2)) for number in range(40)]
                (node,) = (each for each in ray_nodes.list_all_nodes() if each.node_id == lost)
                ray_nodes.remove_node(node, allow_graceful=False)
                while len(dispatcher.events) < 2 and len(futures) < 2000:
                    futures.append(dispatcher.dispatch(Request(str(len(futures)), (1,), 2)))
                    futures[-40].result(WAIT_S)
                failed = [each for each in (future.result(WAIT_S) for future in futures) if each.status != "ok"]
                assert len(failed) <= 1
                assert all(str(each.error).startswith("Replica 0 (cpu) was lost with its Ray actor") for each in failed)
                assert node_of(cluster, 0) != lost
                assert first.generate([Request("again", (1,), 2)]).result(WAIT_S)[0].status == "ok"
                assert [event.what for event in dispatcher.events] == ["ended", "restarted"]


@pytest.mark.slow
def test_an_idle_replica_that_ends_is_noticed(ray_home: RayCluster) -> None:
    with RayReplica(ray_home, EngineSpec(SIMULATED), index=0, device="cpu") as replica:
        replica.wait_ready(WAIT_S)
        watch = replica._life.actor.ended.remote()
        os.kill(replica.pid, signal.SIGKILL)
        assert replica._ray.get(watch, timeout=WAIT_S) == "Replica 0 (cpu) was killed by SIGKILL."


@pytest.mark.slow
def test_an_actor_that_is_gone_is_a_replica_that_was_lost(ray_home: RayCluster) -> None:
    with RayReplica(ray_home, EngineSpec(SIMULATED, {"prefill_ms": 60_000.0}), index=0, device="cpu") as replica:
        replica.wait_ready(WAIT_S)
        begun = replica.generate([Request("a", (1,), 2)])
        replica._ray.kill(replica._life.actor)
        (lost,) = begun.result(WAIT_S)
        assert (lost.status, lost.output_ids) == ("error", ())
        assert str(lost.error).startswith("Replica 0 (cpu) was lost with its Ray actor: ")
        assert replica.death == lost.error
        with pytest.raises(ReplicaError, match="was lost with its Ray actor"):
            replica.call("describe").result(WAIT_S)


@pytest.mark.slow
def test_stamps_of_another_clock_are_brought_to_this_one(
    ray_home: RayCluster, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The clock is said to be another, and is not: its true offset is 0."""
    monkeypatch.setattr(ray_replica, "clock_id", lambda: "another machine")
    log = tmp_path / "replica.log"
    with RayReplica(ray_home, EngineSpec(SIMULATED), index=0, device="cpu", log=log) as replica:
        replica.wait_ready(WAIT_S)
        (answer,) = replica.generate([Request("a", (1,), 3)]).result(WAIT_S)
        assert not replica.here
        clock = replica.placement["clock"]
        assert 0 < clock["uncertainty_ns"] < 1e9
        assert abs(clock["offset_ns"]) <= clock["uncertainty_ns"] + 1
        stamps = [answer.admitted_ns, *(chunk.t_ns for chunk in answer.chunks)]
        assert stamps == sorted(stamps)
        assert answer.dispatched_ns - clock["uncertainty_ns"] <= stamps[0]
        assert stamps[-1] <= answer.end_ns + clock["uncertainty_ns"]
    assert not log.exists()


@pytest.mark.slow
def test_an_engine_that_cannot_be_built_keeps_its_error(ray_home: RayCluster) -> None:
    with RayReplica(ray_home, EngineSpec(SIMULATED, {"speed": 9}), index=0, device="cpu") as replica:
        with pytest.raises(UsageError, match="does not take these options"):
            replica.wait_ready(WAIT_S)
        assert not replica.alive


@pytest.mark.slow
def test_placement_says_where_a_replica_lives(ray_home: RayCluster) -> None:
    with RayReplica(ray_home, EngineSpec(SIMULATED), index=2, device="cpu") as replica:
        replica.wait_ready(WAIT_S)
        assert replica.here
        assert replica.placement == {"cores": None, "node": os.uname().nodename, "clock": None}


@pytest.mark.slow
def test_devices_are_those_of_the_whole_ray(ray_nodes: Any) -> None:
    address = ray_nodes.address
    assert ray_devices(16, address) == ["cpu"] * 16
    assert ray_devices("all", address) == ["cpu"]
    with pytest.raises(CapacityError, match=r"devices=17 was asked for; the Ray at .* has 0 GPU\(s\) and 16 CPU\(s\)"):
        ray_devices("17", address)
    with pytest.raises(CapacityError, match="17 CPU replicas were asked for"):
        RayCluster(address, ["cpu"] * 17)


@pytest.mark.parametrize(
    ("cpus", "replicas", "threads"),
    [([8, 8, 0], 2, 8), ([8, 8], 3, 4), ([4, 2], 3, 2), ([2], 3, None), ([], 1, None), ([1, 1], 2, 1)],
)
def test_threads_are_the_most_that_fit_on_the_machines(cpus: list[int], replicas: int, threads: int | None) -> None:
    assert threads_per_bundle(cpus, replicas) == threads


@pytest.mark.parametrize("address", ["head", "ray://head:10001", ":6379", "head:port"])
def test_an_address_that_is_none_is_refused(address: str) -> None:
    with pytest.raises(UsageError, match=r"router\.backend\.address must be HOST:PORT"):
        check_address(address)


@pytest.mark.parametrize("devices", ["cuda:1", ["cpu", "cuda:0"], []])
def test_ray_chooses_its_gpus(devices: object) -> None:
    pytest.importorskip("ray")
    with pytest.raises(UsageError, match="which chooses by itself"):
        ray_devices(devices, "head:6379")  # type: ignore[arg-type]


def test_a_backend_is_checked_before_anything_starts() -> None:
    with pytest.raises(UsageError, match=r"router\.backend\.name must be one of process, ray, got 'threads'"):
        check_backend("threads", None)
    with pytest.raises(UsageError, match=r"router\.backend\.address=head:6379 is for router/backend=ray"):
        check_backend("process", "head:6379")


def test_without_the_package_one_sentence_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UsageError, match=r'needs Ray, which is an extra: pip install "skotergy\[ray\]"\.$'):
        backend_devices("ray", None, 1)


JOINS = """
import sys
from skote.runtime.backend import backend_devices
from skote.runtime.ray_cluster import RayCluster
from skote.runtime.ray_replica import RayReplica
from skote.types import EngineSpec, Request, UsageError
try:
    backend_devices("ray", "127.0.0.1:1", 2)
except UsageError as error:
    print(error)
devices = backend_devices("ray", sys.argv[1], 2)
with RayCluster(sys.argv[1], devices) as cluster:
    with RayReplica(cluster, EngineSpec("skote.engines.simulated.SimulatedEngine"), index=1, device="cpu") as replica:
        replica.wait_ready(60)
        print(len(replica.generate([Request("a", (1,), 3)]).result(60)[0].output_ids))
"""


@pytest.mark.slow
def test_a_process_joins_a_ray_by_its_address_and_names_one_that_is_not_there(ray_nodes: Any) -> None:
    command = [sys.executable, "-c", JOINS, ray_nodes.address]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    refused, tokens = done.stdout.splitlines()
    assert refused.startswith("There is no Ray at router.backend.address=127.0.0.1:1 that can be joined: ")
    assert tokens == "3"
