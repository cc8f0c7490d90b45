"""Server-sent events: a generation as a stream of bytes, and the ASGI response that sends it."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncGenerator, Callable

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from shoal.configs.errors import ShoalError
from shoal.deployments.generation import Generation
from shoal.deployments.http.body import ClientGoneError
from shoal.deployments.http.disconnect import ClientWatch
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
    the client gets it as an HTTP status; later ones become an error event. The last item ends with [DONE] in any
    case, and no other does. `first_token` is called when the first token is about to be sent."""
    sent = told = False
    with generation:
        try:
            async for updates in generation.updates():
                if not updates:
                    sent = True
                    yield KEEP_ALIVE
                    continue
                events = layout.events(updates, generation.usage if layout.shows_progress else None)
                if events and not told:
                    told = True
                    first_token()
                if generation.is_over:
                    events += layout.closing(generation.usage) + DONE_EVENT
                if events:
                    sent = True
                    yield events
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
    """Sends `first` and then what `rest` yields, to the item that ends with [DONE]. Whoever sends it closes `rest`."""

    media_type = "text/event-stream"

    def __init__(self, first: bytes, rest: AsyncGenerator[bytes, None], watch: ClientWatch) -> None:
        super().__init__(headers=_HEADERS, media_type=self.media_type)
        del self.headers["content-length"]
        self._first, self._rest, self._watch = first, rest, watch

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await self._send_body(send, self._first)
            async for chunk in self._rest:
                await self._send_body(send, chunk)
        except OSError:
            raise ClientGoneError from None

    async def _send_body(self, send: Send, chunk: bytes) -> None:
        # In a JSON string a line break is escaped, so no text can look like the end.
        more = not chunk.endswith(DONE_EVENT)
        self._watch.writing_since = time.monotonic()
        await send({"type": "http.response.body", "body": chunk, "more_body": more})
        self._watch.writing_since = None
