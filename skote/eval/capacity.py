"""A capacity search: runs of one arm each, at loads that the search chooses, until the highest that keeps is known.

Part of the composition root.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from typing import Any

from skote.config import RunConfig
from skote.eval.arrivals import ArrivalConfig
from skote.eval.capacity_page import capacity_content, probe_entry, render_capacity, tried_loads
from skote.eval.plan import other_router, plan_run
from skote.eval.progress import RunProgress
from skote.eval.search import check_search, next_load
from skote.eval.session import Session
from skote.eval.sweep import Cell, Sweep, cell_key, finished_code
from skote.types import ExitCode

PARITY_REQUESTS = 8
_SEARCHED = ("workload.arrivals.rate", "workload.arrivals.speed_up")


@dataclass(frozen=True, slots=True)
class CapacitySearch:
    """A search in progress.

    Attributes:
        settings: of the whole; each probe has them, but for its arm, its load, and the seed of a further try.
        record: what has been probed; in its directory the pages go, and a folder for each probe.
        progress: opens what a person sees of one run.
        compare: whether there is a second arm.
        resumed: whether probes that came to their end before are taken as they are.
    """

    settings: RunConfig
    record: Sweep
    progress: Callable[[], AbstractContextManager[RunProgress]]
    command: str
    overrides: list[str]
    compare: bool
    resumed: bool

    def run(self) -> ExitCode:
        """Search for both arms, one after the other; 2 where a probe or the parity of the outputs is invalid.

        Raises:
            SkoteError: a run could not be planned, or failed; probes that had finished are on disk.
        """
        settings = self.settings
        check_search(settings.search, settings.workload.load, limited=bool(settings.slo.limits))
        self.record.write()
        try:
            return self._find()
        except KeyboardInterrupt:
            with self.progress() as progress:
                progress.say(f"Go on with resume={self.record.directory}")
            raise

    def _find(self) -> ExitCode:
        settings = self.settings
        codes = [self._compare_outputs()] if self.compare and settings.search.parity else []
        if ExitCode.INVALID in codes:
            return ExitCode.INVALID
        arms = {"candidate": settings} | ({"baseline": _as_candidate(settings)} if self.compare else {})
        found: dict[str, dict[str, Any]] = {}
        for name, own in arms.items():
            found[name] = {"engine": own.engine["name"], "probes": []}
            self._search(name, own, found[name]["probes"])
        what = "speed_up" if settings.workload.load == "trace" else "rate"
        content = capacity_content(found, settings.slo, what)
        path = render_capacity(self.record.directory, content)
        with self.progress() as progress:
            for name, arm in content["arms"].items():
                kept = arm["capacity_req_s"]
                progress.say(
                    f"  {name}: {'no load' if kept is None else f'{kept:.4g} requests a second'} kept the limits"
                )
            progress.say(str(path))
        valid = all(probe["valid"] for arm in content["arms"].values() for probe in arm["probes"])
        return ExitCode.worst([*codes, ExitCode.DONE if valid else ExitCode.INVALID])

    def _search(self, name: str, settings: RunConfig, probes: list[dict[str, Any]]) -> None:
        """Probe the arm of `settings` until its search has ended; `probes` grows by an entry a run."""
        while (load := next_load(tried_loads(probes), settings.search, settings.slo.attainment)) is not None:
            tries = sum(probe["load"] == load for probe in probes)
            cell = Cell(
                f"probes/{name}-{len(probes):02d}", [f"{_SEARCHED[settings.workload.load == 'trace']}={load!r}"]
            )
            self._run(_at_load(settings, load, tries, first=not probes), cell, f"{name} at {load:.4g}", compare=False)
            probes.append(probe_entry(self.record.directory / cell.directory, self.record.directory, load))

    def _compare_outputs(self) -> ExitCode:
        """One pass of a few requests through both arms, one at a time, for their parity alone."""
        workload = self.settings.workload
        settings = replace(
            self.settings,
            workload=replace(
                workload,
                load="closed",
                concurrency=1,
                arrivals=ArrivalConfig(),
                blocks=1,
                requests_per_block=min(PARITY_REQUESTS, workload.requests_per_block),
            ),
            measure=replace(self.settings.measure, stop=None),
        )
        return self._run(settings, Cell("probes/parity", []), "parity", compare=True)

    def _run(self, settings: RunConfig, cell: Cell, what: str, *, compare: bool) -> ExitCode:
        directory = self.record.directory / cell.directory
        directory.mkdir(parents=True, exist_ok=True)
        self.record.cells.append(cell)
        self.record.write()
        with self.progress() as progress:
            progress.say(f"Probe: {what}")
            plan = plan_run(settings, directory, progress, compare=compare)
            key = cell_key(asdict(settings), plan.workload.sha256)
            code = finished_code(directory, key) if self.resumed else None
            if code is not None:
                progress.say(f"Done before: {directory}")
            else:
                code = Session(plan, directory, progress, self.command, self.overrides, key).run()
        cell.end(code, None)
        self.record.write()
        return code


def _as_candidate(settings: RunConfig) -> RunConfig:
    """The baseline arm of `settings` as the one arm of a run, with its own devices and router."""
    devices = settings.devices if settings.other.devices is None else settings.other.devices
    return replace(settings, engine=settings.compare, devices=devices, router=other_router(settings))


def _at_load(settings: RunConfig, load: float, tries: int, *, first: bool) -> RunConfig:
    """A probe: one arm at `load`, with other requests for each further try of it."""
    workload = settings.workload
    trace = workload.load == "trace"
    arrivals = replace(workload.arrivals, speed_up=load) if trace else replace(workload.arrivals, rate=load)
    overhead = first and settings.measure.harness_overhead
    return replace(
        settings,
        compare={"name": "", "_target_": ""},
        workload=replace(workload, arrivals=arrivals),
        slo=replace(settings.slo, stop=True),
        measure=replace(settings.measure, stop=None, harness_overhead=overhead),
        seed=settings.seed + tries,
    )
