"""An arm of a run: one engine on every device, each replica in its own process, behind a dispatcher.

Part of the composition root.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from skote.config import EngineConfig, RouterConfig
from skote.eval.cache_probe import CacheProbe, run_probe
from skote.eval.measure import Arm as ArmName
from skote.flags import flags_for
from skote.runtime.backend import AnyReplica, Backend, ProcessBackend
from skote.runtime.dispatch import ReplicaDispatcher
from skote.types import Completion, EngineSpec, Request


@dataclass(slots=True)
class Arm:
    """A started arm. `close` belongs to the stack that `start_arm` was given.

    `keeps_prefixes` says that its engine was asked to keep what it computes of prompts.
    """

    name: ArmName
    engine: str
    replicas: list[AnyReplica]
    dispatcher: ReplicaDispatcher
    load_s: list[float]
    backend: Backend
    devices: Sequence[str]
    tpot_slo_ms: float | None
    keeps_prefixes: bool = False
    warmup_s: list[float] = field(default_factory=list)

    def warm_up(self, requests: Sequence[Request]) -> list[Completion]:
        """Run `requests` on every replica, all replicas at once, and return what became of them."""
        completions: list[Completion] = []
        started = time.monotonic()
        for request in self.salted(requests):
            launches = [replica.generate([request]) for replica in self.replicas]
            completions.extend(completion for launch in launches for completion in launch.result())
        self.warmup_s = [time.monotonic() - started] * len(self.replicas)
        return completions

    def salted(self, requests: Sequence[Request]) -> Sequence[Request]:
        """`requests` as one pass: where the engine keeps prefixes, they share theirs with each other and with nothing
        that it was asked before or after.

        The salt is drawn, so that it tells the engine nothing of the pass.
        """
        if not self.keeps_prefixes:
            return requests
        salt = secrets.token_hex(8)
        return [replace(request, cache_salt=salt) for request in requests]

    def probe_cache(self, probe: CacheProbe | None) -> dict[str, Any] | None:
        """What `run_probe` finds of its first replica.

        None without a probe, where the replica has ended, and on Ray, where tokens are told with the end of an answer.
        """
        if probe is None or not self.replicas[0].alive or not isinstance(self.backend, ProcessBackend):
            return None
        return run_probe(self.replicas[0], self.salted, probe)

    @property
    def pids_here(self) -> list[int]:
        """The engines' processes on this machine."""
        return [each.pid for each in self.replicas if each.alive and self.backend.is_here(each)]

    @property
    def is_here(self) -> bool:
        """Whether all its replicas live on this machine."""
        return all(map(self.backend.is_here, self.replicas))

    @property
    def events(self) -> list[dict[str, Any]]:
        """What befell its replicas so far, as `skote.runtime.revivals.ReplicaEvent`s, JSON values."""
        return [asdict(event) for event in self.dispatcher.events]

    def describe(self) -> dict[str, Any]:
        """The manifest's entry for this arm."""
        infos = [replica.call("describe") for replica in self.replicas]
        asked = [replica.call("peak_memory") for replica in self.replicas]
        peaks = [each.result() for each in asked]
        return {
            "engine": self.engine,
            "events": self.events,
            "replicas": [
                {
                    "device": replica.device,
                    **self.backend.placement(replica, self.devices),
                    "load_s": load_s,
                    "warmup_s": warmup_s,
                    "peak_memory_bytes": peak["host_bytes"],
                    "peak_device_memory_bytes": peak["device_bytes"] or None,
                    **({} if self.tpot_slo_ms is None else {"slowed": counts.slowed}),
                    "info": info.result(),
                }
                for replica, counts, load_s, warmup_s, info, peak in zip(
                    self.replicas,
                    self.dispatcher.counts,
                    self.load_s,
                    self.warmup_s,
                    infos,
                    peaks,
                    strict=True,
                )
            ],
        }


def start_arm(
    stack: ExitStack,
    name: ArmName,
    config: EngineConfig,
    *,
    model: dict[str, Any],
    devices: Sequence[str],
    dtype: str,
    router: RouterConfig,
    backend: Backend,
    log_dir: Path | None,
    timeout_s: float,
) -> Arm:
    """Start one replica a device on `backend` and wait until all engines are loaded; `stack` ends the processes.

    `model` holds the keyword arguments that say which model; the engine's own options win over them.

    Raises:
        SkoteError: an engine could not be built; the first one's own error.
    """
    threads = backend.threads(devices)
    started = time.monotonic()
    replicas = []
    for index, device in enumerate(devices):
        own = {"device": backend.device(device), "dtype": dtype, "threads": threads}
        replicas.append(
            stack.enter_context(
                backend.start(
                    EngineSpec(config._target_, model | own | _given(config.options)),
                    devices,
                    index,
                    flags=flags_for(dtype, threads),
                    log=log_dir / f"{name}-{index}.log" if log_dir else None,
                    hide_ids=True,  # p00, w00 and b00-r00 would tell an engine when it is measured
                    hang_s=router.hang_s,
                )
            )
        )
    load_s = []
    for replica in replicas:
        replica.wait_ready(timeout_s)
        load_s.append(time.monotonic() - started)
    dispatcher = stack.enter_context(
        ReplicaDispatcher(
            replicas,
            router.policy,
            max_concurrency_per_device=router.max_concurrency_per_device,
            microbatch_window_ms=router.microbatch_window_ms,
            microbatch_max=router.microbatch_max,
            max_queue=router.max_queue,
            max_restarts=router.max_restarts,
            tpot_slo_ms=router.tpot_slo_ms,
        )
    )
    keeps_prefixes = bool(config.options.get("prefix_cache"))
    return Arm(name, config.name, replicas, dispatcher, load_s, backend, devices, router.tpot_slo_ms, keeps_prefixes)


def _given(options: dict[str, Any]) -> dict[str, Any]:
    """An engine's options that the configuration states; a null leaves the run's own choice."""
    return {key: value for key, value in options.items() if value is not None}


def tier_lines(info: dict[str, Any]) -> list[str]:
    """What an engine says of itself, for the terminal."""
    tier = "" if info.get("tier") is None else f"tier {info['tier']}: "
    lines = [tier + info.get("tier_reason", "no description"), *info.get("notes", [])]
    if info.get("compile_s") is not None:
        lines.append(f"compiled in {info['compile_s']:.1f} s (the compiler's cache makes the next start faster)")
    return lines
