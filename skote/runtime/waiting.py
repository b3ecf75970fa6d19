"""The requests that wait for a replica: interactive ones before batch ones, which still get their turn."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import islice, takewhile
from typing import Literal

from skote.types import Completion, Emit, Request

BATCH_TURN = 4
"""While requests of both kinds wait, every fourth launch takes batch ones: these wait at most four launches each."""


Refusal = Literal["error", "cancelled"]
"""How a request ends that no replica took."""


@dataclass(slots=True, eq=False)
class Ticket:
    """A request on its way; once it was launched, `drop` tells the replica that nobody waits for it.

    `hear` is told its tokens as they come.
    """

    request: Request
    dispatched_ns: int
    future: Future[Completion]
    hear: Callable[[Sequence[int]], None] | None = None
    drop: Callable[[], None] | None = None
    cancelled: bool = False

    @property
    def tokens(self) -> int:
        """Tokens that it may take, read and written."""
        return len(self.request.input_ids) + self.request.max_new_tokens

    def refused(self, status: Refusal, sentence: str, replica: int = -1, device: str = "none") -> Completion:
        """Its completion where no replica took it; `replica` is the one in whose queue it was."""
        return Completion(
            request_id=self.request.request_id,
            input_tokens=len(self.request.input_ids),
            output_ids=(),
            chunks=(),
            dispatched_ns=self.dispatched_ns,
            admitted_ns=None,
            end_ns=time.monotonic_ns(),
            status=status,
            error=sentence,
            replica=replica,
            device=device,
        )


def hearer(tickets: Sequence[Ticket]) -> Emit | None:
    """What hears the tokens of a launch of `tickets`; None where nobody wants to."""
    hears = [ticket.hear for ticket in tickets]
    if not any(hears):
        return None

    def hear(row: int, token_ids: Sequence[int]) -> None:
        heard = hears[row]
        if heard is not None:
            heard(token_ids)

    return hear


_Line = OrderedDict[Ticket, None]
"""A queue out of whose middle a ticket goes at once, however many wait."""


class Waiting:
    """Two lines, each in the order of arrival. Truth and length are those of both."""

    def __init__(self) -> None:
        self._interactive: _Line = OrderedDict()
        self._batch: _Line = OrderedDict()
        self._passed = 0  # launches since batch requests wait and were not taken

    def __len__(self) -> int:
        return len(self._interactive) + len(self._batch)

    def __iter__(self) -> Iterator[Ticket]:
        yield from self._interactive
        yield from self._batch

    def __contains__(self, ticket: Ticket) -> bool:
        return ticket in self._line(ticket)

    def put(self, ticket: Ticket) -> None:
        """Let a request wait."""
        self._line(ticket)[ticket] = None

    def move_up(self, ticket: Ticket) -> None:
        """Let a request that waits go before all of its line that were dispatched later."""
        line = self._line(ticket)
        earlier = list(takewhile(lambda each: each.dispatched_ns < ticket.dispatched_ns, line))
        for each in (ticket, *reversed(earlier)):
            line.move_to_end(each, last=False)

    def remove(self, ticket: Ticket) -> bool:
        """Take a request out; whether it was there."""
        line = self._line(ticket)
        if ticket not in line:
            return False
        del line[ticket]
        return True

    def clear(self) -> list[Ticket]:
        """Take all out."""
        taken = list(self)
        self._interactive.clear()
        self._batch.clear()
        return taken

    @property
    def first(self) -> Ticket:
        """The one that is next."""
        return next(iter(self._next))

    def batch_size(self, most: int) -> int:
        """How many may share the next launch: the greedy ones at the head of its line, at most `most`; at least one."""
        greedy = takewhile(lambda ticket: ticket.request.sampling.greedy, self._next)
        return sum(1 for _ in islice(greedy, most)) or 1

    def pop(self, size: int) -> list[Ticket]:
        """The next launch, of `size` requests."""
        line = self._next
        self._passed = self._passed + 1 if self._batch and line is self._interactive else 0
        return [line.popitem(last=False)[0] for _ in range(size)]

    @property
    def _next(self) -> _Line:
        if self._batch and (not self._interactive or self._passed >= BATCH_TURN - 1):
            return self._batch
        return self._interactive

    def _line(self, ticket: Ticket) -> _Line:
        return self._batch if ticket.request.priority == "batch" else self._interactive
