"""Server-sent events: a generation as a stream of bytes, and the ASGI response that sends it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from shoal.configs.errors import ShoalError
from shoal.deployments.generation import Generation
from shoal.deployments.http.body import ClientGoneError
from shoal.deployments.http.disconnect import client_gone
from shoal.deployments.http.errors import error_body
from shoal.deployments.http.formats import Format
from shoal.deployments.protocol.responses import DONE_EVENT, error_event

logger = logging.getLogger("shoal.gateway")

KEEP_ALIVE = b": waiting\n\n"
_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}


async def generation_events(
    generation: Generation, layout: Format, first_token: Callable[[], None]
) -> AsyncGenerator[bytes, None]:
    """The events of an answer, as few writes as there are steps. An error before anything was sent is raised, so that
    the client gets it as an HTTP status; later ones become an error event. Ends with [DONE] in any case."""
    sent = False
    with generation:
        try:
            async for updates in generation.updates():
                if not updates:
                    sent = True
                    yield KEEP_ALIVE
                    continue
                events = layout.events(updates, generation.usage)
                if events:
                    sent = True
                    first_token()
                    yield events
            yield layout.closing(generation.usage) + DONE_EVENT
        except ShoalError as error:
            if not sent:
                raise
            logger.warning("a stream ended with an error: %s", error.code)
            yield error_event(error_body(error)) + DONE_EVENT
        except Exception as error:
            if not sent:
                raise
            logger.exception("a stream failed")
            yield error_event(error_body(error)) + DONE_EVENT


class EventStreamResponse(Response):
    """Sends `first` and then what `rest` yields. Ends early, closing `rest`, when the client hangs up or takes nothing
    for `write_timeout_s`: then raises ClientGoneError."""

    media_type = "text/event-stream"

    def __init__(
        self, first: bytes, rest: AsyncGenerator[bytes, None], write_timeout_s: float, done: Callable[[], None]
    ) -> None:
        """`done` is called once, however the stream ends."""
        super().__init__(headers=_HEADERS, media_type=self.media_type)
        del self.headers["content-length"]
        self._first, self._rest, self._write_timeout_s, self._done = first, rest, write_timeout_s, done
        self._sending_since: float | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        writing = asyncio.ensure_future(self._write(send))
        watching = asyncio.ensure_future(client_gone(receive))
        try:
            while not writing.done():
                if watching.done() or self._is_stuck():
                    raise ClientGoneError
                patience_s = self._write_timeout_s / 4
                await asyncio.wait((writing, watching), timeout=patience_s, return_when=asyncio.FIRST_COMPLETED)
            writing.result()
        finally:
            watching.cancel()
            writing.cancel()
            await asyncio.wait((writing,))
            await self._rest.aclose()
            self._done()

    def _is_stuck(self) -> bool:
        """One write takes too long. Looked at now and then: a timer for each chunk would cost as much as its text."""
        return self._sending_since is not None and time.monotonic() - self._sending_since > self._write_timeout_s

    async def _write(self, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            async for chunk in _chain(self._first, self._rest):
                self._sending_since = time.monotonic()
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
                self._sending_since = None
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        except OSError:
            raise ClientGoneError from None


async def _chain(first: bytes, rest: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    yield first
    async for chunk in rest:
        yield chunk
