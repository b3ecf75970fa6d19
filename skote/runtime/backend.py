"""Where replicas live: processes of this machine, or Ray actors; one way to start either."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol, Self

from skote.flags import NumericFlags
from skote.runtime import affinity
from skote.runtime.devices import Devices, resolve_devices, threads_per_replica
from skote.runtime.lane import Launcher
from skote.runtime.ray_cluster import RayCluster, check_address, import_ray, ray_devices
from skote.runtime.ray_replica import RayReplica
from skote.runtime.replica import Replica
from skote.runtime.replica_host import seen_device
from skote.types import EngineSpec, UsageError

BACKENDS = ("process", "ray")


class AnyReplica(Launcher, Protocol):
    """What `skote.runtime.replica.Replica` and `skote.runtime.ray_replica.RayReplica` have in common."""

    @property
    def alive(self) -> bool:
        """Whether it has not ended."""

    @property
    def pid(self) -> int:
        """The engine's process, on its own machine."""

    def wait_ready(self, timeout: float | None = None) -> None:
        """Block until the engine is built."""

    def call(self, method: str, *args: object) -> Future[Any]:
        """Call a public method of the engine."""

    def stop(self) -> None:
        """Ask it to end once it has answered what it was given."""

    def close(self, grace_s: float = 5.0) -> None:
        """End it."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *error: Any) -> None: ...  # noqa: ANN401


class Backend(Protocol):
    """Starts replicas, and knows where they are."""

    def threads(self, devices: Sequence[str]) -> int | None:
        """CPU threads of a replica on one of `devices`; None leaves them to the engine."""

    def device(self, device: str) -> str:
        """What an engine there calls `device`."""

    def start(
        self,
        spec: EngineSpec,
        devices: Sequence[str],
        index: int,
        *,
        flags: NumericFlags,
        log: Path | None,
        hide_ids: bool,
        hang_s: float | None,
    ) -> AnyReplica:
        """A replica on `devices[index]`, with `flags` set, near its device's cores; arguments as those of `Replica`."""

    def placement(self, replica: AnyReplica, devices: Sequence[str]) -> dict[str, Any]:
        """Where a replica that is ready lives, as JSON values: its `cores` (null: all), and what else is known."""

    def is_here(self, replica: AnyReplica) -> bool:
        """Whether it lives on this machine."""


class ProcessBackend:
    """Processes of this machine."""

    def threads(self, devices: Sequence[str]) -> int | None:
        """As `Backend.threads`."""
        return threads_per_replica(devices)

    def device(self, device: str) -> str:
        """As `Backend.device`."""
        return device

    def start(
        self,
        spec: EngineSpec,
        devices: Sequence[str],
        index: int,
        *,
        flags: NumericFlags,
        log: Path | None,
        hide_ids: bool,
        hang_s: float | None,
    ) -> AnyReplica:
        """As `Backend.start`."""
        setup = partial(affinity.prepare, flags, affinity.cores_of(devices)[index])
        return Replica(spec, index=index, device=devices[index], setup=setup, log=log, hide_ids=hide_ids, hang_s=hang_s)

    def placement(self, replica: AnyReplica, devices: Sequence[str]) -> dict[str, Any]:
        """As `Backend.placement`."""
        return {"cores": affinity.cores_of(devices)[replica.index]}

    def is_here(self, replica: AnyReplica) -> bool:
        """As `Backend.is_here`."""
        del replica
        return True


@dataclass(frozen=True, slots=True)
class RayBackend:
    """Actors in a Ray."""

    cluster: RayCluster

    def threads(self, devices: Sequence[str]) -> int | None:
        """As `Backend.threads`."""
        del devices
        return self.cluster.threads

    def device(self, device: str) -> str:
        """As `Backend.device`."""
        return seen_device(device)

    def start(
        self,
        spec: EngineSpec,
        devices: Sequence[str],
        index: int,
        *,
        flags: NumericFlags,
        log: Path | None,
        hide_ids: bool,
        hang_s: float | None,
    ) -> AnyReplica:
        """As `Backend.start`."""
        return RayReplica(
            self.cluster,
            spec,
            index=index,
            device=devices[index],
            setup=partial(affinity.prepare, flags),
            log=log,
            hide_ids=hide_ids,
            hang_s=hang_s,
        )

    def placement(self, replica: AnyReplica, devices: Sequence[str]) -> dict[str, Any]:
        """As `Backend.placement`."""
        del devices
        return replica.placement if isinstance(replica, RayReplica) else {}

    def is_here(self, replica: AnyReplica) -> bool:
        """As `Backend.is_here`."""
        return isinstance(replica, RayReplica) and replica.here


def check_backend(name: str, address: str | None) -> None:
    """Check what a configuration says of a backend, before anything starts.

    Raises:
        UsageError: an unknown name, an address that is none or that nobody asks for, a package that is missing.
    """
    if name not in BACKENDS:
        raise UsageError(f"router.backend.name must be one of {', '.join(BACKENDS)}, got {name!r}.")
    if name == "ray":
        check_address(address)
        import_ray()
    elif address is not None:
        raise UsageError(f"router.backend.address={address} is for router/backend=ray.")


def backend_devices(name: str, address: str | None, devices: Devices) -> list[str]:
    """One device a replica: `resolve_devices` of this machine, or `ray_devices`, with their errors."""
    check_backend(name, address)
    return ray_devices(devices, address) if name == "ray" else resolve_devices(devices)


@contextmanager
def open_backend(name: str, address: str | None, devices: Sequence[str]) -> Iterator[Backend]:
    """The backend, with room for a replica on each of `devices`; close all replicas first.

    Raises:
        UsageError: as `check_backend`, or there is no Ray at `address`.
        CapacityError: Ray has no room.
        ReplicaError: Ray cannot be started.
    """
    check_backend(name, address)
    if name == "process":
        yield ProcessBackend()
        return
    with RayCluster(address, devices) as cluster:
        yield RayBackend(cluster)
