"""A gateway's connection to the engine behind it: attaching, submitting, aborting, and watching its health."""

from __future__ import annotations

import asyncio
import contextvars
import logging
import uuid
from collections.abc import Coroutine
from typing import Any

from shoal.configs.app import GatewayConfig
from shoal.configs.errors import EngineDeadError, ShoalError
from shoal.deployments.data_plane import DeltaReceiver
from shoal.deployments.stages import EngineInfo, EngineStage, EngineStatus, UnknownGatewayError
from shoal.deployments.streams import LoopSink, StreamHub
from shoal.model_shards.engine.request import Request

logger = logging.getLogger("shoal.gateway")

_ABORT_ATTEMPTS = 4
_LOOKS_UNTIL_LOST = 4
"""Heartbeats between the engine's last delta and its loss being certain; it may be on its way for a moment."""


def may_have_arrived(error: BaseException | None) -> bool:
    """Whether the engine may be working on requests whose submission ended so: a call that got no answer may have been
    carried out, one that was refused was not."""
    return error is None or not isinstance(error, ShoalError) or isinstance(error, EngineDeadError)


class EngineLink:
    """Lives on the gateway's event loop. `receiver` is None when the engine is in this process."""

    def __init__(
        self, engine: EngineStage, hub: StreamHub, config: GatewayConfig, receiver: DeltaReceiver | None
    ) -> None:
        self.gateway_id = uuid.uuid4().hex
        self.status: EngineStatus | None = None
        self._engine, self._hub, self._config, self._receiver = engine, hub, config, receiver
        self._info: EngineInfo | None = None
        self._trouble: str | None = "the engine has not answered yet"
        self._suspected = False
        """The last look found no progress; the next one decides."""
        self._submitting: set[str] = set()
        self._unheard: dict[str, int] = {}
        """Request that a stream waits for and the engine does not know -> in how many looks in a row."""
        self._tasks: set[asyncio.Task[None]] = set()
        # Calls that must arrive are made outside the context of the request that causes them: Serve cancels every call
        # made in the context of a request whose client has hung up, and so the abort itself.
        self._context = contextvars.copy_context()

    @property
    def info(self) -> EngineInfo:
        """Raises EngineDeadError before `connect` has succeeded once."""
        if self._info is None:
            raise EngineDeadError("The engine has not answered yet.")
        return self._info

    @property
    def trouble(self) -> str | None:
        """Why requests cannot be served now; None when they can."""
        return self._trouble

    async def connect(self) -> None:
        """Learns what the engine is and tells it where tokens go; then watches it until `close`."""
        await self._attach()
        self._spawn(self._watch())

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        if self._receiver is not None:
            self._receiver.close()

    async def submit(self, requests: list[Request]) -> None:
        """All of them or none. When the caller is cancelled meanwhile, they are aborted once they have arrived."""
        if self._receiver is None:
            # An engine in this process takes them without a pause in which anyone could be cancelled.
            await self._submit(requests)
            return
        sending = self._spawn(self._submit(requests))
        try:
            await asyncio.shield(sending)
        except asyncio.CancelledError:
            self._spawn(self._abort_after(sending, [request.request_id for request in requests]))
            raise

    async def metrics_text(self) -> str:
        return await self._engine.metrics_text()

    def abort(self, request_ids: list[str]) -> None:
        """Sends the abort on its way. Tried again if the call fails: an abort that is lost keeps KV memory busy."""
        self._spawn(self._abort(request_ids))

    async def _attach(self) -> None:
        info = await self._engine.describe()
        if self._receiver is None:
            await self._engine.attach(self.gateway_id, LoopSink(self._hub, asyncio.get_running_loop()))
        else:
            self._receiver.allow(info.data_plane_key)
            await self._engine.attach(self.gateway_id, self._receiver.address)
        self._info, self._trouble = info, None

    async def _submit(self, requests: list[Request]) -> None:
        ids = {request.request_id for request in requests}
        self._submitting |= ids
        try:
            await self._engine.submit(self.gateway_id, requests)
        except UnknownGatewayError:
            await self._attach()
            await self._engine.submit(self.gateway_id, requests)
        finally:
            self._submitting -= ids

    async def _abort_after(self, sending: asyncio.Future[None], request_ids: list[str]) -> None:
        await asyncio.wait([sending])
        if sending.cancelled() or may_have_arrived(sending.exception()):
            await self._abort(request_ids)

    async def _abort(self, request_ids: list[str]) -> None:
        for attempt in range(_ABORT_ATTEMPTS):
            try:
                await self._engine.abort(request_ids)
                return
            except ShoalError as error:
                logger.warning("abort failed (attempt %d): %s", attempt + 1, error)
                await asyncio.sleep(0.2 * 4**attempt)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work, context=self._context.copy())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # Health ---------------------------------------------------------------------------------------------------------

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(self._config.heartbeat_s)
            try:
                await self._look()
            except ShoalError as error:
                self._give_up(f"the engine does not answer: {error}")
            except Exception:
                logger.exception("the engine's heartbeat failed")
                self._give_up("the engine's heartbeat failed")

    async def _look(self) -> None:
        status = await self._engine.heartbeat(self.gateway_id)
        self.status = status
        if self._info is None or status.instance_id != self._info.instance_id:
            # Another instance, or one that has dropped us: what ran there for us is gone.
            self._give_up("the engine was restarted")
            await self._attach()
        elif not status.alive:
            self._give_up("the engine is dead")
        elif self._makes_no_progress(status):
            self._give_up(f"the engine has finished no step for {status.seconds_since_step:.0f} s")
        else:
            self._trouble = None
            self._fail_lost(status)

    def _fail_lost(self, status: EngineStatus) -> None:
        """Ends streams whose last delta must have been lost: no stream waits for ever, whatever went wrong."""
        waiting = (name for name in self._hub.request_ids if name not in status.own_requests | self._submitting)
        self._unheard = {name: self._unheard.get(name, 0) + 1 for name in waiting}
        lost = [name for name, looks in self._unheard.items() if looks >= _LOOKS_UNTIL_LOST]
        if lost:
            logger.error("%d answers were lost between the engine and this gateway", len(lost))
            self._hub.fail(lost, EngineDeadError("The answer was lost on its way; try again."))

    def _makes_no_progress(self, status: EngineStatus) -> bool:
        """An idle engine takes no steps, and one that was idle a moment ago has not taken its first yet: two looks
        must agree."""
        stuck = status.live_requests > 0 and status.seconds_since_step > self._config.progress_timeout_s
        confirmed = stuck and self._suspected
        self._suspected = stuck
        return confirmed

    def _give_up(self, reason: str) -> None:
        if self._trouble is None:
            logger.error("not ready: %s; %d streams end", reason, len(self._hub.request_ids))
        self._trouble = reason
        self._hub.fail(self._hub.request_ids, EngineDeadError(f"The request cannot be finished: {reason}."))
