"""An HTTP listener on the event loop it is started on: what `shoal serve` puts in front of a gateway by default."""

from __future__ import annotations

import asyncio
import contextlib

import uvicorn
from starlette.types import ASGIApp

from shoal.deployments.address import Address, bind

_KEEP_ALIVE_S = 90
"""Longer than clients keep idle connections, so that none sends a request into one that is being closed."""
_LAST_BYTES_S = 5
_BACKLOG = 2048


class Listener:
    """Serves an ASGI app from `start` to `stop`. All methods run on one event loop."""

    def __init__(self, app: ASGIApp, address: Address, max_connections: int) -> None:
        """While `max_connections` are open, requests are answered with 503: a last resort, long before which the
        engine's own queue limits give answers that a client can read."""
        self._address = address
        self._server = uvicorn.Server(
            uvicorn.Config(
                app,
                lifespan="off",
                ws="none",
                log_config=None,
                access_log=False,
                proxy_headers=False,
                server_header=False,
                limit_concurrency=max_connections,
                timeout_keep_alive=_KEEP_ALIVE_S,
                timeout_graceful_shutdown=_LAST_BYTES_S,
                backlog=_BACKLOG,
            )
        )
        self._serving: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Returns when it listens. Raises ConfigError when the address cannot be bound."""
        bound = bind(self._address)
        self._serving = asyncio.create_task(self._server.serve(sockets=[bound]), name="http-listener")
        while not self._server.started:
            if self._serving.done():
                self._serving.result()
                raise RuntimeError("The HTTP server ended before it listened.")
            await asyncio.sleep(0.001)

    def check_health(self) -> None:
        """Raises when nobody listens any more."""
        if self._serving is None or self._serving.done():
            raise RuntimeError("The HTTP server has ended.")

    async def stop(self) -> None:
        """Closes the port, lets responses that are being written end for a few seconds. Idempotent."""
        if self._serving is not None:
            self._server.should_exit = True
            with contextlib.suppress(asyncio.CancelledError):
                await self._serving
