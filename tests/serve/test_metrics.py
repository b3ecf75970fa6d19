"""What Prometheus is told."""

from __future__ import annotations

import http.client
import json
from collections.abc import Callable
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from skote.runtime.lane import ReplicaLoad
from skote.serve.metrics import Metrics
from skote.types import Chunk, Completion

MS = 1_000_000


def samples(text: str) -> dict[tuple[str, ...], float]:
    """By name and the values of the labels."""
    return {
        (sample.name, *(value for _, value in sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


class Still:
    loads = (ReplicaLoad(0, 2, 1, True, 1, 3, 12.5, 256), ReplicaLoad(1, 0, 0, False))
    events = ()


def test_times_are_those_of_the_completions_stamps() -> None:
    metrics = Metrics(Still())  # type: ignore[arg-type]
    chunks = (Chunk(25 * MS, 2), Chunk(28 * MS, 1), Chunk(33 * MS, 1))
    completion = Completion(
        "a", 7, (1, 2, 3, 4), chunks, 10 * MS, 11 * MS, 40 * MS, "ok", "length", replica=1, cached_tokens=5
    )
    metrics.ended(completion, "length")
    metrics.ended(Completion("b", 9, (), (), 0, None, 1, "cancelled", replica=-1), "cancelled")
    metrics.refused(429)
    got = samples(metrics.text().decode())
    assert got["skote_ttft_seconds_sum", "1"] == pytest.approx(0.015)  # 25 ms - 10 ms
    assert got["skote_tpot_seconds_sum", "1"] == pytest.approx(0.004)  # (33 - 25) ms / (4 - 2)
    assert got["skote_tpot_seconds_bucket", "0.004", "1"] == got["skote_ttft_seconds_count", "1"] == 1
    assert got["skote_tpot_seconds_bucket", "0.003", "1"] == 0
    assert got["skote_requests_total", "length", "1"] == got["skote_requests_total", "cancelled", "-1"] == 1
    assert (got["skote_prompt_tokens_total", "1"], got["skote_output_tokens_total", "1"]) == (7, 4)
    assert got["skote_cached_prompt_tokens_total", "1"] == 5
    assert ("skote_prompt_tokens_total", "-1") not in got  # nobody took it
    assert got["skote_refused_requests_total", "429"] == 1
    assert [got["skote_requests_waiting", index] for index in "01"] == [2, 0]
    assert [got["skote_requests_running", index] for index in "01"] == [1, 0]
    assert [got["skote_free_slots", index] for index in "01"] == [3, 0]
    assert [got["skote_recent_prompt_tokens", index] for index in "01"] == [12.5, 0]
    assert [got["skote_kept_prompt_tokens", index] for index in "01"] == [256, 0]
    assert [got["skote_replica_alive", index] for index in "01"] == [1, 0]


def test_the_endpoint_tells_of_each_replica(start: Callable[..., Any]) -> None:
    live = start(devices=["cpu", "cpu"], policy="round_robin")
    for _ in range(4):
        live.client().completions.create(model="echo", prompt="ab", max_tokens=3)
    connection = http.client.HTTPConnection("127.0.0.1", live.port)
    connection.request("GET", "/metrics")
    response = connection.getresponse()
    assert response.getheader("content-type").startswith("text/plain; version=0.0.4")
    got = samples(response.read().decode())
    connection.close()
    for replica in "01":
        assert got["skote_requests_total", "length", replica] == 2
        assert got["skote_output_tokens_total", replica] == 6
        assert got["skote_ttft_seconds_count", replica] == 2
        assert got["skote_replica_restarts_total", replica] == 0
    assert got["process_open_fds",] > 0


def test_a_replica_that_ends_fails_its_request_and_comes_back(start: Callable[..., Any]) -> None:
    live = start(max_restarts=1)
    client = live.client()
    stream = client.completions.create(model="echo", prompt="a\2", stream=True)
    with pytest.raises(Exception, match="ended"):
        list(stream)
    assert client.completions.create(model="echo", prompt="b", max_tokens=2).choices[0].text == "bb"
    got = samples(live.service.metrics.text().decode())
    assert got["skote_replica_restarts_total", "0"] == got["skote_requests_total", "error", "0"] == 1

    with pytest.raises(Exception, match="ended"):
        list(client.completions.create(model="echo", prompt="a\2", stream=True))
    connection = http.client.HTTPConnection("127.0.0.1", live.port)
    connection.request("GET", "/health")
    response = connection.getresponse()
    assert (response.status, json.loads(response.read())["error"]["message"]) == (503, "No replica is alive.")
    connection.close()
