"""Times of kernels: how launches add up, and, on a GPU, that a known step is seen as what it is."""

from __future__ import annotations

import pytest
import torch
from torch.profiler import ProfilerActivity

from skote.runtime import profile
from skote.runtime.profile import aggregate, kernel_times


def test_launches_add_up_by_name_and_overlap_is_counted_once_in_their_own_times() -> None:
    """Two runs: down from 0 to 10, norm waiting from 4 to 13, down from 15 to 19 after a gap; all again at 100.

    Own times: 10 of down, then norm alone until 13, then 4 of down.
    """
    run = [("down", 0.0, 10.0), ("norm", 4.0, 13.0), ("down", 15.0, 19.0)]
    launches = run + [(name, start + 100, end + 100) for name, start, end in run]

    assert aggregate(launches, repeats=2) == [
        {"kernel": "down", "calls": 2, "us": 14.0, "own_us": 14.0},
        {"kernel": "norm", "calls": 1, "us": 9.0, "own_us": 3.0},
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
    assert all(0 < entry["own_us"] <= entry["us"] < 1e5 for entry in found)
