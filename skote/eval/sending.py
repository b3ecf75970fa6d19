"""Sends a block of a workload through an arm, as its load says."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from skote.eval.conversation import Conversations, Ids
from skote.eval.measure import run_pass
from skote.eval.schedule import Cancelling, run_schedule
from skote.eval.workload import Workload
from skote.types import Completion, Request


def send_block(
    dispatcher: Cancelling,
    workload: Workload,
    block: int,
    requests: Sequence[Request],
    on_completion: Callable[[int, Completion], None],
    give_up: Callable[[], bool],
) -> dict[str, Ids]:
    """Send the `requests` of a block, and return when all have ended; the prompts of later turns as they were sent.

    `on_completion` and `give_up` are those of `run_schedule`; a closed loop and a burst of single requests are not
    given up.
    """
    if workload.turns:
        open_at_once = workload.concurrency if workload.load == "closed" else None
        talks = Conversations(requests, workload.turns[block], workload.think_ns[block], open_at_once)
        times = workload.times[block] if workload.times else (0,) * len(talks.first)
        run_schedule(dispatcher, talks.first, times, on_completion, give_up, talks.follow)
        return talks.prompts
    if workload.times:
        run_schedule(dispatcher, requests, workload.times[block], on_completion, give_up)
    else:
        run_pass(dispatcher, requests, workload.load, workload.concurrency or len(requests), on_completion)
    return {}
