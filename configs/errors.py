"""Errors that a user can cause or must be told about, each with its HTTP status and OpenAI error code.

Assertions are for our own bugs; these are for everything else. The gateway turns one of these into
`{"error": {"message", "type", "param", "code"}}`; the CLI prints the message as one paragraph and exits with 2.
"""

from __future__ import annotations


class ShoalError(Exception):
    """Base of all errors meant for a person. `param` names the field (or configuration path) at fault."""

    status: int = 500
    type: str = "server_error"
    code: str | None = None

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        if code is not None:
            self.code = code

    def to_openai(self) -> dict[str, dict[str, str | None]]:
        """The body of the HTTP error, in OpenAI's shape."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}


class InvalidRequestError(ShoalError):
    """The request is wrong in itself; sending it again cannot help."""

    status = 400
    type = "invalid_request_error"
    code = "invalid_value"


class ContextLengthError(InvalidRequestError):
    """Prompt plus requested tokens exceed the model's context. Agents rely on the code to compact their history."""

    code = "context_length_exceeded"


class ModelNotFoundError(InvalidRequestError):
    """The model named in the request is not served here."""

    status = 404
    code = "model_not_found"


class RequestTooLargeError(InvalidRequestError):
    """The body is larger than the configured limit."""

    status = 413
    code = "request_too_large"


class ContentFilterError(InvalidRequestError):
    """An input rail refused the request."""

    code = "content_filter"


class RateLimitError(ShoalError):
    """A tenant's own limit; `retry_after_s` says when to come back."""

    status = 429
    type = "rate_limit_error"
    code = "rate_limit_exceeded"

    def __init__(self, message: str, *, retry_after_s: float, param: str | None = None) -> None:
        super().__init__(message, param=param)
        self.retry_after_s = retry_after_s


class OverloadedError(ShoalError):
    """The platform's own limit (queue full, shutting down); decided before any work is spent."""

    status = 503
    type = "overloaded_error"
    code = "overloaded"

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class EngineDeadError(ShoalError):
    """The engine behind this endpoint has stopped; the request was not (or not wholly) served."""

    status = 503
    code = "engine_dead"
    retry_after_s = 5.0
    """By then another engine serves, or this one again, where anything restarts it."""


class ConfigError(ShoalError):
    """A setting, file or checkpoint that cannot be used. Raised before anything is started."""

    status = 400
    type = "config_error"
    code = "config_error"


class ModelLoadError(ConfigError):
    """A checkpoint that is missing, corrupt or does not fit the architecture."""

    code = "model_load_error"
