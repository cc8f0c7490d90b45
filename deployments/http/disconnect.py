"""Noticing a client that hangs up. ASGI servers end only streams by themselves, and only at the next write."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.types import Receive

from shoal.deployments.http.body import ClientGoneError

T = TypeVar("T")


async def client_gone(receive: Receive) -> None:
    """Returns when the client has hung up. The request's body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`; cancels it and raises ClientGoneError when the client hangs up first."""
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(client_gone(receive))
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        working.cancel()
        await asyncio.wait((working,))
        raise ClientGoneError
    finally:
        watching.cancel()
        working.cancel()
