"""What is sent besides the timed requests, with prompts of the same form, so that no engine can tell them apart."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable, Collection, Iterator, Sequence

from skote.types import Request, UsageError

NEVER = "\N{OBJECT REPLACEMENT CHARACTER}" * 64
"""A stop string that no answer has."""

Ids = tuple[int, ...]
_TRIES = 1000


class Unmeasured:
    """Prompts that are none of the `measured` ones.

    `draw` gives one of about as many tokens as it is told.
    """

    def __init__(self, draw: Callable[[int], Ids], measured: Collection[Ids]) -> None:
        self._draw = draw
        self._measured = tuple(measured)
        self._taken = set(measured)

    def drawn(self, length: int) -> Ids:
        """The next prompt as it was drawn; never the same twice.

        Raises:
            UsageError: there is no other one.
        """
        ids = self._another(lambda: self._draw(length))
        self._taken.add(ids)
        return ids

    def fitted(self, length: int) -> Ids:
        """A prompt of exactly `length` tokens.

        One of another length is cut, or goes on with the next: between what all prompts begin with and what all end
        with, such as the marks of a chat's turns; at its end where that leaves a measured one.

        Raises:
            UsageError: there is no other one.
        """
        return self._another(lambda: self._fit(self._draw(length), length))

    def shuffled(self, like: Ids, rng: random.Random) -> Ids | None:
        """The tokens of `like`, a measured prompt, in another order, but for what all begin and all end with.

        None where there is no other order that nobody has.
        """
        head, tail = self._common
        if head + tail >= len(like):
            head = tail = 0
        end = len(like) - tail
        for _ in range(_TRIES):
            ids = (*like[:head], *rng.sample(like[head:end], end - head), *like[end:])
            if ids not in self._taken:
                self._taken.add(ids)
                return ids
        return None

    @functools.cached_property
    def _common(self) -> tuple[int, int]:
        """How many tokens all measured prompts begin with, and end with."""
        return _shared(self._measured), _shared_end(self._measured)

    def _another(self, make: Callable[[], Ids]) -> Ids:
        for _ in range(_TRIES):
            ids = make()
            if ids not in self._taken:
                return ids
        raise UsageError(
            "The prompts do not make others than the measured ones, for warm-up and parity: raise "
            "workload.prompt_tokens, lower workload.requests_per_block or workload.blocks, or give other prompts."
        )

    def _fit(self, ids: Ids, length: int) -> Ids:
        if len(ids) == length:
            return ids
        every = [*self._measured, ids]
        head = _shared(every)
        tail = min(_shared([each[::-1] for each in every]), min(map(len, every)) - head)
        start, body, end = ids[:head], ids[head : len(ids) - tail], ids[len(ids) - tail :]
        whole = ids
        while len(body) < length - head - tail:
            ids = self._draw(length)
            body += ids[head : len(ids) - tail]
        fitted = start + body[: length - head - tail] + end
        return whole[:length] if fitted in self._taken and len(whole) > length else fitted


def _shared(prompts: Sequence[Ids]) -> int:
    """How many tokens all of `prompts` begin with: as many as the first and the last of them in order do."""
    pairs = zip(min(prompts), max(prompts), strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


def _shared_end(prompts: Sequence[Ids]) -> int:
    """How many tokens all of `prompts`, which may be many and long, end with."""
    first, shared = prompts[0], len(prompts[0])
    for other in prompts[1:]:
        pairs = zip(itertools.islice(reversed(first), shared), reversed(other), strict=False)
        shared = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
    return shared


def warmup_requests(requests: Sequence[Request], prompts: Unmeasured) -> tuple[Request, ...]:
    """Requests at the shapes of `requests`, which never stop early; looked through for a stop string where those are.

    One for each distinct shape (prompt tokens, new tokens) where there are at most five, else for the shortest, the
    longest, the quartiles between them by prompt length, and the shape with the most new tokens.

    Raises:
        UsageError: there are no prompts for it.
    """
    sampling = requests[0].sampling
    stop_strings = (NEVER,) if any(request.stop_strings for request in requests) else ()
    return tuple(
        Request(f"w{index:02d}", prompts.fitted(length), new, sampling, ignore_eos=True, stop_strings=stop_strings)
        for index, (length, new) in enumerate(_shapes(requests))
    )


def _shapes(requests: Sequence[Request]) -> Iterator[tuple[int, int]]:
    shapes = sorted({(len(request.input_ids), request.max_new_tokens) for request in requests})
    last = len(shapes) - 1
    indices = {round(last * quarter / 4) for quarter in range(5)}
    indices.add(max(range(len(shapes)), key=lambda index: (shapes[index][1], shapes[index][0])))
    return (shapes[index] for index in sorted(indices))
