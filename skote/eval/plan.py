"""What a run will do, checked before any process starts: model, devices, workload, arms.

Part of the composition root.
"""

from __future__ import annotations

import threading
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import platformdirs
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from skote.config import EngineConfig, ModelConfig, RouterConfig, RunConfig
from skote.eval.adaptive import StopRule
from skote.eval.claims import check_claim
from skote.eval.codec import HashCodec
from skote.eval.measure import Arm as ArmName
from skote.eval.progress import RunProgress
from skote.eval.slo import check_slo
from skote.eval.stand_in import StandIn
from skote.eval.workload import Workload, build_workload, check_fits
from skote.eval.workload_cache import WorkloadCache, ingredients
from skote.eval.workload_config import check_config
from skote.flags import flags_for
from skote.model.facts import ModelFacts, load_facts
from skote.model.flops import prefill_flops
from skote.model.source import ModelSource, converted_gguf, hub_snapshot, packaged_gguf, shape_directory
from skote.model.split import check_split
from skote.runtime.backend import backend_devices
from skote.runtime.capacity import check_memory
from skote.runtime.dispatch_options import DispatchOptions
from skote.runtime.replica import check_hang_s
from skote.runtime.text import TextCodec, load_tokenizer
from skote.types import CheckpointError, UsageError

SIMULATED = EngineConfig(name="simulated", _target_="skote.engines.simulated.SimulatedEngine")
WITHOUT_MODEL = (SIMULATED._target_, "skote.engines.replay.ReplayEngine")
ENDPOINT_TARGET = "skote.engines.endpoint.EndpointEngine"


@dataclass(frozen=True, slots=True)
class Plan:
    """What will run, checked before any process starts; `stop` is None where the number of blocks is fixed.

    `stand_in` says in which experiment's place, if in any. `arms` is empty where a claim is judged without measured
    requests.
    """

    settings: RunConfig
    source: ModelSource
    spec: ModelFacts
    devices: list[str]
    workload: Workload
    codec: TextCodec | None
    arms: dict[ArmName, EngineConfig]
    stop: StopRule | None
    other_devices: list[str]
    stand_in: StandIn | None = None

    def devices_of(self, arm: ArmName) -> list[str]:
        """The devices of an arm's replicas: `devices`, and `other_devices` of the baseline arm.

        An engine that deals its model out is one replica on all of them: ["cuda:0+cuda:1"]. A server is one replica,
        too: how many it has itself, and on what, is its own affair.
        """
        devices = self.devices if arm == "candidate" else self.other_devices
        if self.arms[arm]._target_ == ENDPOINT_TARGET:
            return devices[:1]
        return ["+".join(devices)] if self.arms[arm].options.get("split") else devices

    def router_of(self, arm: ArmName) -> RouterConfig:
        """The options of an arm's router."""
        return self.settings.router if arm == "candidate" else other_router(self.settings)

    @property
    def vocab(self) -> int:
        """How many tokens an arm's model has: the checkpoint's, and one for padding where its tokenizer has none."""
        return self.spec.vocab if self.codec is None else max(self.spec.vocab, self.codec.pad_id + 1)

    @property
    def model_options(self) -> dict[str, Any]:
        """The keyword arguments of every engine of this run that say which model, and how long a request gets."""
        longest = max(len(request.input_ids) + request.max_new_tokens for request in self._all_requests())
        return self.source.engine_options() | {
            "pad_id": self.codec.pad_id if self.codec else None,
            "max_model_len": min(longest, self.spec.max_positions),
        }

    def describe_model(self, weights_sha256: str | None) -> dict[str, Any]:
        """The manifest's entry of the model, whose arms loaded weights of that hash."""
        settings, spec = self.settings, self.spec
        element = 4 if settings.dtype.name in ("fp32", "tf32") else 2
        return {
            "name": settings.model.name or self.source.local_dir.name,
            "path": settings.model.path or self.source.local_dir.name,
            "parameters": spec.parameters,
            "bytes_per_token": spec.bytes_per_token(element),
            "kv_bytes_per_token": spec.kv_bytes_per_token(element),
            "prefill_flops": prefill_flops(spec),
            "tokenizer_sha256": self.codec.sha256 if self.codec else None,
            "weights_sha256": weights_sha256,
        }

    def _all_requests(self) -> list[Any]:
        return [*self.workload.at_full_length, *self.workload.warmup, *self.workload.probe]


