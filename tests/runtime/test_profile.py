"""Times of kernels: how launches add up, and, on a GPU, that a known step is seen as what it is."""

from __future__ import annotations

import pytest
import torch
from torch.profiler import ProfilerActivity

from skote.runtime import profile
from skote.runtime.profile import aggregate, kernel_times


def test_launches_add_up_by_name_the_longest_first() -> None:
    """Two runs of three launches: `down` takes 10 + 14 in two runs, `norm` (1 + 3) + (2 + 4)."""
    launches = [("norm", 1.0), ("down", 10.0), ("norm", 3.0), ("norm", 2.0), ("down", 14.0), ("norm", 4.0)]

    assert aggregate(launches, repeats=2) == [
        {"kernel": "down", "calls": 1, "us": 12.0},
        {"kernel": "norm", "calls": 2, "us": 5.0},
    ]
    assert aggregate([], repeats=2) == []


def test_without_a_device_to_profile_nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile, "supported_activities", lambda: {ProfilerActivity.CPU})
    ran: list[int] = []

    assert kernel_times(lambda: ran.append(1), repeats=3) == []
    assert ran == []


@pytest.mark.gpu
def test_kernels_of_a_captured_graph_are_seen_one_by_one() -> None:
    x = torch.randn(1 << 20, device="cuda")
    torch.sin(x, out=x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(3):
            torch.sin(x, out=x)
        torch.cos(x, out=x)
    found = kernel_times(graph.replay, repeats=4)

    assert [entry["calls"] for entry in found] == [3, 1]
    assert "sin" in found[0]["kernel"]
    assert all(0 < entry["us"] < 1e5 for entry in found)
