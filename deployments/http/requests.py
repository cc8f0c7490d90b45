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

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

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
        self.route = "unknown"
        """The route's pattern: a label must not take values that clients choose."""
        self.status = 0
        """Of the answer that has begun."""

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self.started_at

    def mark(self, stage: str) -> None:
        """Notes when a stage was reached."""
        self.facts[f"{stage}_s"] = round(self.elapsed_s, 6)


class Exchange:
    """One request, and the way to answer it."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.request = Request(scope, receive)
        self.context: RequestContext = scope["state"]["context"]
        self._send = send

    @property
    def receive(self) -> Receive:
        return self.request.receive

    async def respond(self, response: Response) -> None:
        """Sends the answer, to its last byte."""
        self.context.status = response.status_code
        response.raw_headers.append((b"x-request-id", self.context.request_id.encode()))
        # `send` goes to the response as it came: what a stream writes passes through nothing of ours.
        await response(self.request.scope, self.request.receive, self._send)


class RequestMiddleware:
    """Around the whole app, once a request: nothing here is called for a chunk of a stream."""

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
        # A load balancer that asks for our health all the time must not hold up a shutdown.
        counts = not scope["path"].endswith(tuple(_QUIET_ROUTES))
        if counts:
            self._in_flight.enter()
        self._metrics.add("shoal_http_requests_in_flight", 1)
        try:
            await self._app(scope, receive, send)
        except (ClientGoneError, asyncio.CancelledError) as gone:
            context.status = CLIENT_CLOSED_REQUEST
            self._metrics.add("shoal_client_disconnects_total", 1, (context.route,))
            if isinstance(gone, asyncio.CancelledError):
                # How Serve's proxies tell of a client that has hung up.
                raise
        except Exception as error:
            if not isinstance(error, ShoalError):
                logger.exception("a request failed")
            if context.status == 0:
                await Exchange(scope, receive, send).respond(error_response(error))
        finally:
            if counts:
                self._in_flight.leave()
            self._finish(context)
            request_id_var.reset(token)

    def _finish(self, context: RequestContext) -> None:
        route, status, metrics = context.route, context.status or CLIENT_CLOSED_REQUEST, self._metrics
        metrics.add("shoal_http_requests_in_flight", -1)
        metrics.add("shoal_http_requests_total", 1, (route, str(status)))
        metrics.observe("shoal_http_request_seconds", (context.elapsed_s,), (route,))
        level = logging.DEBUG if route in _QUIET_ROUTES else logging.INFO
        if access_log.isEnabledFor(level):
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
