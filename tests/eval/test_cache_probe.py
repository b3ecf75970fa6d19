"""Whether an engine keeps prompts: what it is asked, and what is made of its times."""

from __future__ import annotations

import random
from concurrent.futures import Future
from dataclasses import replace

import pandas as pd
import pytest

from skote.eval.cache_findings import cache_findings
from skote.eval.cache_probe import CacheProbe, cache_probe, run_probe
from skote.eval.derive import Measured
from skote.eval.record import read_run
from skote.eval.warmup import Unmeasured
from skote.types import Chunk, Completion, Request

MS = 1_000_000
PROMPTS = [(0, 0, *range(first, first + 10), 9, 9) for first in (20, 40)]  # two tokens of a template at each end


def unmeasured(prompts=PROMPTS):
    return Unmeasured(lambda length: (1,) * length, prompts)


def test_the_prompts_are_the_longest_one_s_tokens_in_another_order():
    block = [Request("a", PROMPTS[0][:-1], 8), Request("b", PROMPTS[1], 16, ignore_eos=True)]
    probe = cache_probe(block, unmeasured(), random.Random(0))

    for request in (probe.first, *probe.others):
        ids = request.input_ids
        assert request == replace(block[1], input_ids=ids)
        assert (ids[:2], ids[-2:], sorted(ids[2:-2])) == ((0, 0), (9, 9), list(range(40, 50)))
    assert probe.last == replace(block[1], max_new_tokens=1)
    assert len({PROMPTS[1], probe.first.input_ids, *(each.input_ids for each in probe.others)}) == 4


def test_a_lone_prompt_has_no_beginning_of_all_and_one_token_no_other_order():
    [prompt] = prompts = [(1, 2, 3, 4)]
    probe = cache_probe([Request("a", prompt, 1)], unmeasured(prompts), random.Random(0))

    assert sorted(probe.first.input_ids) == [1, 2, 3, 4]
    assert probe.first.input_ids != prompt
    assert cache_probe([Request("a", (5, 5, 5), 1)], unmeasured([(5, 5, 5)]), random.Random(0)) is None


class Replica:
    """Gives one token after the first token's ms of each request in turn, and the others when it is cancelled."""

    def __init__(self, first_ms, cached=None, error=None, at_once=False):
        self._first_ms, self._cached, self._error = list(first_ms), cached, error
        self._ids = (7, 7, 7) if at_once else (7,)
        self.seen, self.cancelled, self._open = [], 0, {}

    def generate(self, requests, hear=None):
        [request] = requests
        self.seen.append(request)
        launch, ms = Future(), self._first_ms.pop(0) if self._first_ms else 1
        chunks = () if self._error else (Chunk(5 * MS + round(ms * MS), len(self._ids)),)
        done = Completion(
            request.request_id, 3, self._ids, chunks, 5 * MS, 6 * MS, 99 * MS, "error" if self._error else "cancelled",
            error=self._error, cached_tokens=self._cached,
        )  # fmt: skip
        if self._error or hear is None:
            launch.set_result([done])
        else:
            self._open[launch] = done
            hear(0, self._ids)
        return launch

    def cancel(self, launch, row):
        assert row == 0
        self.cancelled += 1
        if launch in self._open:
            launch.set_result([self._open[launch]])


PROBE = CacheProbe(
    Request("a", (1, 2, 3), 64),
    tuple(Request("a", ids, 64) for ids in ((2, 1, 3), (3, 2, 1))),
    Request("a", (3, 1, 2), 1),
)


def test_a_prompt_is_asked_then_again_and_others_in_an_order_that_is_drawn():
    orders = set()
    for _ in range(120):
        replica = Replica([50, 40, 30, 20, 10], cached=1)
        found = run_probe(replica, lambda requests: requests, PROBE)
        assert replica.seen.pop() == PROBE.last  # so that nothing of the others still runs when a pass begins
        first, *later = (request.input_ids for request in replica.seen)
        known = [ids == first for ids in later]
        told_after_ms = found.pop("told_after_ms")
        orders.add(tuple(known))
        assert first == (1, 2, 3)
        assert sorted(later) == [(1, 2, 3), (1, 2, 3), (2, 1, 3), (3, 2, 1)]
        assert {each.max_new_tokens for each in replica.seen} == {64}
        assert replica.cancelled == 5
        again, other = (
            [ms for ms, each in zip((40, 30, 20, 10), known, strict=True) if each is is_] for is_ in (True, False)
        )
        assert found == {"again_ms": again, "other_ms": other, "cached_tokens": 1}
        assert told_after_ms > 1e3  # these tokens are stamped in the first second of the machine

    assert len(orders) == 6


