"""How a dispatcher treats its replicas, checked.

Each sentence begins with the option's name, so that a front which knows it by a longer one (`router.max_queue` of a
run's configuration) has only to put the rest in front.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from skote.runtime.policies import new_policy
from skote.types import UsageError, is_number, is_whole

MOST_WINDOW_MS = 1e9
"""A wait of a thread's takes no more than some thousand million seconds."""


@dataclass(frozen=True, slots=True)
class DispatchOptions:
    """How a dispatcher treats its replicas.

    Attributes:
        policy: a name in `skote.runtime.policies.POLICIES`.
        max_concurrency_per_device: unanswered launches of a replica at one time.
        microbatch_window_ms: how long a request may wait for others to share its launch; 0 is off.
        microbatch_max: the most requests of a launch.
        max_queue: the most requests that may wait for a replica, past which one is refused; None is no limit.
        max_restarts: how often a replica that ended is started again.
        tpot_slo_ms: milliseconds between two tokens of a request, for whose sake others wait; None is no limit.

    Raises:
        UsageError: an unknown policy, a value of the wrong type, a number out of its range.
    """

    policy: str = "round_robin"
    max_concurrency_per_device: int = 1
    microbatch_window_ms: float = 0.0
    microbatch_max: int = 8
    max_queue: int | None = None
    max_restarts: int = 0
    tpot_slo_ms: float | None = None

    def __post_init__(self) -> None:
        new_policy(self.policy)
        _check_count("max_concurrency_per_device", self.max_concurrency_per_device, 1)
        _check_count("microbatch_max", self.microbatch_max, 1)
        _check_count("max_restarts", self.max_restarts, 0)
        if self.max_queue is not None:
            _check_count("max_queue", self.max_queue, 0, ", or null for no limit")
        window_ms = self.microbatch_window_ms
        if not is_number(window_ms) or not 0 <= window_ms <= MOST_WINDOW_MS:
            raise UsageError(
                f"microbatch_window_ms must be a number from 0 (off) to {MOST_WINDOW_MS:g}, got {window_ms!r}."
            )
        slo_ms = self.tpot_slo_ms
        if slo_ms is not None and not (is_number(slo_ms) and 0 < slo_ms < math.inf):
            raise UsageError(f"tpot_slo_ms must be a number above 0, or null for no limit, got {slo_ms!r}.")


def _check_count(name: str, value: int, least: int, otherwise: str = "") -> None:
    if not is_whole(value) or value < least:
        raise UsageError(f"{name} must be a whole number of at least {least}{otherwise}, got {value!r}.")
