"""Which replica takes a request: small classes that look at the replicas' loads.

A policy gets the loads of the replicas that may take the request, in the order of their indices (never none), and the
request; it returns the index of the replica to take. A dispatcher has a policy of its own and asks it under its lock,
for a request whose replica ended once more.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from types import MappingProxyType
from typing import Protocol

from skote.types import Request, UsageError

RECENT_WEIGHT = 0.2
"""What the newest prompt counts in a replica's recent mean length: an exponential average over about 5 prompts."""
PREFIX_BLOCK = 64
"""Tokens that are remembered of a prompt as one."""
PREFIX_BLOCKS = 16_384
"""Blocks that are remembered of a replica, the newest: a million tokens."""
BUSIER_BY, BUSIER_TIMES = 4, 1.5
"""Requests that a replica may have more than the least busy one, or times as many, and still get a prompt that begins
as one of its own."""


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
    free_slots: int
    """Launches that it could take at once."""
    restarts: int = 0
    """How often it was started again; what it had kept before is gone."""


class Policy(Protocol):
    """Chooses a replica."""

    def choose(self, loads: Sequence[Load], request: Request) -> int:
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

    def choose(self, loads: Sequence[Load], request: Request) -> int:
        """As `Policy.choose`."""
        del request
        self._last = next((load.index for load in loads if load.index > self._last), loads[0].index)
        return self._last


class ShortestQueue:
    """The replica with the fewest requests waiting or running; the lowest index among equals."""

    def choose(self, loads: Sequence[Load], request: Request) -> int:
        """As `Policy.choose`."""
        del request
        return min(loads, key=lambda load: (load.requests, load.index)).index


class LeastWork:
    """The replica whose requests may take the fewest tokens; then the fewest requests, then the lowest index."""

    def choose(self, loads: Sequence[Load], request: Request) -> int:
        """As `Policy.choose`."""
        del request
        return min(loads, key=lambda load: (load.tokens, load.requests, load.index)).index


class LengthAware:
    """The replica whose recent prompts were closest in length; then the least loaded, then the lowest index.

    A replica that has seen no prompt fits any length (distance 0), so that every replica finds its lengths before
    a distant one is taken.
    """

    def choose(self, loads: Sequence[Load], request: Request) -> int:
        """As `Policy.choose`."""
        length = len(request.input_ids)

        def rank(load: Load) -> tuple[float, int, int]:
            mean = load.mean_prompt_tokens
            return (0.0 if mean is None else abs(mean - length), load.requests, load.index)

        return min(loads, key=rank).index


class PrefixAware:
    """The replica that was sent the longest beginning of the prompt; then the least loaded, then who was sent least.

    One that is busy does not get it: none without a free slot while another has one, and none that has many more
    requests than the least busy one (`BUSIER_BY`, `BUSIER_TIMES`). What was sent is remembered here, in blocks: what a
    replica has kept of it (`engine.prefix_cache`) nobody asks, so that no message is needed. One that was started again
    was sent nothing.
    """

    def __init__(self) -> None:
        self._sent: defaultdict[tuple[int, int], _Sent] = defaultdict(_Sent)  # by index and restarts

    def choose(self, loads: Sequence[Load], request: Request) -> int:
        """As `Policy.choose`."""
        fitting = [load for load in loads if load.free_slots] or loads
        least = min(load.requests for load in fitting)
        most = max(least + BUSIER_BY, least * BUSIER_TIMES)
        blocks = _blocks(request)

        def rank(load: Load) -> tuple[int, int, int, int]:
            sent = self._sent[load.index, load.restarts]
            return -sent.common(blocks), load.requests, len(sent), load.index

        chosen = min((load for load in fitting if load.requests <= most), key=rank)
        self._sent[chosen.index, chosen.restarts].note(blocks)
        return chosen.index


class _Sent:
    """Blocks of prompts that a replica was sent, the newest `PREFIX_BLOCKS`."""

    def __init__(self) -> None:
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    def common(self, blocks: Sequence[int]) -> int:
        """How many of `blocks` are there, up to the first that is not."""
        return sum(1 for _ in takewhile(self._blocks.__contains__, blocks))

    def note(self, blocks: Sequence[int]) -> None:
        """Remember `blocks`; a prompt's end is forgotten before its beginning."""
        for block in reversed(blocks):
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        while len(self._blocks) > PREFIX_BLOCKS:
            self._blocks.popitem(last=False)


def _blocks(request: Request) -> list[int]:
    """A hash for each full block of the prompt, of its salt and all tokens to the block's end; two that are equal by
    accident send a prompt to the wrong replica, and no more."""
    ids, blocks, before = request.input_ids, [], hash(request.cache_salt)
    for stop in range(PREFIX_BLOCK, len(ids) + 1, PREFIX_BLOCK):
        before = hash((before, ids[stop - PREFIX_BLOCK : stop]))
        blocks.append(before)
    return blocks


POLICIES: Mapping[str, Callable[[], Policy]] = MappingProxyType(
    {
        "round_robin": RoundRobin,
        "shortest_queue": ShortestQueue,
        "least_work": LeastWork,
        "length_aware": LengthAware,
        "prefix_aware": PrefixAware,
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
