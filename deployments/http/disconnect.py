"""Noticing a client that hangs up, or that takes nothing. ASGI servers end only streams by themselves, and only at the
next write."""

from __future__ import annotations

import asyncio
import time
from types import TracebackType

from starlette.types import Receive

from shoal.deployments.http.body import ClientGoneError


class ClientWatch:
    """Ends the block that it stands around, with ClientGoneError, when the client has hung up or a write takes longer
    than `write_timeout_s`. To be entered when the request's body has been read.

    The block runs in the request's own task, which is cancelled as `asyncio.timeout` does it: one task to watch, and
    none for the work.
    """

    def __init__(self, receive: Receive, write_timeout_s: float) -> None:
        self._receive, self._write_timeout_s = receive, write_timeout_s
        self._gone = False
        self._timer: asyncio.TimerHandle | None = None
        self.writing_since: float | None = None
        """`time.monotonic()`, while something is being written. Looked at now and then: a timer for each chunk would
        cost as much as its text."""

    async def __aenter__(self) -> ClientWatch:
        task = asyncio.current_task()
        assert task is not None
        self._task, self._cancellations = task, task.cancelling()
        self._loop = asyncio.get_running_loop()
        self._watching = self._loop.create_task(self._until_gone())
        self._watching.add_done_callback(self._on_gone)
        self._look_again()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self._watching.cancel()
        if self._timer is not None:
            self._timer.cancel()
        if self._gone and self._task.uncancel() <= self._cancellations and kind is asyncio.CancelledError:
            raise ClientGoneError from error

    async def _until_gone(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass

    def _on_gone(self, watching: asyncio.Task[None]) -> None:
        # A `receive` that fails means a client that is gone, too.
        if not watching.cancelled():
            watching.exception()
            self._end()

    def _look_again(self) -> None:
        self._timer = self._loop.call_later(self._write_timeout_s / 4, self._look)

    def _look(self) -> None:
        if self.writing_since is not None and time.monotonic() - self.writing_since > self._write_timeout_s:
            self._end()
        else:
            self._look_again()

    def _end(self) -> None:
        if not self._gone:
            self._gone = True
            self._task.cancel()