def test_all_are_salted_as_one_pass():
    replica = Replica([1] * 5)
    run_probe(replica, lambda requests: [replace(each, cache_salt="s") for each in requests], PROBE)

    assert [each.cache_salt for each in replica.seen] == ["s"] * 6


def test_a_probe_that_fails_tells_nothing():
    assert run_probe(Replica([1] * 5, error="out of cheese"), lambda requests: requests, PROBE) is None


def test_an_answer_that_comes_at_once_is_asked_for_once():
    replica = Replica([1] * 5, at_once=True)

    assert run_probe(replica, lambda requests: requests, PROBE) is None
    assert len(replica.seen) == 1


def findings(directory, pairs, cached=None, share=0.4):
    """Of a run whose candidate took these ms to the first token of a prompt again, and of another one."""
    run = read_run(directory)
    manifest = run.manifest
    manifest["workload"]["shared_prefix_share"] = share
    timed = [each for each in manifest["passes"] if each["arm"] == "candidate" and each["phase"] == "measure"]
    for entry, at in zip(timed, range(0, len(pairs), 2), strict=False):
        again, other = zip(*pairs[at : at + 2], strict=True)
        entry["cache_probe"] = {"again_ms": again, "other_ms": other, "cached_tokens": cached}
    return list(cache_findings(Measured(run), manifest))


@pytest.fixture
def directory(synthetic):
    return synthetic(arms={"candidate": "skotergy"}).write()


SOONER = [(10, 20), (11, 21), (10, 22), (9, 19), (12, 22), (10, 20)] * 2


@pytest.mark.parametrize(
    ("share", "cached", "severity"), [(0.4, None, "invalid"), (0.05, None, "warning"), (0.05, 0, "invalid")]
)
def test_a_prompt_that_comes_sooner_when_it_is_asked_again(directory, share, cached, severity):
    """Half the time; invalid where the timed prompts share theirs, and where the engine says that it took nothing."""
    [finding] = findings(directory, SOONER, cached, share)

    assert (finding.severity, finding.code) == (severity, "hidden_cache")
    assert finding.observed == pytest.approx(0.5, abs=0.02)
    assert ("denies that it keeps" in finding.sentence) == (cached == 0)


@pytest.mark.parametrize(
    "pairs",
    [
        [(20, 20), (21, 20), (19, 21), (20, 19), (20, 20), (21, 21)] * 2,
        [(18, 20)] * 12,
        [(5, 20), (30, 20), (8, 20), (25, 20), (18, 22), (15, 20)] * 2,
        [(5022, 1459), (1130, 987), (2374, 3240), (2006, 2833), (745, 4447), (1031, 1646)] * 2,
        [(0.2, 0.4), (0.2, 0.45), (0.2, 0.41), (0.2, 0.4), (0.2, 0.4), (0.2, 0.4)] * 2,
    ],
    ids=["as soon", "a tenth sooner", "now sooner, now later", "a crowded machine", "a fifth of a millisecond sooner"],
)
def test_what_is_no_sign_of_a_cache(directory, pairs):
    assert findings(directory, pairs) == []


def test_a_cache_that_the_engine_declares_is_not_hidden(directory):
    assert findings(directory, SOONER, cached=128) == []


def test_a_server_that_tells_with_the_end_of_an_answer_is_believed(directory):
    requests = directory / "requests.parquet"
    rows = pd.read_parquet(requests)
    rows.assign(cached_tokens=0).to_parquet(requests)

    assert findings(directory, SOONER) == []
    assert [each.code for each in findings(directory, SOONER, cached=0)] == ["hidden_cache"]


def test_with_fewer_than_five_passes_nobody_can_tell(directory):
    assert [each.code for each in findings(directory, SOONER[:8])] == ["shared_prefix"]
    assert findings(directory, SOONER[:8], share=0.05) == []
