"""A replica's host on its own machine: what a Ray actor holds. The engine has a process of its own there, too.

So Ray's threads share no interpreter with the engine whose tokens are stamped, and all that a replica of this machine
can do (crash, hang, cancel, be asked) is done by the same code on any other.
"""

from __future__ import annotations

import asyncio
import platform
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from skote.runtime.affinity import Cores, cores_of
from skote.runtime.remote_clock import clock_id
from skote.runtime.replica import Replica
from skote.types import Completion, EngineSpec, Request

WATCH_S = 0.1
"""How often a host looks whether its idle replica has ended; a busy one's end comes with the answers."""


def seen_device(device: str) -> str:
    """What an actor calls its device: of the GPUs it sees the one that Ray gave it, whatever its number elsewhere."""
    return "cuda:0" if device.startswith("cuda") else device


@dataclass(frozen=True, slots=True)
class Hosting:
    """What a host starts: the arguments of `Replica`, but for `setup`, which gets the cores that are chosen there.

    `log` is written where the host's machine is the asker's (`clock`, its `clock_id`), and nowhere else.
    """

    spec: EngineSpec
    index: int
    device: str
    setup: Callable[[Cores | None], None] | None
    log: Path | None
    clock: str | None
    hide_ids: bool
    hang_s: float | None


@dataclass(frozen=True, slots=True)
class Hosted:
    """Where a replica has come up: its machine and process, what its clock is, the cores that it keeps to, its rows."""

    node: str
    pid: int
    clock: str | None
    cores: Cores | None
    rows: int | None


@dataclass(frozen=True, slots=True)
class Answer:
    """A launch's completions by the host's clock, when it came and was answered, and why the replica ended, if so.

    Beside them what the engine has in store then, as `Replica.kept_tokens`.
    """

    received_ns: int
    replied_ns: int
    completions: list[Completion]
    death: str | None
    kept_tokens: int


class ReplicaHost:
    """Starts one replica and passes calls on. Asynchronous, so that a cancel goes past the launches before it.

    Messages may come in another order than they were sent: launches, numbered from 0, wait for their turn, and a cancel
    for its launch.

    `paths` are the asker's `sys.path`: what of it is missing here is added, since engines may lie there.
    """

    def __init__(self, paths: Sequence[str]) -> None:
        sys.path.extend(path for path in paths if path not in sys.path)
        self._launches: dict[int, Future[list[Completion]]] = {}
        self._cancels: dict[int, list[int]] = {}
        self._next = 0
        self._turn = asyncio.Condition()
        self._opened = asyncio.Event()
        self._paces: asyncio.Queue[int] | None = None

    async def open(self, hosting: Hosting) -> Hosted:
        """Start the replica, and wait until its engine is built; raises as `Replica` and its `wait_ready`."""
        clock = clock_id()
        (cores,) = cores_of([seen_device(hosting.device)])
        self._replica = Replica(
            hosting.spec,
            index=hosting.index,
            device=hosting.device,
            setup=None if hosting.setup is None else partial(hosting.setup, cores),
            log=hosting.log if clock is not None and clock == hosting.clock else None,
            hide_ids=hosting.hide_ids,
            hang_s=hosting.hang_s,
        )
        self._opened.set()
        await asyncio.to_thread(self._replica.wait_ready)
        return Hosted(platform.node(), self._replica.pid, clock, cores, self._replica.rows)

    async def ping(self) -> tuple[int, int]:
        """When a message came and was answered, by this machine's clock."""
        return time.monotonic_ns(), time.monotonic_ns()

    async def generate(self, number: int, requests: Sequence[Request]) -> Answer:
        """As `Replica.generate`; `number` names the launch for `cancel`."""
        received_ns = time.monotonic_ns()
        await self._opened.wait()
        async with self._turn:
            await self._turn.wait_for(lambda: self._next == number)
            launch = self._launches[number] = self._replica.generate(requests)
            self._next += 1
            self._turn.notify_all()
        for row in self._cancels.pop(number, ()):
            self._replica.cancel(launch, row)
        completions = await asyncio.wrap_future(launch)
        del self._launches[number]
        return Answer(received_ns, time.monotonic_ns(), completions, self._replica.death, self._replica.kept_tokens)

    async def cancel(self, number: int, row: int) -> None:
        """As `Replica.cancel`; nothing where the launch was answered."""
        launch = self._launches.get(number)
        if launch is not None:
            self._replica.cancel(launch, row)
        elif number >= self._next:
            self._cancels.setdefault(number, []).append(row)

    async def call(self, method: str, args: tuple[Any, ...]) -> Any:  # noqa: ANN401 - whatever the engine gives
        """As `Replica.call`."""
        await self._opened.wait()
        return await asyncio.wrap_future(self._replica.call(method, *args))

    async def pace(self) -> int:
        """The next that `Replica.watch_pace` hears; asked again for each."""
        if self._paces is None:
            loop = asyncio.get_running_loop()
            paces = self._paces = asyncio.Queue()

            def put(tpot_ns: int) -> None:
                loop.call_soon_threadsafe(paces.put_nowait, tpot_ns)

            self._replica.watch_pace(put)
        return await self._paces.get()

    async def ended(self) -> str:
        """Why the replica ended, as soon as it has."""
        while (death := self._replica.death) is None:
            await asyncio.sleep(WATCH_S)
        return death

    async def stop(self) -> None:
        """As `Replica.stop`."""
        await asyncio.to_thread(self._replica.stop)

    async def close(self, grace_s: float) -> None:
        """As `Replica.close`."""
        await asyncio.to_thread(self._replica.close, grace_s)
