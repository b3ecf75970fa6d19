from __future__ import annotations

import inspect
import json
import pkgutil
from dataclasses import asdict
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.errors import ConfigCompositionException
from omegaconf import OmegaConf

from skote.config import (
    CONF_DIR,
    NEWER_ENGINE_OPTIONS,
    BackendConfig,
    EngineConfig,
    RunConfig,
    StopConfig,
    recorded_settings,
    register_schema,
    to_settings,
)
from skote.eval.adaptive import StopRule
from skote.eval.workload_config import check_config
from skote.flags import flags_for
from skote.types import Engine, UsageError

OPTIONS = {
    "model": [
        *("gemma2_9b_shape", "llama31_8b_shape", "llama32_1b_shape", "local", "mistral_7b_shape", "mixtral_8x7b_shape"),
        *("qwen25_7b_shape", "qwen3_30b_a3b_shape", "qwen3_8b_shape"),
        *("smollm2_135m", "smollm2_135m_shape", "tiny_shape"),
    ],
    "dtype": ["bf16", "fp16", "fp32", "tf32"],
    "engine": [
        *("baseline", "endpoint", "replay", "simulated", "skotergy", "skotergy_published"),
        *("skotergy_served", "transformers_continuous", "transformers_serve", "transformers_split"),
        *("transformers_static", "vllm"),
    ],
    "compare": [
        *("baseline", "default", "endpoint", "none", "replay", "simulated", "skotergy", "skotergy_published"),
        *("skotergy_served", "transformers_continuous", "transformers_serve", "transformers_split"),
        *("transformers_static", "vllm"),
    ],
    "workload": [
        "burst16x64",
        "chat",
        "concurrency",
        "decode_256",
        "mixed_burst",
        "poisson",
        "prefill_longcontext",
        "synthetic",
        "trace",
    ],
    "router": ["least_work", "length_aware", "prefix_aware", "round_robin", "shortest_queue"],
    "slo": [
        "deepseek_r1_interactive",
        "gpt_oss_120b_interactive",
        "llama2_70b_interactive",
        "llama31_405b_interactive",
        "llama31_8b_interactive",
        "none",
    ],
    "measure": ["default", "paper", "quick"],
    "report": ["html", "none"],
    "check": ["ci", "none", "reproduce"],
}
ALL = [(group, option) for group, options in OPTIONS.items() for option in options]


def settings_of(*overrides: str) -> RunConfig:
    register_schema()
    with initialize_config_dir(str(CONF_DIR), version_base="1.3"):
        return to_settings(compose("config", list(overrides)))


def test_the_files_are_those_of_the_checkout() -> None:
    assert Path(__file__).parent.parent / "conf" == CONF_DIR


def test_every_option_is_listed_here() -> None:
    groups = {folder.name for folder in CONF_DIR.iterdir() if folder.is_dir()} - {"hydra"}
    assert {group: sorted(path.stem for path in (CONF_DIR / group).glob("*.yaml")) for group in groups} == OPTIONS


def test_the_defaults_are_the_main_job() -> None:
    settings = settings_of()
    assert (settings.model.name, settings.dtype.name) == ("SmolLM2-135M-Instruct", "fp32")
    assert (settings.engine["name"], settings.compare["name"]) == ("skotergy", "baseline")
    assert (settings.workload.blocks, settings.workload.requests_per_block, settings.workload.max_new_tokens) == (
        6, 12, 16,
    )  # fmt: skip
    assert settings.devices == 1
    assert settings.report.render


@pytest.mark.parametrize("overrides", [["router/backend=ray"], ["router=least_work", "router/backend=ray"]])
def test_the_backend_is_chosen_beside_the_policy(overrides: list[str]) -> None:
    router = settings_of(*overrides, "router.backend.address=head:6379").router
    assert router.backend == BackendConfig("ray", "head:6379")
    assert router.policy == ("least_work" if len(overrides) == 2 else "round_robin")
    assert settings_of().router.backend == BackendConfig("process", None)
    assert sorted(path.stem for path in (CONF_DIR / "router" / "backend").glob("*.yaml")) == ["process", "ray"]


