"""What the worker answers by itself, in this process: how it is called over a pipe is test_replica's."""

from __future__ import annotations

from skote.engines.simulated import SimulatedEngine
from skote.runtime.worker import _call

STEP = [{"kernel": "down", "calls": 1, "us": 12.0}]


class Profiled(SimulatedEngine):
    """An engine that knows the kernels of its step."""

    def profile_step(self) -> list[dict[str, object]]:
        return STEP


def test_kernels_of_a_step_are_the_engines_where_it_knows_them() -> None:
    assert _call(Profiled(), "profile_step", ()) == STEP
    assert _call(SimulatedEngine(), "profile_step", ()) == []
