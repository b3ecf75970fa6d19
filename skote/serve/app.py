"""The endpoints."""

from __future__ import annotations

import time
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, PlainTextResponse, Response

from skote.serve.bodies import DESCRIPTIONS, ChatBody, CompletionBody
from skote.serve.door import Door
from skote.serve.errors import ApiError, invalid
from skote.serve.metrics import Metrics
from skote.serve.service import Service

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Fault(BaseModel):
    """What was wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class Failure(BaseModel):
    """The body of every answer that is none."""

    error: Fault


_FAILURES: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": Failure, "description": "What is wrong with the request, in one sentence."},
    503: {"model": Failure, "description": "Why no replica could answer, in one sentence; come again later."},
}
_STREAM: dict[int | str, dict[str, Any]] = {
    200: {"description": "The answer, or its chunks.", "content": {"text/event-stream": {}}}
}


def build_app(service: Service, *, keys: Sequence[str] = ()) -> Door:
    """The application, behind its door; without `keys` whoever reaches it may come in."""
    app = FastAPI(title="Skotergy", version=version("skotergy"), docs_url=None, redoc_url=None)
    created = int(time.time())
    card = {
        "id": service.served.name,
        "object": "model",
        "created": created,
        "owned_by": "skotergy",
        "max_model_len": service.served.context,
    }

    @app.post("/v1/completions", responses=_FAILURES | _STREAM, response_class=JSONResponse)
    async def complete(body: CompletionBody) -> Response:
        return await service.complete(body)

    @app.post("/v1/chat/completions", responses=_FAILURES | _STREAM, response_class=JSONResponse)
    async def chat(body: ChatBody) -> Response:
        return await service.chat(body)

    @app.get("/v1/models", responses=_FAILURES)
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [card]}

    @app.get("/v1/models/{name:path}", responses=_FAILURES)
    async def model(name: str) -> dict[str, Any]:
        if name != service.served.name:
            raise ApiError(404, f"There is no such model here: {service.served.name!r} is.", code="model_not_found")
        return card

    @app.get("/health", responses=_FAILURES)
    async def health() -> dict[str, Any]:
        alive = sum(load.alive for load in service.loads)
        if not alive:
            raise ApiError(503, "No replica is alive.")
        return {"status": "ok", "replicas": alive}

    @app.get("/metrics", responses=_FAILURES, response_class=PlainTextResponse)
    async def metrics() -> Response:
        return Response(service.metrics.text(), headers={"content-type": METRICS_TYPE})

    _tell_failures(app, service.metrics)
    limits = service.limits
    return Door(app, keys=keys, body_bytes=limits.body_bytes, upload_s=limits.upload_s, metrics=service.metrics)


def _tell_failures(app: FastAPI, metrics: Metrics) -> None:
    """Answer whatever goes wrong in one form."""

    def refuse(refused: ApiError) -> Response:
        metrics.refused(refused.status)
        return refused.response

    @app.exception_handler(ApiError)
    async def tell(_: Request, refused: ApiError) -> Response:
        return refuse(refused)

    @app.exception_handler(RequestValidationError)
    async def tell_what_is_invalid(_: Request, refused: RequestValidationError) -> Response:
        return refuse(invalid(refused.errors(), DESCRIPTIONS))

    @app.exception_handler(HTTPException)
    async def tell_in_our_form(request: Request, refused: HTTPException) -> Response:
        detail = str(refused.detail).rstrip(".")
        response = refuse(ApiError(refused.status_code, f"{request.method} {request.url.path}: {detail}."))
        response.headers.update(refused.headers or {})
        return response
