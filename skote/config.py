"""The typed schema of the composed configuration, and where its files lie (in a wheel, in a checkout)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from skote.eval.adaptive import StopRule
from skote.eval.check import CheckConfig
from skote.eval.claims import ClaimConfig
from skote.eval.search import SearchConfig
from skote.eval.slo import SloConfig
from skote.eval.workload_config import WorkloadConfig
from skote.types import UsageError

_PACKAGED = Path(__file__).parent / "conf"
CONF_DIR = _PACKAGED if _PACKAGED.is_dir() else Path(__file__).parent.parent / "conf"


NEWER_ENGINE_OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "skote.runtime.engine.SkotergyEngine": {"prefill_chunk": 512, "prefix_cache": False},
}
"""Options that an engine was given after runs of it were committed, and what it did before it had them."""


@dataclass
class ModelConfig:
    """Where a model's weights come from: a directory, a package that carries them, a hub id, or chance.

    Attributes:
        name: what reports call it; where empty, the directory's own name.
        path: a checkpoint directory.
        package, file: an installed package and the GGUF in it, converted once into the cache.
        hub_id: tried where the package is absent.
        shape: the config.json of a model without weights; they are drawn per tensor from (`seed`, its name).
        seed: of such weights.
        layers: use the first layers alone.
        cache_dir: where converted checkpoints are kept; by default the user's cache folder.
    """

    name: str = ""
    path: str | None = None
    package: str | None = None
    file: str | None = None
    hub_id: str | None = None
    shape: dict[str, Any] | None = None
    seed: int = 0
    layers: int | None = None
    cache_dir: str | None = None


@dataclass
class DtypeConfig:
    """What the weights are kept in: fp32, tf32, bf16 or fp16 (see `skote.flags`)."""

    name: str = MISSING


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """An arm: what reports call it, the engine's class by its import path, and the keyword arguments of its own."""

    name: str
    _target_: str
    options: dict[str, Any] = field(default_factory=dict)

    @staticmethod
    def of(keys: dict[str, Any]) -> EngineConfig:
        """The engine of `conf/engine/*.yaml`, where the keyword arguments lie beside the other two keys."""
        options = {key: value for key, value in keys.items() if key not in ("name", "_target_")}
        return EngineConfig(keys["name"], keys["_target_"], options)


def _engine_keys() -> dict[str, Any]:
    return {"name": "", "_target_": ""}


@dataclass
class BackendConfig:
    """Where replicas live: `skote.runtime.backend`.

    Attributes:
        name: process or ray.
        address: HOST:PORT of a Ray's head; null starts one.
    """

    name: str = "process"
    address: str | None = None


@dataclass
class RouterConfig:
    """How requests are spread over the replicas of an arm: `skote.runtime.dispatch.DispatchOptions`.

    Attributes:
        hang_s: seconds without a token or an answer after which a busy replica's process is ended.
        tpot_slo_ms: milliseconds between two tokens of a request, for whose sake others wait.
    """

    policy: str = "round_robin"
    max_concurrency_per_device: int = 1
    microbatch_window_ms: float = 0.0
    microbatch_max: int = 8
    max_queue: int | None = None
    max_restarts: int = 0
    hang_s: float | None = 1800.0
    backend: BackendConfig = field(default_factory=BackendConfig)
    tpot_slo_ms: float | None = None


@dataclass
class EndpointConfig:
    """The server that engine=endpoint and compare=endpoint ask: `skote.engines.endpoint.EndpointEngine`.

    Attributes:
        url: the base of its API.
        model: what it calls the model; null where it serves one alone.
        api: completions or chat.
        prompt: ids or text; a chat is sent text.
        extensions: whether it takes return_token_ids, ignore_eos, stop_token_ids and top_k, as vLLM and skote-serve do.
        extra_body: further fields of a request.
        key_file, key_variable: where its key is, which itself is recorded nowhere: a file, or an environment variable.
        headers: sent with every request; they are recorded.
        ca_file: certificates to trust, in place of the system's.
        connect_s, silence_s: seconds to make a connection, and without a byte.
        command: what starts it, a line or a list of words; null where it runs already.
        ready_s: seconds that such a start may take.
    """

    url: str = "http://127.0.0.1:8000/v1"
    model: str | None = None
    api: str = "completions"
    prompt: str = "ids"
    extensions: bool = True
    extra_body: dict[str, Any] = field(default_factory=dict)
    key_file: str | None = None
    key_variable: str | None = None
    headers: dict[str, str] = field(default_factory=dict)
    ca_file: str | None = None
    connect_s: float = 10.0
    silence_s: float = 600.0
    command: Any = None
    ready_s: float = 600.0


@dataclass
class OtherArmConfig:
    """What the other arm has otherwise than the candidate; by default nothing, and the two are alike.

    Attributes:
        devices: as the run's own; null is the same.
        router: options of the router, by their names.
    """

    devices: Any = None
    router: dict[str, Any] = field(default_factory=dict)


@dataclass
class StopConfig:
    """When a run of two arms stops adding blocks (`skote.eval.adaptive.StopRule`).

    Attributes:
        half_width: how far the interval of ln(candidate / baseline) may reach to either side; 0.015 is about 1.5 %.
        max_blocks: of the run, those of the workload included.
        max_seconds: of measuring.
    """

    half_width: float = 0.015
    max_blocks: int = 40
    max_seconds: float = 600.0

    def rule(self) -> StopRule:
        """The rule.

        Raises:
            UsageError: a limit that is not above 0.
        """
        return StopRule(self.half_width, self.max_blocks, self.max_seconds)


