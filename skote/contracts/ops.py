"""Which operators a call runs, and how often."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import torch


def count_ops(run: Callable[[], object]) -> Counter[str]:
    """Calls of each operator while `run` runs, by the name that the profiler gives it, such as aten::mm."""
    with torch.autograd.profiler.profile(use_kineto=False) as profile:
        run()
    return Counter(event.name for event in profile.function_events or ())