@pytest.mark.parametrize(("group", "option"), ALL)
def test_every_option_composes(group: str, option: str) -> None:
    settings = settings_of(f"{group}={option}")
    check_config(settings.workload)
    flags_for(settings.dtype.name)


@pytest.mark.parametrize("option", OPTIONS["engine"])
def test_an_engine_is_a_class_that_takes_its_options(option: str) -> None:
    config = EngineConfig.of(settings_of(f"engine={option}").engine)
    engine = pkgutil.resolve_name(config._target_)
    common = ("local_dir", "device", "dtype", "threads", "random_seed", "layers", "pad_id", "max_model_len")
    inspect.signature(engine).bind(**dict.fromkeys(common) | config.options)
    assert {name for name in vars(Engine) if not name.startswith("_")} <= set(dir(engine))
    assert config.name == option


@pytest.mark.parametrize("option", OPTIONS["engine"])
def test_compare_holds_the_same_engines(option: str) -> None:
    settings = settings_of(f"engine={option}", f"compare={option}")
    assert settings.compare == settings.engine


@pytest.mark.parametrize(
    ("option", "width", "blocks", "seconds"), [("quick", 0.015, 40, 600), ("paper", 0.01, 60, 3600)]
)
def test_a_run_may_add_blocks(option: str, width: float, blocks: int, seconds: float) -> None:
    measure = settings_of(f"measure={option}", "measure.stop.max_blocks=20").measure
    assert measure.stop is not None
    assert measure.stop.rule() == StopRule(width, 20, seconds)
    assert settings_of(f"measure={option}").measure.stop == StopConfig(width, blocks, seconds)
    assert settings_of().measure.stop is None
    assert measure.parity


def test_the_selftest_compares_the_baseline_with_itself() -> None:
    """Of the option's own choice: the default one would leave the baseline alone."""
    register_schema()
    with initialize_config_dir(str(CONF_DIR.parent / "experiments"), version_base="1.3"):
        tree = compose("aa_selftest", [f"hydra.searchpath=[file://{CONF_DIR}]"], return_hydra_config=True)
        assert tree.hydra.runtime.choices.compare == "baseline"
        assert tree.engine == tree.compare


def test_compare_none_is_no_arm() -> None:
    assert settings_of("compare=none").compare == {"name": "", "_target_": ""}


def test_workload_files_state_every_option() -> None:
    expected = {key for key in vars(settings_of().workload) if key not in ("prompts", "arrivals", "source")}
    for option in OPTIONS["workload"]:
        stated = OmegaConf.load(CONF_DIR / "workload" / f"{option}.yaml")
        assert set(stated) >= expected


def test_options_of_an_arm_can_be_overridden_and_added() -> None:
    settings = settings_of(
        "engine.compile=false", "engine.max_model_len=auto", "engine.warmup_buckets=[64,128]", "+engine.own=3",
        "compare.attention=eager",
    )  # fmt: skip
    engine = EngineConfig.of(settings.engine)
    assert (engine.name, engine._target_) == ("skotergy", "skote.runtime.engine.SkotergyEngine")
    assert engine.options == {
        "max_model_len": "auto", "max_batch": 1, "warmup_buckets": [64, 128], "prefill_chunk": 512,
        "prefix_cache": False, "compile": False, "own": 3,
    }  # fmt: skip
    assert EngineConfig.of(settings.compare).options == {"attention": "eager"}


def test_the_settings_are_the_tree_as_it_was_typed() -> None:
    engine = asdict(settings_of("engine=transformers_static", "engine.cache=dynamic"))["engine"]
    assert engine == {
        "name": "transformers_static", "_target_": "skote.engines.transformers.TransformersEngine",
        "attention": None, "cache": "dynamic",
    }  # fmt: skip