@dataclass
class MeasureConfig:
    """What surrounds the measured passes.

    Attributes:
        parity: compare the arms' outputs before timing.
        harness_overhead: measure what the harness itself adds, with an engine that does nothing.
        stop: null measures the blocks of the workload and no more.
        start_timeout_s: how long an arm may take to load, compile and answer the first time.
    """

    parity: bool = True
    harness_overhead: bool = True
    stop: StopConfig | None = None
    start_timeout_s: float = 1800.0


@dataclass
class ReportConfig:
    """Whether report.html is written beside metrics.json."""

    render: bool = True


@dataclass
class RunConfig:
    """The whole tree.

    Attributes:
        engine, compare: `name`, `_target_` and whatever the engine's constructor takes, side by side (`EngineConfig`).
        endpoint: of the arm that is a server, where there is one.
        devices: a number, `all`, a device's name or a list of names.
        other: what the other arm has otherwise, where that is what is compared.
        instead: the experiment file, beside this one, that runs in its place where there are fewer accelerators than
            `devices`.
        search: the highest load that keeps `slo`, in many runs of one arm each.
        claim: what an experiment file claims, and its pass rules.
        against: the directory of the run that `check=reproduce` repeats.
        resume: the directory of a sweep to go on with; `skote.eval.runner` takes it off the command line.
    """

    model: ModelConfig = field(default_factory=ModelConfig)
    dtype: DtypeConfig = field(default_factory=DtypeConfig)
    engine: dict[str, Any] = field(default_factory=_engine_keys)
    compare: dict[str, Any] = field(default_factory=_engine_keys)
    endpoint: EndpointConfig = field(default_factory=EndpointConfig)
    workload: WorkloadConfig = field(default_factory=WorkloadConfig)
    router: RouterConfig = field(default_factory=RouterConfig)
    slo: SloConfig = field(default_factory=SloConfig)
    search: SearchConfig = field(default_factory=SearchConfig)
    measure: MeasureConfig = field(default_factory=MeasureConfig)
    report: ReportConfig = field(default_factory=ReportConfig)
    check: CheckConfig = field(default_factory=CheckConfig)
    claim: ClaimConfig = field(default_factory=ClaimConfig)
    devices: Any = 1
    other: OtherArmConfig = field(default_factory=OtherArmConfig)
    instead: str | None = None
    seed: int = 0
    against: str | None = None
    resume: str | None = None


def register_schema() -> None:
    """Make the schema known to Hydra, as the `schema` that conf/config.yaml starts from."""
    ConfigStore.instance().store(name="schema", node=RunConfig)


def to_settings(config: DictConfig) -> RunConfig:
    """The composed tree as dataclasses, every interpolation resolved.

    Raises:
        UsageError: a key that the schema does not have (Hydra's `+key=value` may add one), a number that is not finite,
            or an engine without its two keys.
    """
    settings = OmegaConf.to_object(config)
    if not isinstance(settings, RunConfig):
        raise TypeError(f"the composed configuration is a {type(settings).__name__}, not a RunConfig")
    _check_keys(settings, "")
    _check_finite(settings, "")
    for group, keys in (("engine", settings.engine), ("compare", settings.compare)):
        for key in ("name", "_target_"):
            if not isinstance(keys.get(key), str):
                raise UsageError(f"{group}.{key} must be text, got {keys.get(key)!r}; see the files in conf/{group}/.")
    return settings


def recorded_settings(recorded: dict[str, Any]) -> RunConfig:
    """The configuration of a run that was, from its manifest's "config"; options that are newer have their defaults.

    Raises:
        UsageError: it has options that this Skotergy does not have.
    """
    tree = dict(recorded)
    for arm in ("engine", "compare"):
        keys = dict(tree.get(arm, {}))
        nested = keys.pop("options", {})  # where an older manifest keeps an engine's keyword arguments
        tree[arm] = {**NEWER_ENGINE_OPTIONS.get(str(keys.get("_target_")), {}), **keys, **nested}
    try:
        return to_settings(DictConfig(OmegaConf.merge(OmegaConf.structured(RunConfig), tree)))
    except OmegaConfBaseException as error:
        reason = str(error).splitlines()[0].rstrip(".")
        raise UsageError(f"The run was configured for another version of Skotergy: {reason}.") from error


def _check_keys(node: Any, prefix: str) -> None:  # noqa: ANN401 (a dataclass of the schema, or a leaf)
    if not is_dataclass(node):
        return
    known = {field.name for field in fields(node)}
    for key, value in vars(node).items():
        if key not in known:
            raise UsageError(f"There is no option {prefix}{key}; --help lists what there is.")
        _check_keys(value, f"{prefix}{key}.")


def _check_finite(node: Any, name: str) -> None:  # noqa: ANN401 (a dataclass of the schema, a container, or a leaf)
    """Refuse nan and infinity anywhere: they slip through comparisons, and a manifest, which is JSON, holds neither."""
    if isinstance(node, float) and not math.isfinite(node):
        raise UsageError(f"{name} must be a finite number, got {node}.")
    items = vars(node) if is_dataclass(node) else node
    if isinstance(items, dict):
        for key, value in items.items():
            _check_finite(value, f"{name}.{key}" if name else str(key))
    elif isinstance(items, list):
        for index, value in enumerate(items):
            _check_finite(value, f"{name}[{index}]")
