"""What an arm makes of requests before its engine sees them: salts, where the engine keeps prefixes."""

from __future__ import annotations

from concurrent.futures import Future

import pytest

from skote.eval.arms import Arm
from skote.types import Completion, Request

REQUESTS = [Request(f"r{index}", (1, 2, index), 3) for index in range(3)]


class Replica:
    """Notes the salts of what it is asked."""

    def __init__(self):
        self.salts = []

    def generate(self, requests):
        self.salts.extend(request.cache_salt for request in requests)
        future = Future()
        future.set_result([Completion(each.request_id, 3, (), (), 0, 0, 0, "ok") for each in requests])
        return future


def arm(*replicas, keeps_prefixes):
    return Arm("candidate", "odd", list(replicas), None, [], None, [], None, keeps_prefixes)


def test_each_pass_has_a_salt_of_its_own_which_all_its_requests_share():
    one = arm(keeps_prefixes=True)
    passes = [one.salted(REQUESTS) for _ in range(3)]
    salts = [{request.cache_salt for request in requests} for requests in passes]
    assert [len(each) for each in salts] == [1, 1, 1]
    assert len(set.union(*salts, {""})) == 4
    for requests in passes:
        assert [(each.request_id, each.input_ids) for each in requests] == [
            (each.request_id, each.input_ids) for each in REQUESTS
        ]


@pytest.mark.parametrize("keeps", [True, False])
def test_warm_up_shares_nothing_with_a_pass(keeps):
    first, second = Replica(), Replica()
    one = arm(first, second, keeps_prefixes=keeps)
    one.warm_up(REQUESTS)
    assert first.salts == second.salts
    assert len(set(first.salts)) == 1
    assert ("" not in first.salts) == keeps
    assert (one.salted(REQUESTS)[0].cache_salt in first.salts) == (not keeps)