def test_an_engine_of_ones_own_needs_a_target_alone() -> None:
    assert EngineConfig.of(settings_of("engine._target_=mine.Engine").engine)._target_ == "mine.Engine"


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("~engine._target_", r"engine\._target_ must be text, got None; see the files in conf/engine/"),
        ("engine.name=3", r"engine\.name must be text, got 3"),
        ("compare._target_=null", r"compare\._target_ must be text, got None; see the files in conf/compare/"),
    ],
)
def test_an_engine_has_a_name_and_a_target(override: str, sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        settings_of(override)


@pytest.mark.parametrize(
    ("text", "value"),
    [("2", 2), ("all", "all"), ("cpu", "cpu"), ("cuda:1", "cuda:1"), ("[cuda:0,cuda:2]", ["cuda:0", "cuda:2"])],
)
def test_devices_may_be_a_number_a_name_or_a_list(text: str, value: object) -> None:
    assert settings_of(f"devices={text}").devices == value


@pytest.mark.parametrize(
    "override",
    [
        "engin=skotergy",
        "engine=nonsense",
        "engine.max_bach=1",
        "engine.options.compile=false",
        "compare.atention=eager",
        "model.pth=DIR",
        "workload.max_new_token=4",
        "workload.max_new_tokens=few",
        "workload.blocks=2.5",
        "measure.parity=perhaps",
        "seed=null",
    ],
)
def test_unknown_keys_and_wrong_types_are_refused(override: str) -> None:
    with pytest.raises(ConfigCompositionException):
        settings_of(override)


def test_a_local_model_is_a_path_alone() -> None:
    model = settings_of("model=local", "model.path=models/mine").model
    assert (model.path, model.package, model.hub_id, model.shape) == ("models/mine", None, None, None)


@pytest.mark.parametrize("override", ["+nonsense=1", "+model.nonsense=2", "+workload.nonsense.deep=3"])
def test_added_keys_that_nobody_reads_are_refused(override: str) -> None:
    key = override.lstrip("+").split("=")[0].removesuffix(".deep")

    with pytest.raises(UsageError, match=f"no option {key}"):
        settings_of(override)


@pytest.mark.parametrize("overrides", [[], ["measure=quick", "check=ci", "engine.compile=false", "devices=[cpu]"]])
def test_recorded_settings_are_those_that_were_recorded(overrides: list[str]) -> None:
    settings = settings_of(*overrides)
    assert recorded_settings(json.loads(json.dumps(asdict(settings)))) == settings


def test_an_older_record_lacks_options_and_nests_an_engines_own() -> None:
    recorded = asdict(settings_of("engine.compile=false"))
    own = {key: recorded["engine"].pop(key) for key in set(recorded["engine"]) - {"name", "_target_"}}
    recorded["engine"]["options"] = own
    del recorded["check"], recorded["workload"]["top_k"]
    assert recorded_settings(recorded) == settings_of("engine.compile=false")


def test_an_older_record_has_what_its_engine_did_before_it_had_the_option() -> None:
    recorded = asdict(settings_of("compare=skotergy"))
    for arm in ("engine", "compare"):
        del recorded[arm]["prefill_chunk"]
    assert recorded_settings(recorded) == settings_of("compare=skotergy")
    recorded["engine"]["_target_"] = "an.Other"
    assert "prefill_chunk" not in recorded_settings(recorded).engine


@pytest.mark.parametrize("target", NEWER_ENGINE_OPTIONS)
def test_newer_options_of_an_engine_are_its_defaults(target: str) -> None:
    parameters = inspect.signature(pkgutil.resolve_name(target)).parameters
    assert {name: parameters[name].default for name in NEWER_ENGINE_OPTIONS[target]} == NEWER_ENGINE_OPTIONS[target]


def test_a_record_with_options_that_are_unknown_is_refused() -> None:
    with pytest.raises(UsageError, match=r"configured for another version of Skotergy: Key 'speed' not in"):
        recorded_settings(asdict(settings_of()) | {"workload": {"speed": 3}})
