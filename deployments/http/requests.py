"""What accompanies each HTTP request: its id, its log line, its metrics, and the answer when something raises."""

from __future__ import annotations

import asyncio
import contextvars
import logging
import re
import time
import uuid
from contextlib import suppress
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from shoal.configs.errors import ShoalError
from shoal.deployments.http.body import ClientGoneError
from shoal.deployments.http.errors import CLIENT_CLOSED_REQUEST, error_response
from shoal.deployments.metrics import Metrics

access_log = logging.getLogger("shoal.access")
logger = logging.getLogger("shoal.gateway")

request_id_var: contextvars.ContextVar[str | None] = contextvars.ContextVar("shoal_request_id", default=None)
"""Of the HTTP request in whose task a line is logged."""

_ACCEPTABLE_ID = re.compile(r"[\x21-\x7e]{1,128}")
_QUIET_ROUTES = frozenset({"/health/live", "/health/ready", "/metrics"})


class InFlight:
    """Counts the requests that are being answered, to their last byte."""

    def __init__(self) -> None:
        self._count = 0
        self._idle = asyncio.Event()
        self._idle.set()

    def enter(self) -> None:
        self._count += 1
        self._idle.clear()

    def leave(self) -> None:
        self._count -= 1
        if self._count == 0:
            self._idle.set()

    async def wait_until_idle(self, timeout_s: float) -> None:
        """Until nothing is being answered, or the time is up."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), timeout_s)


class RequestContext:
    """What a handler may add to its request's log line (numbers and words, never content)."""

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.started_at = time.monotonic()
        self.facts: dict[str, Any] = {}

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self.started_at


class RequestMiddleware:
    """Pure ASGI: nothing stands between a stream and its socket but one function call."""

    def __init__(self, app: ASGIApp, metrics: Metrics, in_flight: InFlight) -> None:
        self._app = app
        self._metrics = metrics
        self._in_flight = in_flight

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        context = RequestContext(_request_id(scope))
        scope.setdefault("state", {})["context"] = context
        token = request_id_var.set(context.request_id)
        status = 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = [*message.get("headers", ()), (b"x-request-id", context.request_id.encode())]
                message = {**message, "headers": headers}
            await send(message)

        # A load balancer that asks for our health all the time must not hold up a shutdown.
        counts = not scope["path"].endswith(tuple(_QUIET_ROUTES))
        if counts:
            self._in_flight.enter()
        self._metrics.add("shoal_http_requests_in_flight", 1)
        try:
            await self._app(scope, receive, send_with_id)
        except (ClientGoneError, asyncio.CancelledError) as gone:
            status = CLIENT_CLOSED_REQUEST
            self._metrics.add("shoal_client_disconnects_total", 1, (_route(scope),))
            if isinstance(gone, asyncio.CancelledError):
                # How Serve's proxies tell of a client that has hung up.
                raise
        except Exception as error:
            if not isinstance(error, ShoalError):
                logger.exception("a request failed")
            if status == 0:
                await error_response(error)(scope, receive, send_with_id)
        finally:
            if counts:
                self._in_flight.leave()
            self._finish(scope, context, status or CLIENT_CLOSED_REQUEST)
            request_id_var.reset(token)

    def _finish(self, scope: Scope, context: RequestContext, status: int) -> None:
        route, metrics = _route(scope), self._metrics
        metrics.add("shoal_http_requests_in_flight", -1)
        metrics.add("shoal_http_requests_total", 1, (route, str(status)))
        metrics.observe("shoal_http_request_seconds", (context.elapsed_s,), (route,))
        level = logging.DEBUG if route in _QUIET_ROUTES else logging.INFO
        line = {"route": route, "status": status, "seconds": round(context.elapsed_s, 6), **context.facts}
        access_log.log(level, "request", extra=line)


def _request_id(scope: Scope) -> str:
    """The client's own id if it is a sane header value, else a new one."""
    for name, value in scope["headers"]:
        if name == b"x-request-id":
            given = value.decode("latin-1")
            if _ACCEPTABLE_ID.fullmatch(given):
                return str(given)
    return uuid.uuid4().hex


def _route(scope: Scope) -> str:
    """The route's pattern: a label must not take values that clients choose."""
    return getattr(scope.get("route"), "path", "unknown")
