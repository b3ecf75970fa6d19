"""The Ray that replicas live in: one that is started for them, or one that is there; and what they take of it."""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import TracebackType
from typing import Any

from skote.runtime.devices import Devices, resolve_devices, threads_per_replica
from skote.types import CapacityError, ReplicaError, UsageError

OBJECT_STORE_BYTES = 100 * 2**20  # prompts and answers are small; logits that a gate asks for are the largest
PLACEMENT_S = 60.0
SHARE = 0.25
"""Of a bundle: two arms, and a reference beside them, take turns on the same device."""
_REACH_S = 5.0


def import_ray() -> Any:  # noqa: ANN401 - an optional package, which has no types for us
    """The package.

    Raises:
        UsageError: it is not installed.
    """
    try:
        import ray
    except ImportError as error:
        raise UsageError('router/backend=ray needs Ray, which is an extra: pip install "skotergy[ray]".') from error
    return ray


def check_address(address: str | None) -> None:
    """Check the form of the address of a Ray's head: HOST:PORT, or None for a Ray of one's own.

    Raises:
        UsageError: it is another one; Ray's own client (`ray://`) knows no placement.
    """
    host, colon, port = (address or "localhost:1").rpartition(":")
    if not host or not colon or "/" in host or not port.isdecimal():
        raise UsageError(
            f"router.backend.address must be HOST:PORT of a Ray's head (`ray status` names it), or null to start a Ray "
            f"here, got {address!r}; run on one of its machines."
        )


@contextmanager
def connected(address: str | None, *, cpus: int = 0, gpus: int = 0) -> Iterator[Any]:
    """The package, connected to the Ray at `address`; where that is None to one of `cpus` and `gpus`, ended afterwards.

    A Ray that this process is connected to already is used, and stays.

    Raises:
        UsageError: Ray is not installed, or there is none at `address`.
        ReplicaError: it cannot be started.
    """
    from hydra.core.utils import env_override

    ray = import_ray()
    if ray.is_initialized():
        yield ray
        return
    check_address(address)
    quiet = {"log_to_driver": False, "logging_level": "ERROR"}
    try:
        if address is None:
            with env_override({"RAY_USAGE_STATS_ENABLED": "0"}):  # Ray asks nowhere else when it starts its processes
                ray.init(
                    address="local",
                    num_cpus=cpus,
                    num_gpus=gpus,
                    include_dashboard=False,
                    object_store_memory=OBJECT_STORE_BYTES,
                    **quiet,
                )
        else:
            host, _, port = address.rpartition(":")
            socket.create_connection((host, int(port)), _REACH_S).close()  # Ray itself would try for many minutes
            ray.init(address=address, **quiet)
    except (OSError, RuntimeError, ValueError) as error:
        reason = str(error).strip().partition("\n")[0].rstrip(".")
        if address is None:
            raise ReplicaError(f"Ray could not be started: {reason}.") from error
        raise UsageError(
            f"There is no Ray at router.backend.address={address} that can be joined: {reason}."
        ) from error
    try:
        yield ray
    finally:
        ray.shutdown()


def ray_devices(devices: Devices, address: str | None) -> list[str]:
    """One device a replica: GPUs (`cuda:0`, `cuda:1`, ..., wherever they are) where Ray has any, otherwise CPUs.

    Asks the Ray at `address`, or this machine where that is None.

    Raises:
        UsageError: `devices` is none of a number, all, cpu and a list of cpu: which GPU it is, Ray chooses; or as
            `connected`.
        CapacityError: more than there are.
    """
    import_ray()
    if address is None:
        names = resolve_devices(devices)
        kinds = {name.partition(":")[0] for name in names}
        if not kinds <= {"cpu", "cuda"} or (kinds == {"cuda"} and names != [f"cuda:{n}" for n in range(len(names))]):
            raise _cannot_choose(devices)
        return names
    if isinstance(devices, str) and devices.isdecimal():
        devices = int(devices)
    if isinstance(devices, Sequence) and devices != "all":
        names = [devices] if isinstance(devices, str) else list(devices)
        if not names or any(name != "cpu" for name in names):
            raise _cannot_choose(devices)
        return names
    if isinstance(devices, bool):
        raise _cannot_choose(devices)
    count = 1 if devices is None else devices
    if isinstance(count, int) and count < 1:
        raise UsageError(f"devices={count} must be at least 1.")
    with connected(address) as ray:
        there = ray.cluster_resources()
    gpus, cpus = int(there.get("GPU", 0)), int(there.get("CPU", 0))
    if not isinstance(count, int):
        return [f"cuda:{number}" for number in range(gpus)] or ["cpu"]
    if count > (gpus or cpus):
        raise CapacityError(f"devices={count} was asked for; the Ray at {address} has {gpus} GPU(s) and {cpus} CPU(s).")
    return [f"cuda:{number}" for number in range(count)] if gpus else ["cpu"] * count


