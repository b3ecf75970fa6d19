"""Every policy behind a dispatcher, over replicas that end launches at random: caps hold, and none is lost."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial

import pytest

from skote.runtime.dispatch import ReplicaDispatcher
from skote.runtime.lane import Lane
from skote.runtime.policies import POLICIES, PREFIX_BLOCK, Load
from skote.runtime.waiting import Ticket
from skote.types import Completion, Emit, Request, RowEnded

WAIT_S = 10.0


class Held:
    """A replica whose launches the test ends."""

    rows: int | None = None

    def __init__(self, index: int) -> None:
        self.index = index
        self.device = f"test:{index}"
        self.death: str | None = None
        self.seen: Counter[str] = Counter()
        self.running: list[tuple[Sequence[Request], Future[list[Completion]]]] = []

    def generate(
        self, requests: Sequence[Request], hear: Emit | None = None, ended: RowEnded | None = None
    ) -> Future[list[Completion]]:
        future: Future[list[Completion]] = Future()
        self.seen.update(request.request_id for request in requests)
        self.running.append((requests, future))
        return future

    def cancel(self, launch: Future[list[Completion]], row: int) -> None:
        raise AssertionError("nothing is cancelled")

    def watch_pace(self, heard: Callable[[int], None]) -> None:
        raise AssertionError("there is no limit to keep")

    def watch_end(self, heard: Callable[[], None]) -> None:
        """Nothing ends."""

    def restart(self) -> None:
        raise AssertionError("nothing ends")

    def end(self, place: int) -> None:
        requests, future = self.running.pop(place)
        future.set_result(
            [
                Completion(each.request_id, len(each.input_ids), (), (), 0, None, 0, "ok", replica=self.index)
                for each in requests
            ]
        )


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("cap", [1, 4])
def test_the_cap_holds_and_each_request_is_answered_once_and_as_itself(policy: str, cap: int) -> None:
    draw = random.Random(f"{policy}/{cap}")
    replicas = [Held(index) for index in range(3)]
    heads = [tuple(draw.choices(range(90), k=draw.randint(0, 5 * PREFIX_BLOCK))) for _ in range(5)]
    requests = [Request(str(number), (*draw.choice(heads), number), draw.randint(1, 50)) for number in range(300)]
    futures = []
    with ReplicaDispatcher(replicas, policy, max_concurrency_per_device=cap) as dispatcher:
        for request in requests:
            futures.append(dispatcher.dispatch(request))
            for replica in replicas:
                assert len(replica.running) <= cap
                if replica.running and draw.random() < 0.3:
                    replica.end(draw.randrange(len(replica.running)))
        while any(replica.running for replica in replicas):
            for replica in replicas:
                assert len(replica.running) <= cap
                if replica.running:
                    replica.end(draw.randrange(len(replica.running)))
        results = [future.result(WAIT_S) for future in futures]
        counts = dispatcher.counts
    assert [result.request_id for result in results] == [request.request_id for request in requests]
    seen = sum((replica.seen for replica in replicas), Counter())
    assert seen == Counter(request.request_id for request in requests)
    assert sum(count.dispatched for count in counts) == 300
    assert max(count.in_flight_peak for count in counts) <= cap


class Mortal(Held):
    """A replica that may end, and then says which of its launches it had not begun."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.heard_end: Callable[[], None] = lambda: None
        self.begun: Counter[str] = Counter()

    def watch_end(self, heard: Callable[[], None]) -> None:
        self.heard_end = heard

    def restart(self) -> None:
        self.death = None

    def end(self, place: int) -> None:
        self.begun.update(request.request_id for request in self.running[place][0])
        super().end(place)

    def die(self, draw: random.Random) -> None:
        death = self.death = f"Replica {self.index} died."  # its restart begins with the first answer
        lost, self.running = self.running, []
        for requests, future in lost:
            untouched = draw.random() < 0.5
            if not untouched:
                self.begun.update(request.request_id for request in requests)
            end = partial(
                Completion, output_ids=(), chunks=(), dispatched_ns=0, admitted_ns=None, end_ns=0, status="error",
                error=death, replica=self.index, untouched=untouched,
            )  # fmt: skip
            future.set_result([end(each.request_id, len(each.input_ids)) for each in requests])
        self.heard_end()


def living_again() -> None:
    """Wait until no replica is being started again."""
    for thread in threading.enumerate():
        if thread.name.startswith("revive-"):
            thread.join(WAIT_S)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("restarts", [0, 3])
def test_replicas_that_end_fail_what_they_had_begun_and_nothing_is_begun_twice(policy: str, restarts: int) -> None:
    draw = random.Random(f"{policy}/{restarts}")
    replicas = [Mortal(index) for index in range(4)]
    immortal = replicas[0]
    futures = []
    with ReplicaDispatcher(replicas, policy, max_concurrency_per_device=5, max_restarts=restarts) as dispatcher:
        for number in range(400):
            futures.append(dispatcher.dispatch(Request(str(number), (1,) * draw.randint(1, 80), draw.randint(1, 50))))
            for replica in replicas:
                assert len(replica.running) <= 5
                if replica.running and draw.random() < 0.3:
                    replica.end(draw.randrange(len(replica.running)))
            if number % 40 == 39:
                replica = draw.choice(replicas[1:])
                if replica.death is None:
                    replica.die(draw)
            living_again()
        while any(replica.running for replica in replicas):
            for replica in replicas:
                if replica.running:
                    replica.end(draw.randrange(len(replica.running)))
        results = [future.result(WAIT_S) for future in futures]
        counts, events = dispatcher.counts, dispatcher.events
    assert [result.request_id for result in results] == [str(number) for number in range(400)]
    begun = sum((replica.begun for replica in replicas), Counter())
    assert begun == Counter(str(number) for number in range(400))
    assert {result.status for result in results} == {"ok", "error"}
    for result in results:
        assert not result.untouched
        assert result.error == (None if result.status == "ok" else f"Replica {result.replica} died.")
        assert result.replica != immortal.index or result.status == "ok"
    assert [count.dispatched for count in counts] == [sum(replica.begun.values()) for replica in replicas]
    assert all(count.in_flight_peak <= 5 for count in counts)
    ends = Counter(event.replica for event in events if event.what == "ended")
    assert ends
    assert max(ends.values()) <= restarts + 1


def test_prompts_that_begin_alike_share_a_replica_until_it_has_no_room() -> None:
    replicas = [Held(index) for index in range(2)]
    first, second = ((head,) * 2 * PREFIX_BLOCK for head in (1, 2))

    def went_to(head: tuple[int, ...], tail: int) -> int:
        dispatcher.dispatch(Request("r", (*head, tail), 1))
        return next(
            replica.index for replica in replicas if tail in {each[0].input_ids[-1] for each, _ in replica.running}
        )

    with ReplicaDispatcher(replicas, "prefix_aware", max_concurrency_per_device=3) as dispatcher:
        assert [went_to(head, tail) for tail, head in enumerate((first, second, first, second, first), 10)] == [
            0,
            1,
            0,
            1,
            0,
        ]
        assert went_to(first, 20) == 1  # the other one has a slot left
        replicas[0].end(0)
        assert went_to(first, 21) == 0
        for replica in replicas:
            while replica.running:
                replica.end(0)


def test_a_policy_is_told_of_restarts_and_of_what_is_free() -> None:
    lane = Lane(Held(0), 3)
    lane.put(Ticket(Request("r", (1, 2), 5), 0, Future()))
    lane.restarts = 2
    assert lane.load == Load(0, requests=1, tokens=7, mean_prompt_tokens=2.0, free_slots=2, restarts=2)
