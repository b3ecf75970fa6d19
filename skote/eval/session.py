"""One run, from a typed configuration to a directory with rows, manifest, metrics and report.

Part of the composition root: it knows every layer, and nothing but `runner` knows it.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from skote.config import EngineConfig, RouterConfig
from skote.contracts.check import Figures, Subject, run_checks
from skote.eval.adaptive import StopRule, decide, primary_effect
from skote.eval.arms import Arm, start_arm, tier_lines
from skote.eval.conversation import as_sent
from skote.eval.derive import Measured
from skote.eval.environment import describe_machine
from skote.eval.gate import ParityGate
from skote.eval.harness import measure_overhead
from skote.eval.journal import Journal
from skote.eval.measure import Arm as ArmName
from skote.eval.measure import Pass, plan_passes
from skote.eval.noise import CpuMeter
from skote.eval.outcome import closing_lines, write_outcome
from skote.eval.parity import Ids
from skote.eval.plan import SIMULATED, Plan
from skote.eval.progress import RunProgress
from skote.eval.record import RowKey, Run, RunWriter, clear_run, read_run
from skote.eval.report import render_run
from skote.eval.reproduce import compare_runs
from skote.eval.schema_version import SCHEMA_VERSION
from skote.eval.sending import send_block
from skote.eval.slo import Watch
from skote.eval.summary import summarize
from skote.eval.telemetry import Telemetry
from skote.eval.wording import stop_sentence
from skote.runtime.backend import AnyReplica, Backend, ProcessBackend, open_backend
from skote.runtime.capacity import describe_accelerators, gpu_uuids
from skote.runtime.ceilings import measure_ceilings
from skote.runtime.devices import threads_per_replica
from skote.runtime.stops import Stopping
from skote.types import Completion, EngineError, ExitCode, RecordError

_REFERENCE = EngineConfig(
    name="reference",
    _target_="skote.engines.transformers.TransformersEngine",
    options={"score_at_once": True},  # of a reference the logits are wanted, not the path
)


@dataclass
class Session:
    """A run in progress: what has been found so far, and the files that it goes to."""

    plan: Plan
    directory: Path
    progress: RunProgress
    command: str
    overrides: list[str]
    cell_key: str
    against: Run | None = None
    passes: list[dict[str, Any]] = field(default_factory=list)
    outputs: dict[ArmName, dict[str, Ids]] = field(default_factory=lambda: {"candidate": {}, "baseline": {}})
    harness: dict[str, Any] | None = None
    parity: dict[str, Any] | None = None
    roofline: dict[str, Any] | None = None
    stop: dict[str, Any] | None = None
    arms: dict[ArmName, dict[str, Any]] = field(default_factory=dict)
    reproduction: list[dict[str, Any]] | None = None
    contracts: dict[str, Figures] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.arms |= {name: {"engine": config.name, "replicas": []} for name, config in self.plan.arms.items()}
        self.workload = self.plan.workload
        self.later_prompts: dict[ArmName, dict[str, Ids]] = {name: {} for name in self.plan.arms}
        self.watches = {name: Watch(self.plan.settings.slo, len(self.workload.requests)) for name in self.plan.arms}
        self.run_id = uuid.uuid4().hex
        self.started = datetime.now(UTC)
        self.clock = {"wall_ns": time.time_ns(), "monotonic_ns": time.monotonic_ns()}
        self.machine = describe_machine(describe_accelerators())
        self.writer = RunWriter(self.directory, self.run_id, self.plan.workload.sha256)
        self.journal = Journal(self.directory)
        self.backend: Backend = ProcessBackend()
        self.elsewhere = self.plan.settings.router.backend.address is not None  # until the replicas say
        devices = max(self.plan.devices, self.plan.other_devices, key=len)
        self.telemetry = Telemetry(self.directory, {} if self.elsewhere else gpu_uuids(devices))

    def run(self) -> ExitCode:
        """Measure, and write everything; the run's exit code.

        Raises:
            SkoteError: an arm could not be started or judged, or a file could not be written. What had finished is on
                disk by then, as it is after a KeyboardInterrupt.
        """
        clear_run(self.directory)
        # Until the end says otherwise the run counts as interrupted, so that a killed one reads as what it is.
        self._write("interrupted")
        try:
            with ExitStack() as stack:
                if self.plan.arms:
                    self._measure(stack)
            self._measure_ceilings()
            self._check_contracts()
        except KeyboardInterrupt:
            self._end("interrupted", None)
            raise
        except Exception as error:
            self._end("failed", str(error))
            raise
        self._write("complete", ended=True)
        if self.against is not None:
            self.reproduction = [asdict(check) for check in compare_runs(read_run(self.directory), self.against)]
            self._write("complete", ended=True)
        return self.finish()

    def _end(self, status: str, error: str | None) -> None:
        """Record how a run broke off, and compute what its rows allow."""
        with suppress(RecordError):  # what broke the run may keep its files from being written, too
            self._write(status, error, ended=True)
            self.finish()

    def finish(self) -> ExitCode:
        """Compute metrics.json from the files, and the report where one is wanted; the run's exit code."""
        if self.plan.settings.report.render:
            path, metrics = render_run(self.directory)
        else:
            path, metrics = self.directory / "metrics.json", summarize(read_run(self.directory))
            self.writer.write_json(path.name, metrics)
        manifest = read_run(self.directory).manifest
        if self.plan.settings.check.name != "none":
            write_outcome(self.directory, manifest, metrics)
        for line in closing_lines(self.directory, manifest, metrics):
            self.progress.say(line)
        self.progress.say(str(path))
        return ExitCode(metrics["exit_code"])

    def _measure(self, stack: ExitStack) -> None:
        settings, workload = self.plan.settings, self.plan.workload
        router = settings.router.backend
        self.backend = stack.enter_context(open_backend(router.name, router.address, self.plan.devices))
        arms = [self._start(stack, name, config) for name, config in self.plan.arms.items()]
        self.elsewhere = not all(arm.is_here for arm in arms)
        if settings.measure.harness_overhead:  # the arms are idle, and what they refuse was not waited for
            self._measure_harness()
        for arm in arms:
            self.progress.say(f"Warming up {arm.name} ({arm.engine})")
            self._add_warmup(arm, arm.warm_up(workload.warmup))
        gate = self._gate(arms)
        if gate is not None:
            self.progress.say("Comparing the arms' outputs on prompts of their own")
            self._note_parity(gate.probe(workload.probe))
        self.progress.start(len(workload.requests) * len(arms))
        # Before the passes as well as after them: an interrupted replica is busy and would not answer.
        self._describe(arms)
        self._write("interrupted")
        with self.telemetry:
            self._run_blocks(arms, first=0)
            while self.plan.stop is not None and (add := self._blocks_to_add(self.plan.stop)):
                measured = len(self.workload.blocks)
                self.workload = self.workload.extended(add)
                self.writer.extend_workload(self.workload.sha256)
                self._write("interrupted")
                self.progress.extend(len(arms) * sum(map(len, self.workload.blocks[measured:])))
                self._run_blocks(arms, first=measured)
        self._describe(arms)
        if gate is not None:
            self.progress.say("Comparing the timed outputs")
            self._note_parity(gate.settle_all(as_sent(self.workload.requests, self.later_prompts), self.outputs))
        self._profile_steps(arms)

    def _run_blocks(self, arms: list[Arm], first: int) -> None:
        by_name = {arm.name: arm for arm in arms}
        for step in plan_passes(len(self.workload.blocks), self.plan.settings.seed, _names(arms), first):
            idle = [pid for arm in arms if arm.name != step.arm for pid in arm.pids_here]
            self._run_pass(by_name[step.arm], step, idle)
            self.passes[-1]["cache_probe"] = by_name[step.arm].probe_cache(self.workload.cache_probes[step.block])

    def _blocks_to_add(self, rule: StopRule) -> int:
        """How many blocks the run still needs before the next look, judged from what is on disk."""
        blocks = len(self.workload.blocks)
        seconds = sum(each["end_ns"] - each["start_ns"] for each in self.passes) / 1e9
        effect = primary_effect(Measured(read_run(self.directory)), self.plan.settings.seed)
        decision = decide(effect, blocks, seconds, rule)
        self.stop = {
            **asdict(rule),
            "planned_blocks": len(self.plan.workload.blocks),
            "reason": decision.reason,
            "seconds": seconds,
            "reached_half_width": effect.log_half_width,
        }
        self.progress.say(f"  {blocks} blocks: {stop_sentence(self.stop)}")
        return decision.add

    def _check_contracts(self) -> None:
        names = self.plan.settings.claim.contracts
        model = self.plan.source.engine_options()
        subject = Subject(model, self.plan.devices[0], self.plan.settings.dtype.name, self.directory)
        self.contracts = run_checks(names, subject, self.progress.say)

    def _describe(self, arms: list[Arm]) -> None:
        for arm in arms:
            if all(each.alive for each in arm.replicas):
                self.arms[arm.name] = arm.describe()
            elif arm.name in self.arms:  # as it was before, and what befell it since
                self.arms[arm.name]["events"] = arm.events

    def _profile_steps(self, arms: list[Arm]) -> None:
        """Note the kernels of each arm's step. Last of all that its engine does: no measured pass may miss the time."""
        for arm in arms:
            replica, known = arm.replicas[0], self.arms[arm.name]["replicas"]
            if replica.alive and known:
                known[0]["info"]["step_kernels"] = replica.call("profile_step").result()

    def _measure_ceilings(self) -> None:
        """Note what the first device can read and multiply, once the arms are gone: it takes memory, and the device."""
        replicas = [replica for arm in self.arms.values() for replica in arm["replicas"]]
        if self.elsewhere or not any(replica["info"].get("weights_fingerprint") for replica in replicas):
            return  # another machine's device, or engines that read no weights of ours, have no roofline
        device, settings = self.plan.devices[0], self.plan.settings
        self.progress.say(f"Measuring what {device} can read and multiply")
        ceilings = measure_ceilings(
            device,
            settings.dtype.name,
            threads=threads_per_replica(self.plan.devices),
            log=self.directory / "ceilings.log",
            timeout_s=settings.measure.start_timeout_s,
        )
        self.roofline = {"device": device, **ceilings}

    def _measure_harness(self) -> None:
        self.progress.say("Measuring the harness's own overhead")
        with ExitStack() as stack:
            simulated = start_arm(
                stack,
                "candidate",
                SIMULATED,
                model={},
                devices=["cpu"],
                dtype="fp32",
                router=RouterConfig(),
                backend=ProcessBackend(),
                log_dir=self.directory,
                timeout_s=self.plan.settings.measure.start_timeout_s,
            )
            self.harness = measure_overhead(simulated.dispatcher)

    def _start(self, stack: ExitStack, name: ArmName, config: EngineConfig, dtype: str | None = None) -> Arm:
        settings = self.plan.settings
        devices = self.plan.devices_of(name) if dtype is None else self.plan.devices[:1]  # a reference needs one
        self.progress.say(f"Loading {config.name} on {', '.join(devices)}")
        arm = start_arm(
            stack,
            name,
            config,
            model=self.plan.model_options,
            devices=devices,
            dtype=dtype or settings.dtype.name,
            router=self.plan.router_of(name),
            backend=self.backend,
            log_dir=self.directory,
            timeout_s=settings.measure.start_timeout_s,
        )
        for line in tier_lines(arm.replicas[0].call("describe").result()):
            self.progress.say(f"  {line}")
        self.progress.say(f"  ready after {max(arm.load_s):.1f} s")
        return arm

    def _add_warmup(self, arm: Arm, completions: list[Completion]) -> None:
        key = RowKey(arm.name, arm.engine, 0, 0, "warmup")
        for completion in completions:
            self.writer.add(key, completion.dispatched_ns, completion)
        self.writer.flush()
        failed = next((completion for completion in completions if completion.status != "ok"), None)
        if failed is not None:
            raise EngineError(f"The {arm.name} ({arm.engine}) failed in warm-up: {failed.error}")

    def _gate(self, arms: list[Arm]) -> ParityGate | None:
        settings = self.plan.settings
        if len(arms) < 2 or not settings.measure.parity:
            return None
        return ParityGate(
            arms[0],
            arms[1],
            dtype=settings.dtype.name,
            reference=self._fp32_reference,
            eos_ids=self.plan.spec.eos_ids,
            stopping=Stopping(str(self.plan.source.local_dir)),
            vocab=self.plan.vocab,
            seed=settings.seed,
            decode=self.plan.codec.decode if self.plan.codec else None,
        )

    @contextmanager
    def _fp32_reference(self) -> Iterator[AnyReplica]:
        with ExitStack() as stack:
            yield self._start(stack, "baseline", _REFERENCE, "fp32").replicas[0]

    def _note_parity(self, parity: dict[str, Any]) -> None:
        self.parity = parity
        outcome = {True: "passed", False: "FAILED", None: "not judged"}[parity["passed"]]
        self.progress.say(f"  {outcome}: {parity['sentence']}")

    def _run_pass(self, arm: Arm, step: Pass, idle_pids: list[int]) -> None:
        workload = self.workload
        requests = arm.salted(workload.blocks[step.block])
        ended: list[tuple[int, Completion]] = []

        key = RowKey(arm.name, arm.engine, step.block, step.round, "measure")

        def note(scheduled_ns: int, completion: Completion) -> None:
            # The next request is running by now, on the same cores: rows are made after the pass.
            ended.append((scheduled_ns, completion))
            self.journal.note(key, scheduled_ns, completion)
            self.watches[arm.name].note(scheduled_ns, completion)
            latency = (completion.chunks[-1].t_ns - completion.dispatched_ns) / 1e6 if completion.chunks else None
            self.progress.advance(arm.name, step.block, latency if completion.status == "ok" else None)

        meter, start_ns = CpuMeter(idle_pids), time.monotonic_ns()
        try:
            self.later_prompts[arm.name] |= send_block(
                arm.dispatcher, workload, step.block, requests, note, lambda: self.watches[arm.name].is_hopeless
            )
        finally:
            self.passes.append(
                {
                    "arm": arm.name,
                    "block": step.block,
                    "round": step.round,
                    "phase": "measure",
                    "start_ns": start_ns,
                    "end_ns": time.monotonic_ns(),
                    **asdict(meter.read()),
                }
            )
            for scheduled_ns, completion in ended:
                self.writer.add(key, scheduled_ns, completion)
                if completion.status == "ok":
                    self.outputs[arm.name][completion.request_id] = completion.output_ids
            self.telemetry.flush()
            self._write("interrupted")
            self.journal.clear()

    def _write(self, status: str, error: str | None = None, *, ended: bool = False) -> None:
        plan, settings = self.plan, self.plan.settings
        replicas = [replica for arm in self.arms.values() for replica in arm["replicas"]]
        may_stop = [each.request_id for each in self.workload.requests if each.may_stop]
        fingerprints = [replica["info"].get("weights_fingerprint") for replica in replicas]
        self.writer.flush()
        self.writer.write_json(
            "manifest.json",
            {
                "schema_version": SCHEMA_VERSION,
                "run_id": self.run_id,
                "status": status,
                "error": error,
                "cell_key": self.cell_key,
                **(self.writer.hashes() if ended else {"files": None, "outputs": None}),
                "started": self.started.isoformat(timespec="seconds"),
                "finished": datetime.now(UTC).isoformat(timespec="seconds"),
                "clock": self.clock,
                "command": self.command,
                "overrides": self.overrides,
                "config": asdict(settings),
                "machine": self.machine,
                "model": plan.describe_model(next((each for each in fingerprints if each), None)),
                "dtype": settings.dtype.name,
                "seed": settings.seed,
                "workload": self.workload.describe(),
                "devices": plan.devices,
                "arms": self.arms,
                "requested_tokens": {each.request_id: each.max_new_tokens for each in self.workload.requests},
                **({"may_stop": may_stop} if may_stop else {}),
                "parity": self.parity,
                "contracts": self.contracts,
                "harness": self.harness,
                "roofline": self.roofline,
                "telemetry": self.telemetry.describe(),
                "stop": self.stop,
                "passes": self.passes,
                "reproduction": self.reproduction,
                **({"stands_for": plan.stand_in.stands_for} if plan.stand_in else {}),
            },
        )


def _names(arms: list[Arm]) -> tuple[ArmName] | tuple[ArmName, ArmName]:
    return (arms[0].name,) if len(arms) == 1 else (arms[0].name, arms[1].name)