def _cannot_choose(devices: Devices) -> UsageError:
    return UsageError(
        f"devices={devices!r} cannot be asked of router/backend=ray, which chooses by itself: use a number, all, cpu "
        "or a list of cpu."
    )


def threads_per_bundle(cpus: Sequence[int], replicas: int) -> int | None:
    """The most threads that each of `replicas` can have where machines have `cpus`; None where they do not fit."""
    return next((n for n in range(max(cpus, default=0), 0, -1) if sum(each // n for each in cpus) >= replicas), None)


class RayCluster:
    """One bundle of resources a replica, reserved as long as this is open: a GPU and a core, or a part of the cores.

    A bundle whose machine is lost is placed on another one by Ray, where there is room. `devices` as `ray_devices`
    gives them; `threads` is what a CPU replica has, None on GPUs.

    Raises:
        UsageError, ReplicaError: as `connected`.
        CapacityError: the resources are not there, or others use them.
    """

    def __init__(self, address: str | None, devices: Sequence[str]) -> None:
        self._gpu = devices[0] != "cpu"
        local = threads_per_replica(devices)
        cpus = len(devices) * (local or 1)
        self._connection = connected(address, cpus=cpus, gpus=len(devices) if self._gpu else 0)
        self._ray = self._connection.__enter__()
        try:
            self.threads = None if self._gpu else self._threads(len(devices))
            self._bundle = {"CPU": self.threads or 1, **({"GPU": 1} if self._gpu else {})}
            self._group = self._reserve(len(devices))
        except BaseException:
            self._connection.__exit__(*sys.exc_info())
            raise

    def __enter__(self) -> RayCluster:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ray.util.remove_placement_group(self._group)
        self._connection.__exit__(None, None, None)

    def new_actor(self, index: int, actor_class: type, *args: object) -> Any:  # noqa: ANN401 - Ray's handle
        """An actor in the bundle of replica `index`; it is placed when there is room, maybe later."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        amounts = {"num_cpus": SHARE * self._bundle["CPU"], "num_gpus": SHARE if self._gpu else 0}
        strategy = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=index)
        return self._ray.remote(actor_class).options(scheduling_strategy=strategy, **amounts).remote(*args)

    def actors(self, index: int, actor_class: type, *args: object) -> partial[Any]:
        """`new_actor`, to be called again and again."""
        return partial(self.new_actor, index, actor_class, *args)

    def _threads(self, replicas: int) -> int:
        cpus = [int(node["Resources"].get("CPU", 0)) for node in self._ray.nodes() if node["Alive"]]
        threads = threads_per_bundle(cpus, replicas)
        if threads is None:
            raise CapacityError(f"{replicas} CPU replicas were asked for; Ray's machines have {cpus} CPUs.")
        return threads

    def _reserve(self, replicas: int) -> Any:  # noqa: ANN401 - Ray's placement group
        from ray.util import placement_group

        group = placement_group([dict(self._bundle) for _ in range(replicas)], strategy="SPREAD")
        if not group.wait(PLACEMENT_S):
            self._ray.util.remove_placement_group(group)
            raise CapacityError(
                f"{replicas} replica(s) that take {_amounts(self._bundle)} each found no room in Ray within "
                f"{PLACEMENT_S:g} s: of {_amounts(self._ray.cluster_resources())} there are "
                f"{_amounts(self._ray.available_resources())} free."
            )
        return group


def _amounts(resources: Mapping[str, float]) -> str:
    return " and ".join(f"{resources.get(kind, 0):g} {kind}" for kind in ("CPU", "GPU"))
