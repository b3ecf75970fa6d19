"""What the server's own OpenAPI lets ask, and what it does not, drawn by schemathesis: nothing makes it fail."""

from __future__ import annotations

import http.client
import json
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from skote.serve.settings import Limits
from skote.types import EngineSpec

EXAMPLES = 60
"""Of each operation and each way of drawing."""
CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
POSITIVE, NEGATIVE = schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE


@pytest.fixture(scope="module")
def target(start: Callable[..., Any]) -> Any:
    """Answers that end soon, of random bytes."""
    engine = EngineSpec("skote.engines.simulated.SimulatedEngine", {"vocab_size": 256})
    return start(engine=engine, limits=Limits(output_tokens=64))


@pytest.fixture(scope="module")
def schema(target: Any) -> Any:
    connection = http.client.HTTPConnection("127.0.0.1", target.port)
    connection.request("GET", "/openapi.json")
    document = json.loads(connection.getresponse().read())
    connection.close()
    loaded = schemathesis.openapi.from_dict(document)
    loaded.config.update(base_url=target.url)
    return loaded


def test_the_document_names_all_endpoints(schema: Any) -> None:
    assert {result.ok().label for result in schema.get_all_operations()} == {
        "POST /v1/completions", "POST /v1/chat/completions", "GET /v1/models", "GET /v1/models/{name}", "GET /health",
        "GET /metrics",
    }  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "path", "mode"),
    [
        ("POST", "/v1/completions", POSITIVE),
        ("POST", "/v1/completions", NEGATIVE),
        ("POST", "/v1/chat/completions", POSITIVE),
        ("POST", "/v1/chat/completions", NEGATIVE),
        ("GET", "/v1/models/{name}", POSITIVE),
        ("GET", "/v1/models", POSITIVE),
        ("GET", "/health", POSITIVE),
        ("GET", "/metrics", POSITIVE),
    ],
)
def test_no_request_makes_it_fail(target: Any, schema: Any, method: str, path: str, mode: Any) -> None:
    statuses: Counter[int] = Counter()

    @given(case=schema[path][method].as_strategy(generation_mode=mode))
    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    def draw(case: Any) -> None:
        if mode is POSITIVE and isinstance(case.body, dict):
            case.body.pop("model", None)  # a name that is drawn is no model's
        response = case.call(timeout=30)
        statuses[response.status_code] += 1
        case.validate_response(response, checks=CHECKS)
        if response.status_code >= 400:
            assert response.json()["error"]["message"].endswith(".")

    draw()
    if method == "POST":
        assert set(statuses) <= ({200, 400} if mode is POSITIVE else {200, 400, 404})
        assert mode is NEGATIVE or statuses[200] > statuses.total() / 10
    assert target.service.open == 0
