"""Conversations: requests of which each next one begins with all before it, the model's own answers included.

In a workload a first turn is a whole prompt, and each later one holds what follows the answer before it alone: the end
of that answer and the user's next turn. Only when that answer is there, the later turn becomes a request.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from skote.types import Completion, Request

Ids = tuple[int, ...]
Turns = tuple[int, ...]
NEVER_SENT = None


def parted(requests: Sequence[Request], turns: Sequence[int]) -> list[tuple[Request, ...]]:
    """The conversations of a block, of so many `turns` each."""
    rest = iter(requests)
    return [tuple(itertools.islice(rest, count)) for count in turns]


def at_full_length(requests: Sequence[Request], turns: Sequence[int]) -> list[Request]:
    """`requests` with prompts as long as they will be, if every answer takes all its tokens; their ids mean nothing.

    The first turns are themselves.
    """
    full: list[Request] = []
    for conversation in parted(requests, turns):
        before: Ids = ()
        for request in conversation:
            whole = replace(request, input_ids=before + request.input_ids)
            full.append(whole)
            before = whole.input_ids + whole.input_ids[:1] * whole.max_new_tokens
    return full


def as_sent(requests: Sequence[Request], later: Mapping[Any, Mapping[str, Ids]]) -> list[Request]:
    """`requests` with the prompts that they had, of those later turns that had the same in all arms.

    `later` has, for each arm, the prompts of the later turns that it was sent. Where the answers before it differ, the
    arms were asked different things, and there is nothing to compare.
    """
    every = list(later.values())
    sent = {name: prompt for name, prompt in every[0].items() if all(each.get(name) == prompt for each in every)}
    names = set().union(*every)
    return [
        replace(request, input_ids=sent[request.request_id]) if request.request_id in sent else request
        for request in requests
        if request.request_id in sent or request.request_id not in names
    ]


class Conversations:
    """The conversations of one pass: what is sent at its start, and what after an answer.

    Args:
        requests: of the pass, conversation by conversation.
        turns: of each conversation.
        think_ns: for each of `requests`, from the end of the answer before it; nothing waits for those of first turns.
        concurrency: conversations at one time; None is no limit.

    `prompts` are those of the later turns, as they were sent, by request id.
    """

    def __init__(
        self, requests: Sequence[Request], turns: Sequence[int], think_ns: Sequence[int], concurrency: int | None
    ) -> None:
        every = parted(requests, turns)
        self.prompts: dict[str, Ids] = {}
        self.first = [conversation[0] for conversation in every[:concurrency]]
        self._waiting = deque(conversation[0] for conversation in every[len(self.first) :])
        self._later = {
            request.request_id: conversation[index:]
            for conversation in every
            for index, request in enumerate(conversation, start=1)
        }
        self._think_ns = dict(zip((each.request_id for each in requests), think_ns, strict=True))

    def follow(self, request: Request, completion: Completion) -> Iterator[tuple[int | None, Request]]:
        """What comes after `request` has ended: (ns from its end, request), None for what can never be sent.

        That is its next turn; where it failed, all of its later turns are lost. The end of a conversation lets the
        next one that waits begin.
        """
        later = self._later[request.request_id]
        if later and completion.status == "ok":
            answer, following = completion.output_ids, later[0].input_ids
            if answer[-1:] == following[:1]:  # the model has ended its turn itself: once is enough
                answer = answer[:-1]
            ids = request.input_ids + answer + following
            self.prompts[later[0].request_id] = ids
            yield self._think_ns[later[0].request_id], replace(later[0], input_ids=ids)
            return
        for lost in later:
            yield NEVER_SENT, lost
        if self._waiting:
            yield 0, self._waiting.popleft()