def plan_run(settings: RunConfig, directory: Path, progress: RunProgress, *, compare: bool) -> Plan:
    """Check everything that can be checked without loading weights.

    `compare` False drops the other arm.

    Raises:
        UsageError: an option, a path or a prompt that cannot be served.
    """
    check_config(settings.workload)
    check_slo(settings.slo)
    check_claim(settings.claim)
    _check_numbers(settings)
    stop = _stop_rule(settings, compare=compare)
    flags_for(settings.dtype.name)
    if not settings.engine["name"]:
        raise UsageError("engine must name an engine; compare=none is for the other arm.")
    resolve = partial(backend_devices, settings.router.backend.name, settings.router.backend.address)
    devices = resolve(settings.devices)
    other_devices = devices if settings.other.devices is None else resolve(settings.other.devices)
    source = model_source(settings.model, directory, progress)
    spec = load_facts(source.local_dir, source.layers)
    codec = load_tokenizer(source.local_dir) if source.random_seed is None else None
    for note in codec.notes if codec else ():
        progress.say(note)
    progress.say(f"Model: {settings.model.name or source.local_dir.name}, {source.local_dir}")
    if codec is None:
        progress.say("It has no tokenizer: prompts become token ids by a hash, and answers mean nothing.")
    max_blocks = 0 if stop is None else stop.max_blocks
    workload = _workload(settings, codec, spec, max_blocks, progress)
    check_fits(workload, spec.max_positions)
    fitting = [each for each in workload.probe if len(each.input_ids) + each.max_new_tokens <= spec.max_positions]
    workload = replace(workload, probe=tuple(fitting))  # its prompts may be some tokens longer
    arms: dict[ArmName, EngineConfig] = {"candidate": EngineConfig.of(settings.engine)}
    if not settings.claim.measures:
        arms = {}
    elif compare:
        arms["baseline"] = EngineConfig.of(settings.compare)
    for arm, config in arms.items():
        if config.options.get("split"):
            check_split(arm, devices if arm == "candidate" else other_devices, settings.router.backend.name)
    plan = Plan(settings, source, spec, devices, workload, codec, arms, stop, other_devices)
    elsewhere = (*WITHOUT_MODEL, ENDPOINT_TARGET)
    modelled = [config for config in arms.values() if config._target_ not in elsewhere]
    positions = plan.model_options["max_model_len"]
    compared = len(arms) == 2 and settings.measure.parity and (settings.dtype.name != "fp32" or not workload.greedy)
    if settings.router.backend.address is not None:
        return plan  # memory is that of other machines, where each engine looks for itself
    check_memory(
        spec,
        settings.dtype.name,
        max(devices, other_devices, key=len),
        caches=[_cache_positions(config, positions, alone=len(modelled) == 1) for config in modelled],
        reference=compared,
    )
    return plan


def _workload(
    settings: RunConfig, codec: TextCodec | None, facts: ModelFacts, max_blocks: int, progress: RunProgress
) -> Workload:
    """The requests, made now or, where they are many, before."""
    root = settings.model.cache_dir or platformdirs.user_cache_dir("skotergy")
    bounds = settings.seed, max_blocks, facts.max_positions
    name = f"hash of {facts.vocab}" if codec is None else codec.sha256
    return WorkloadCache(Path(root).expanduser() / "workloads", progress.say).workload(
        ingredients(settings.workload, name, *bounds),
        lambda: build_workload(settings.workload, codec or HashCodec(facts.vocab), *bounds),
    )


def _check_numbers(settings: RunConfig) -> None:
    """Check the numbers that nothing else checks before an engine starts."""
    if settings.seed < 0:
        raise UsageError(f"seed must be 0 or more, got {settings.seed}.")
    timeout_s = settings.measure.start_timeout_s
    if not 0 < timeout_s <= threading.TIMEOUT_MAX:
        raise UsageError(f"measure.start_timeout_s must be a number of seconds above 0, got {timeout_s:g}.")
    _check_router("router", settings.router)
    _check_router("other.router", other_router(settings))


