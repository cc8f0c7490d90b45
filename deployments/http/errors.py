"""From exceptions to OpenAI-shaped answers."""

from __future__ import annotations

import math
from typing import Any

from starlette.responses import JSONResponse

from shoal.configs.errors import InvalidRequestError, ShoalError

CLIENT_CLOSED_REQUEST = 499
"""Not an HTTP status that anyone receives: it marks hang-ups in logs and metrics."""


class RequestTimeoutError(ShoalError):
    """The request ran longer than the configured limit."""

    status = 408
    type = "timeout_error"
    code = "request_timeout"


class GenerationError(ShoalError):
    """The request failed inside the engine; others went on."""

    status = 500
    type = "server_error"
    code = "generation_failed"


class RouteError(InvalidRequestError):
    """No such path, or not with this method."""

    code = "unknown_url"

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


def error_body(error: BaseException) -> dict[str, Any]:
    """OpenAI's error object. What is not meant for a person is not shown to one: the log has it."""
    if isinstance(error, ShoalError):
        return dict(error.to_openai())
    message = "The server failed on this request; its log says why, under the x-request-id of this answer."
    return dict(ShoalError(message, code="internal_error").to_openai())


def error_status(error: BaseException) -> int:
    return error.status if isinstance(error, ShoalError) else ShoalError.status


def error_response(error: BaseException) -> JSONResponse:
    """Retry-After is whole seconds, at least one: clients that retry read it."""
    headers = {}
    retry_after_s = getattr(error, "retry_after_s", None)
    if retry_after_s is not None:
        headers["retry-after"] = str(max(1, math.ceil(retry_after_s)))
    return JSONResponse(error_body(error), status_code=error_status(error), headers=headers)
