"""What runs where there are fewer accelerators than an experiment asks for."""

from __future__ import annotations

from pathlib import Path

import pytest

from skote.config import RunConfig
from skote.eval import stand_in as module
from skote.eval.experiment import compose_experiment
from skote.eval.stand_in import stand_in
from skote.types import UsageError

EXPERIMENTS = Path(__file__).parents[2] / "experiments"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "small.yaml").write_text(
        "defaults: [config, override model: tiny_shape, _self_]\nworkload: {blocks: 2}\n"
    )
    return tmp_path


def accelerators(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    names = [f"cuda:{index}" for index in range(count)] or ["cpu"]
    monkeypatch.setattr(module, "resolve_devices", lambda devices: names)


@pytest.mark.parametrize(("devices", "there", "needed"), [(2, 0, True), (2, 1, True), (2, 2, False), ("cpu", 0, False)])
def test_it_runs_where_there_are_too_few(
    folder: Path, monkeypatch: pytest.MonkeyPatch, devices: int | str, there: int, needed: bool
) -> None:
    accelerators(monkeypatch, there)
    told: list[str] = []
    found = stand_in(
        RunConfig(devices=devices, instead="small"), "big", [folder], ["workload.requests_per_block=3"], told.append
    )

    assert (found is not None) == bool(told) == needed
    if found is not None:
        model, workload = found.settings.model, found.settings.workload
        assert (model.name, workload.blocks, workload.requests_per_block) == ("tiny shape", 2, 3)
        assert told == [f"This machine has {there} of the 2 accelerator(s) that big asks for: small.yaml runs instead"]
        assert found.stands_for == {"experiment": "big", "sentence": f"{told[0]}."}


def test_a_file_that_is_not_there_is_one_sentence(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    accelerators(monkeypatch, 0)
    with pytest.raises(UsageError, match=r"instead=lost: there is no lost\.yaml in"):
        stand_in(RunConfig(devices=1, instead="lost"), "big", [folder], [], print)


@pytest.mark.parametrize("path", sorted(EXPERIMENTS.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_experiment_composes_and_so_does_what_runs_instead(path: Path) -> None:
    settings = compose_experiment(path)
    if settings.instead is not None:
        assert compose_experiment(EXPERIMENTS / f"{settings.instead}.yaml").instead is None