def other_router(settings: RunConfig) -> RouterConfig:
    """The router of the baseline arm.

    Raises:
        UsageError: `other.router` names an option that a router does not have, or gives it another kind of value.
    """
    schema = OmegaConf.structured(settings.router)
    try:
        router = OmegaConf.to_object(OmegaConf.merge(schema, settings.other.router))
    except OmegaConfBaseException as error:
        known = ", ".join(asdict(settings.router))
        raise UsageError(f"other.router: {str(error).splitlines()[0].rstrip('.')}; a router has {known}.") from error
    if not isinstance(router, RouterConfig):
        raise TypeError(f"the other arm's router is a {type(router).__name__}, not a RouterConfig")
    return router


def _check_router(name: str, router: RouterConfig) -> None:
    try:
        DispatchOptions(
            router.policy,
            router.max_concurrency_per_device,
            router.microbatch_window_ms,
            router.microbatch_max,
            router.max_queue,
            router.max_restarts,
            router.tpot_slo_ms,
        )
        check_hang_s(router.hang_s)
    except UsageError as error:
        raise UsageError(f"{name}.{error}") from None  # their sentences begin with the option's name


def _stop_rule(settings: RunConfig, *, compare: bool) -> StopRule | None:
    """The rule by which blocks are added, checked even where it plays no part.

    One arm alone has no difference whose interval could become narrow.
    """
    if settings.measure.stop is None:
        return None
    rule = settings.measure.stop.rule()
    if not compare:
        return None
    if rule.max_blocks < settings.workload.blocks:
        raise UsageError(
            f"measure.stop.max_blocks={rule.max_blocks} is below workload.blocks={settings.workload.blocks}, which are "
            "measured in any case: raise the one or lower the other."
        )
    return rule


def _cache_positions(config: EngineConfig, positions: int, *, alone: bool) -> int:
    """The positions of an arm's cache, of all its rows; `positions` where its own options do not say."""
    own = config.options.get("max_model_len")
    if isinstance(own, int) and 0 < own < positions - 1:  # a request's last token takes no position
        raise UsageError(
            f"{config.name}: max_model_len={own} is too short for the workload's longest request, which takes "
            f"{positions - 1} positions: raise it, or leave it null."
        )
    if own == "auto" and not alone:
        raise UsageError(
            "engine.max_model_len=auto takes what the device has left, which two arms cannot both do: give a number, "
            "or compare=none."
        )
    rows = config.options.get("max_batch")
    return (own if isinstance(own, int) else positions) * (rows if isinstance(rows, int) else 1)


def model_source(config: ModelConfig, directory: Path, progress: RunProgress) -> ModelSource:
    """The checkpoint that `config` names, converted or downloaded where needed.

    Raises:
        CheckpointError: it is not to be had.
        UsageError: a path beside a shape.
    """
    if config.shape is not None and config.path is not None:
        raise UsageError(
            f"model.path={config.path} is a checkpoint's, and the model {config.name!r} is a shape of random weights: "
            "choose model=local, or leave model.path out."
        )
    if config.shape is not None:
        return ModelSource(shape_directory(config.shape, directory / "model"), config.seed, config.layers)
    if config.path is not None:
        return ModelSource(Path(config.path).expanduser(), None, config.layers)
    if config.package is None or config.file is None or config.hub_id is None:
        raise CheckpointError(
            "There is no model to load: model=local needs model.path=DIR, other options need a shape, or a package, "
            "a file in it and a hub_id."
        )
    gguf_path = packaged_gguf(config.package, config.file)
    if gguf_path is None:
        return ModelSource(hub_snapshot(config.hub_id, config.package), None, config.layers)
    cache_dir = Path(config.cache_dir).expanduser() if config.cache_dir else None
    return ModelSource(converted_gguf(gguf_path, cache_dir, progress.say), None, config.layers)
