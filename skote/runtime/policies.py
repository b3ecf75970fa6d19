"""Which replica takes a request: pure functions over the replicas' loads.

A policy gets the living replicas' loads in the order of their indices (never none), the prompt's length in tokens,
and the index of the replica that was chosen last (-1 at first); it returns the index of the replica to take.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from skote.types import UsageError

RECENT_WEIGHT = 0.2
"""What the newest prompt counts in a replica's recent mean length: an exponential average over about 5 prompts."""


@dataclass(frozen=True, slots=True)
class Load:
    """What a policy may know of a replica."""

    index: int
    requests: int
    """Requests that wait or run there."""
    mean_prompt_tokens: float | None
    """The recent mean prompt length, None before the first prompt."""


Policy = Callable[[Sequence[Load], int, int], int]


def recent_mean(mean: float | None, prompt_tokens: int) -> float:
    """The recent mean prompt length once a prompt of `prompt_tokens` joins it; the first prompt is the mean."""
    if mean is None:
        return float(prompt_tokens)
    return mean + RECENT_WEIGHT * (prompt_tokens - mean)


def round_robin(loads: Sequence[Load], prompt_tokens: int, last: int) -> int:
    """The next living replica after the last one, whatever its load."""
    del prompt_tokens
    return next((load.index for load in loads if load.index > last), loads[0].index)


def shortest_queue(loads: Sequence[Load], prompt_tokens: int, last: int) -> int:
    """The replica with the fewest requests waiting or running; the lowest index among equals."""
    del prompt_tokens, last
    return min(loads, key=lambda load: (load.requests, load.index)).index


def length_aware(loads: Sequence[Load], prompt_tokens: int, last: int) -> int:
    """The replica whose recent prompts were closest in length; then the least loaded, then the lowest index.

    A replica that has seen no prompt fits any length (distance 0), so that every replica finds its lengths before
    a distant one is taken.
    """
    del last

    def rank(load: Load) -> tuple[float, int, int]:
        mean = load.mean_prompt_tokens
        return (0.0 if mean is None else abs(mean - prompt_tokens), load.requests, load.index)

    return min(loads, key=rank).index


POLICIES = MappingProxyType(
    {"round_robin": round_robin, "shortest_queue": shortest_queue, "length_aware": length_aware}
)


def find_policy(name: str) -> Policy:
    """The policy called `name`.

    Raises:
        UsageError: there is no such policy.
    """
    if name not in POLICIES:
        raise UsageError(f"There is no routing policy {name!r}; choose one of {', '.join(POLICIES)}.")
    return POLICIES[name]
