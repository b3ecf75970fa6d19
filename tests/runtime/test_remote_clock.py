"""Another clock's offset, from exchanges whose truth the tests know."""

from __future__ import annotations

import random

from skote.runtime.remote_clock import KEPT, Exchange, RemoteClock, clock_id


def exchange(ahead_ns: int, out_ns: int, held_ns: int, back_ns: int, start_ns: int = 1_000) -> Exchange:
    """With a clock that is ahead by `ahead_ns`, and messages that take `out_ns` and `back_ns`."""
    there = start_ns + out_ns + ahead_ns
    return Exchange(start_ns, there, there + held_ns, start_ns + out_ns + held_ns + back_ns)


def test_equal_ways_give_the_very_offset() -> None:
    found = exchange(ahead_ns=5_000, out_ns=300, held_ns=9_000, back_ns=300)
    assert (found.offset_ns, found.uncertainty_ns) == (5_000, 300)


def test_unequal_ways_stay_within_the_uncertainty() -> None:
    dice = random.Random(0)
    for _ in range(300):
        ahead = dice.randint(-(10**12), 10**12)
        found = exchange(ahead, dice.randint(0, 10**6), dice.randint(0, 10**9), dice.randint(0, 10**6))
        assert abs(found.offset_ns - ahead) <= found.uncertainty_ns + 1


def test_the_quickest_of_the_latest_exchanges_counts() -> None:
    clock = RemoteClock(same=False)
    assert (clock.uncertainty_ns, clock.here(7)) == (None, 7)
    clock.note(exchange(40, 10, 0, 10))
    clock.note(exchange(60, 900, 0, 900))
    assert (clock.offset_ns, clock.uncertainty_ns, clock.here(1_000)) == (40, 10, 960)
    for _ in range(KEPT):
        clock.note(exchange(70, 20, 0, 20))
    assert (clock.offset_ns, clock.uncertainty_ns) == (70, 20)


def test_one_clock_needs_no_exchange() -> None:
    clock = RemoteClock(same=True)
    clock.note(exchange(40, 10, 0, 10))
    assert (clock.offset_ns, clock.uncertainty_ns) == (0, 0)
    assert clock_id() == clock_id()
