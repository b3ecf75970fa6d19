"""Whole runs of engines that cheat, each caught, and of the honest one that they are made of."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

HERE = Path(__file__).parent
COMMAND = (
    "model=tiny_shape", "engine=simulated", "+engine.prefill_ms=20", "+engine.token_ms=2", "report=none",
    "workload.prompts=sentences", "workload.prompt_tokens=20", "workload.blocks=5", "workload.requests_per_block=2",
    "workload.max_new_tokens=8", "measure.harness_overhead=false", "hydra.run.dir=run",
)  # fmt: skip
TWO_ARMS = ("compare=simulated", "+compare.prefill_ms=20", "+compare.token_ms=2")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("engine", "options", "caught"),
    [
        ("skote.engines.simulated.SimulatedEngine", TWO_ARMS, {}),
        ("liars.HastyEngine", TWO_ARMS, {"parity_failed": "invalid"}),
        ("liars.TurncoatEngine", (*TWO_ARMS, "+engine.honest=3"), {"parity_failed": "invalid"}),
        ("liars.ShortEngine", ("compare=none",), {"early_end": "invalid"}),
        ("liars.KeepingEngine", ("compare=none",), {"hidden_cache": "warning"}),
        ("liars.BackdatingEngine", ("compare=none",), {"late_hand_back": "invalid", "early_stamps": "invalid"}),
        ("liars.EarlyEngine", ("compare=none",), {"early_stamps": "invalid"}),
    ],
)
def test_a_cheat_is_caught(command, tmp_path, monkeypatch, engine, options, caught):
    """A turncoat is honest for one request of warm-up and the two of the gate, which lets it pass."""
    monkeypatch.syspath_prepend(HERE)
    _, _, err = command(*COMMAND, f"engine._target_={engine}", *options)
    metrics = json.loads((tmp_path / "run" / "metrics.json").read_text(encoding="utf-8"))
    found = {each["code"]: each["severity"] for each in metrics["findings"]}

    assert err == ""
    assert caught.items() <= found.items()
    if not caught:
        assert not {"hidden_cache", "early_stamps", "late_hand_back", "parity_failed"} & found.keys()
