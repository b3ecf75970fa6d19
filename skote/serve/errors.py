"""What a client is told when it does not get what it asked for: a status and one sentence, in OpenAI's form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from starlette.responses import JSONResponse

from skote.types import SkoteError

_KINDS = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error", 503: "overloaded_error"}
RETRY_S = 1
_NAME_LENGTH = 60  # of an unknown field that is told back


class ApiError(SkoteError):
    """A request that is refused, or that failed, with an HTTP status; `param` is the field that is at fault."""

    def __init__(self, status: int, sentence: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(sentence)
        self.status = status
        self.param = param
        self.code = code

    @property
    def content(self) -> dict[str, Any]:
        """The body that says so."""
        kind = _KINDS.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}

    @property
    def response(self) -> JSONResponse:
        """The answer; 429 and 503 say when to come again, 401 how to say who one is, 408 and 413 hang up."""
        headers = {}
        if self.status in (429, 503):
            headers["retry-after"] = str(RETRY_S)
        if self.status in (408, 413):  # the rest of the body would come for nobody
            headers["connection"] = "close"
        if self.status == 401:
            headers["www-authenticate"] = "Bearer"
        return JSONResponse(self.content, self.status, headers)


def invalid(errors: Sequence[Mapping[str, Any]], descriptions: Mapping[str, str]) -> ApiError:
    """The refusal of a body that is not what the schema says, from pydantic's `errors`.

    `descriptions` say of each field what it must be. Nothing of the body is repeated but an unknown field's name.
    """
    error = errors[0]
    place = [str(each) for each in error["loc"][1:]]
    if error["type"] == "json_invalid":
        return ApiError(400, f"The body is not JSON: {error.get('ctx', {}).get('error', error['msg'])}.")
    if not place and error["type"] == "string_unicode":
        return ApiError(400, "The name of a field has half a surrogate pair.")
    if not place:
        return ApiError(400, "The body must be a JSON object, and its content-type application/json.")
    field = place[0]
    if error["type"] == "extra_forbidden":
        name = ".".join(place)[:_NAME_LENGTH]
        return ApiError(400, f"There is no field {name!r} here: leave it out, or check its spelling.", param=name)
    if error["type"] == "missing":
        return ApiError(400, f"{'.'.join(place)} is missing.", param=field)
    alone = sum(each["loc"][1:2] == error["loc"][1:2] for each in errors) == 1
    sentence = f"{'.'.join(place)}: {error['msg']}." if alone else f"{field} is of the wrong kind."
    return ApiError(400, f"{sentence} {descriptions.get(field, '')}".strip(), param=field)
