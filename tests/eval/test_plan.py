"""What is refused before a model is looked at, let alone loaded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from rich.console import Console

from skote.config import CONF_DIR, RunConfig, register_schema, to_settings
from skote.eval.plan import plan_run
from skote.eval.progress import RunProgress
from skote.types import UsageError


def settings_of(*overrides: str) -> RunConfig:
    register_schema()
    with initialize_config_dir(str(CONF_DIR), version_base="1.3"):
        return to_settings(compose("config", ["model=tiny_shape", *overrides]))


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["measure=quick", "measure.stop.half_width=-1"], r"half_width must lie between 0 and 1, got -1\.0"),
        (["measure=quick", "measure.stop.half_width=1.5"], r"half_width must lie between 0 and 1, got 1\.5: 0\.015 is"),
        (["measure=quick", "measure.stop.max_seconds=-1"], r"measure\.stop\.max_seconds must be above 0, got -1\.0"),
        (["measure=quick", "measure.stop.max_blocks=0"], r"measure\.stop\.max_blocks must be above 0, got 0"),
        (
            ["measure=quick", "measure.stop.max_blocks=5"],
            r"max_blocks=5 is below workload\.blocks=6, which are measured",
        ),
        (["measure.start_timeout_s=0"], r"measure\.start_timeout_s must be a number of seconds above 0, got 0"),
        (["measure.start_timeout_s=1e30"], r"measure\.start_timeout_s must be .* got 1e\+30"),
        (["seed=-1"], r"seed must be 0 or more, got -1"),
        (["router.tpot_slo_ms=0"], r"^router\.tpot_slo_ms must be a number above 0, or null for no limit, got 0\.0\.$"),
        (["router.max_concurrency_per_device=0"], r"^router\.max_concurrency_per_device must be .* least 1, got 0\.$"),
        (["router.microbatch_window_ms=-1"], r"^router\.microbatch_window_ms must be .* 0 \(off\) .*, got -1\.0\.$"),
        (["router.microbatch_max=0"], r"^router\.microbatch_max must be a whole number of at least 1, got 0\.$"),
        (["router.max_queue=-1"], r"^router\.max_queue must be .* at least 0, or null for no limit, got -1\.$"),
        (["router.hang_s=0"], r"^router\.hang_s must lie above 0 .*, got 0\.0\.$"),
        (["router.policy=fastest"], r"^router\.policy 'fastest' is not known; choose one of round_robin"),
        (["workload.blocks=0"], r"workload\.blocks must be at least 1, got 0"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_number_out_of_its_range_is_refused_before_the_model_is_built(
    overrides: list[str], said: str, tmp_path: Path
) -> None:
    with RunProgress(Console(quiet=True)) as progress, pytest.raises(UsageError, match=said):
        plan_run(settings_of(*overrides), tmp_path, progress, compare=True)

    assert list(tmp_path.iterdir()) == []


def test_the_other_arm_has_the_candidates_devices_and_router_but_for_what_is_given(tmp_path: Path) -> None:
    other = [
        "devices=[cpu,cpu]",
        "other.devices=cpu",
        "router.microbatch_max=3",
        "+other.router.microbatch_window_ms=2",
    ]
    with RunProgress(Console(quiet=True)) as progress:
        plan = plan_run(settings_of(*other), tmp_path, progress, compare=True)
        alike = plan_run(settings_of("devices=[cpu,cpu]"), tmp_path, progress, compare=True)

    assert (plan.devices_of("candidate"), plan.devices_of("baseline")) == (["cpu", "cpu"], ["cpu"])
    windows = [
        (each.microbatch_window_ms, each.microbatch_max) for each in map(plan.router_of, ("candidate", "baseline"))
    ]
    assert windows == [(0.0, 3), (2.0, 3)]
    assert alike.devices_of("baseline") == alike.devices
    assert alike.router_of("baseline") == alike.router_of("candidate")


@pytest.mark.parametrize(
    ("router", "said"),
    [
        ("window=2", r"other\.router: .*window.*; a router has policy, max_concurrency_per_device"),
        ("microbatch_max=many", r"other\.router: .*many.*; a router has policy"),
        ("microbatch_max=0", r"^other\.router\.microbatch_max must be a whole number of at least 1, got 0"),
    ],
)
def test_a_router_of_the_other_arm_that_cannot_be_is_refused(router: str, said: str, tmp_path: Path) -> None:
    with RunProgress(Console(quiet=True)) as progress, pytest.raises(UsageError, match=said):
        plan_run(settings_of(f"+other.router.{router}"), tmp_path, progress, compare=True)


def test_a_rule_of_an_arm_alone_is_checked_though_it_plays_no_part(tmp_path: Path) -> None:
    with RunProgress(Console(quiet=True)) as progress:
        with pytest.raises(UsageError, match="half_width"):
            plan_run(settings_of("measure=quick", "measure.stop.half_width=-1"), tmp_path, progress, compare=False)
        settings = settings_of("measure=quick", "measure.stop.max_blocks=2")
        assert plan_run(settings, tmp_path, progress, compare=False).stop is None


def test_positions_must_hold_the_longest_request(tmp_path: Path) -> None:
    """Prompt and answer, but for the last token, which takes no position."""
    with RunProgress(Console(quiet=True)) as progress:
        longest = plan_run(settings_of(), tmp_path, progress, compare=True).model_options["max_model_len"]
        plan_run(settings_of(f"engine.max_model_len={longest - 1}"), tmp_path, progress, compare=True)
        with pytest.raises(UsageError, match=rf"max_model_len={longest - 2} is too short .* takes {longest - 1} pos"):
            plan_run(settings_of(f"engine.max_model_len={longest - 2}"), tmp_path, progress, compare=True)


@pytest.mark.parametrize(("pad", "vocab"), [(True, 96), (False, 97)])
def test_an_arm_s_vocabulary_has_a_row_for_padding_where_the_tokenizer_has_none(
    pad: bool, vocab: int, copy_checkpoint: Callable[..., Path], write_tokenizer: Callable[..., None], tmp_path: Path
) -> None:
    directory = copy_checkpoint()
    write_tokenizer(directory, pad=pad, chat=True)
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("\n".join(f"w{10 + index} w{40 + index}" for index in range(30)), encoding="utf-8")
    workload = [f"workload.prompts={prompts}", "workload.blocks=1", "workload.requests_per_block=2"]
    settings = settings_of("model=local", f"model.path={directory}", "+model.shape=null", *workload)
    with RunProgress(Console(quiet=True)) as progress:
        assert plan_run(settings, tmp_path, progress, compare=True).vocab == vocab


@pytest.mark.parametrize(
    ("override", "name"),
    [
        ("check.p50_delta_max=nan", "check.p50_delta_max"),
        ("measure.start_timeout_s=inf", "measure.start_timeout_s"),
        ("workload.output_mix=[0.5,nan]", r"workload.output_mix\[1\]"),
        ("engine.max_batch=nan", "engine.max_batch"),
        ("+engine.own={delay:[-inf]}", r"engine.own.delay\[0\]"),
        ("model.shape.rope_theta=inf", "model.shape.rope_theta"),
    ],
)
def test_no_number_is_infinite_or_none_at_all(override: str, name: str) -> None:
    with pytest.raises(UsageError, match=rf"^{name} must be a finite number, got "):
        settings_of("check=ci", override)


def test_a_model_that_is_dealt_out_is_one_replica_on_all_devices_of_its_arm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus = ["cuda:0", "cuda:1", "cuda:2"]
    monkeypatch.setattr("skote.runtime.devices._accelerators", lambda: gpus)
    monkeypatch.setattr("skote.eval.plan.check_memory", lambda *args, **options: None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    settings = settings_of("compare=transformers_split", "devices=3", "other.devices=2")

    with RunProgress(Console(quiet=True)) as progress:
        plan = plan_run(settings, tmp_path, progress, compare=True)

    assert plan.devices_of("candidate") == gpus
    assert plan.devices_of("baseline") == ["cuda:0+cuda:1"]


def test_a_model_is_not_dealt_out_over_one_device(tmp_path: Path) -> None:
    settings = settings_of("engine=transformers_split", "devices=[cpu,cpu]")
    with RunProgress(Console(quiet=True)) as progress, pytest.raises(UsageError, match="has cpu alone"):
        plan_run(settings, tmp_path, progress, compare=False)


def test_a_server_is_one_replica_and_has_options_of_its_own(tmp_path: Path) -> None:
    options = (
        "endpoint.url=https://else.where/v1",
        "+endpoint.headers={X-Team: us}",
        "endpoint.command=[serve, --now]",
    )
    settings = settings_of("compare=endpoint", "devices=[cpu,cpu]", *options)
    with RunProgress(Console(quiet=True)) as progress:
        plan = plan_run(settings, tmp_path, progress, compare=True)
    assert plan.devices_of("candidate") == ["cpu", "cpu"]
    assert plan.devices_of("baseline") == ["cpu"]
    given = plan.arms["baseline"].options
    assert given["url"] == "https://else.where/v1"
    assert given["headers"] == {"X-Team": "us"}
    assert given["command"] == ["serve", "--now"]
