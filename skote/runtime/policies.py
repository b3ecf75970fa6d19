"""Which replica takes a request: small classes that look at the replicas' loads.

A policy gets the loads of the replicas that may take the request, in the order of their indices (never none), and the
prompt's length in tokens; it returns the index of the replica to take. A dispatcher has a policy of its own and asks it
under its lock.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

from skote.types import UsageError

RECENT_WEIGHT = 0.2
"""What the newest prompt counts in a replica's recent mean length: an exponential average over about 5 prompts."""


@dataclass(frozen=True, slots=True)
class Load:
    """What a policy may know of a replica."""

    index: int
    requests: int
    """Requests that wait or run there."""
    tokens: int
    """Prompt tokens and new tokens that those requests may take."""
    mean_prompt_tokens: float | None
    """The recent mean prompt length, None before the first prompt."""


class Policy(Protocol):
    """Chooses a replica."""

    def choose(self, loads: Sequence[Load], prompt_tokens: int) -> int:
        """The index of one of `loads`."""


def recent_mean(mean: float | None, prompt_tokens: int) -> float:
    """The recent mean prompt length once a prompt of `prompt_tokens` joins it; the first prompt is the mean."""
    if mean is None:
        return float(prompt_tokens)
    return mean + RECENT_WEIGHT * (prompt_tokens - mean)


class RoundRobin:
    """The next replica after the last one, whatever its load."""

    def __init__(self) -> None:
        self._last = -1

    def choose(self, loads: Sequence[Load], prompt_tokens: int) -> int:
        """As `Policy.choose`."""
        del prompt_tokens
        self._last = next((load.index for load in loads if load.index > self._last), loads[0].index)
        return self._last


class ShortestQueue:
    """The replica with the fewest requests waiting or running; the lowest index among equals."""

    def choose(self, loads: Sequence[Load], prompt_tokens: int) -> int:
        """As `Policy.choose`."""
        del prompt_tokens
        return min(loads, key=lambda load: (load.requests, load.index)).index


class LeastWork:
    """The replica whose requests may take the fewest tokens; then the fewest requests, then the lowest index."""

    def choose(self, loads: Sequence[Load], prompt_tokens: int) -> int:
        """As `Policy.choose`."""
        del prompt_tokens
        return min(loads, key=lambda load: (load.tokens, load.requests, load.index)).index


class LengthAware:
    """The replica whose recent prompts were closest in length; then the least loaded, then the lowest index.

    A replica that has seen no prompt fits any length (distance 0), so that every replica finds its lengths before
    a distant one is taken.
    """

    def choose(self, loads: Sequence[Load], prompt_tokens: int) -> int:
        """As `Policy.choose`."""

        def rank(load: Load) -> tuple[float, int, int]:
            mean = load.mean_prompt_tokens
            return (0.0 if mean is None else abs(mean - prompt_tokens), load.requests, load.index)

        return min(loads, key=rank).index


POLICIES: Mapping[str, Callable[[], Policy]] = MappingProxyType(
    {
        "round_robin": RoundRobin,
        "shortest_queue": ShortestQueue,
        "least_work": LeastWork,
        "length_aware": LengthAware,
    }
)


def new_policy(name: str) -> Policy:
    """A policy of the kind called `name`.

    Raises:
        UsageError: there is no such policy.
    """
    if not isinstance(name, str) or name not in POLICIES:
        raise UsageError(f"policy {name!r} is not known; choose one of {', '.join(POLICIES)}.")
    return POLICIES[name]()
