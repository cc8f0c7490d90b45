"""A gateway's connection to one engine: attaching, submitting, aborting, and watching its health."""

from __future__ import annotations

import asyncio
import contextvars
import logging
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from shoal.configs.app import GatewayConfig
from shoal.configs.errors import EngineDeadError, ShoalError
from shoal.deployments.data_plane import DeltaReceiver
from shoal.deployments.stages import EngineGoneError, EngineInfo, EngineStage, EngineStatus, UnknownGatewayError
from shoal.deployments.streams import LiveRequest, LoopSink, StreamHub
from shoal.model_shards.engine.request import Request

logger = logging.getLogger("shoal.gateway")

_ABORT_ATTEMPTS = 4
_LOOKS_UNTIL_LOST = 4
"""Heartbeats between the engine's last delta and its loss being certain; it may be on its way for a moment."""
_SILENT_HEARTBEATS = 4
"""An engine that gave no sign of life for so many is taken for dead. That may be wrong: what it still sends for a
request that has gone on elsewhere is dropped."""
_LEAST_SILENCE_S = 4.0


def may_have_arrived(error: BaseException | None) -> bool:
    """Whether the engine may be working on requests whose submission ended so: a call that got no answer may have been
    carried out, one that was refused was not."""
    return error is None or not isinstance(error, ShoalError) or isinstance(error, EngineDeadError)


@dataclass(eq=False)
class GatewayEnd:
    """What the links of a gateway share. `receiver` is None when the engines are in this process."""

    gateway_id: str
    hub: StreamHub
    config: GatewayConfig
    receiver: DeltaReceiver | None
    lost: Callable[[list[LiveRequest], str], None]
    """Told of requests that an engine has, or had, and will not finish; never of one that is just being submitted."""
    # Calls that must arrive are made outside the context of the request that causes them: Serve cancels every call made
    # in the context of a request whose client has hung up, and so the abort itself.
    _context: contextvars.Context = field(default_factory=contextvars.copy_context)
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work, context=self._context.copy())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        if self.receiver is not None:
            self.receiver.close()


class EngineLink:
    """Lives on the gateway's event loop. Made for one engine; another one that takes its place gets its own."""

    def __init__(self, end: GatewayEnd, engine: EngineStage, info: EngineInfo) -> None:
        self.info = info
        self.status: EngineStatus | None = None
        self.trouble: str | None = "the engine has not answered yet"
        """Why requests cannot be sent to it now; None when they can."""
        self.is_leaving = False
        """No call reaches it any more. What runs there may still end."""
        self.is_lost = False
        self._end, self._engine = end, engine
        self._heard_at = time.monotonic()
        self._suspected = False
        """The last look found no progress; the next one decides."""
        self._seemed_silent = False
        self._submitting: dict[str, LiveRequest] = {}
        """Whose submission has not been answered yet, by id in the engine."""
        self._unheard: dict[str, int] = {}
        """Request that a stream waits for and the engine does not know -> in how many looks in a row."""
        self._sent_since_status = 0
        self._breaks: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """Has the reason once the engine is given up, for submissions that wait for its answer."""

    @property
    def load(self) -> int:
        """Sequences that it runs, that wait there, and that were sent since it said so."""
        known = 0 if self.status is None else self.status.running + self.status.waiting
        return known + self._sent_since_status

    @property
    def live(self) -> list[LiveRequest]:
        return [live for live in self._end.hub.live if live.engine is self]

    def is_submitting(self, live: LiveRequest) -> bool:
        return live.engine_id in self._submitting

    async def attach(self) -> None:
        """Tells the engine where tokens go."""
        end = self._end
        if end.receiver is None:
            await self._engine.attach(end.gateway_id, LoopSink(end.hub, asyncio.get_running_loop()))
        else:
            end.receiver.allow(self.info.data_plane_key)
            await self._engine.attach(end.gateway_id, end.receiver.address)
        self.trouble = None
        self._heard_at = time.monotonic()

    async def submit(self, requests: list[LiveRequest]) -> None:
        """All of them or none. When the caller is cancelled meanwhile, or nobody answers, they are aborted in case they
        have arrived. Raises what the engine raises, EngineDeadError or EngineGoneError."""
        ids = {live.engine_id: live for live in requests}
        self._submitting |= ids
        self._sent_since_status += sum(live.num_open for live in requests)
        sending = self._submit([live.for_engine() for live in requests])
        try:
            if self._end.receiver is None:
                # An engine in this process takes them without a pause in which anyone could be cancelled.
                await sending
            else:
                await self._submit_shielded(sending, list(ids))
        finally:
            for name in ids:
                del self._submitting[name]

    async def metrics_text(self) -> str:
        return await self._engine.metrics_text()

    def abort(self, request_ids: list[str]) -> None:
        """Sends the abort on its way. Tried again if the call fails: an abort that is lost keeps KV memory busy."""
        if not self.is_leaving:
            self._end.spawn(self._abort(request_ids))

    def doubt(self, reason: str) -> None:
        """It gave requests back: no new ones until the next look."""
        if self.trouble is None:
            self.trouble = reason

    async def _submit_shielded(self, sending: Coroutine[Any, Any, None], ids: list[str]) -> None:
        task, breaks = self._end.spawn(sending), self._breaks
        try:
            either: set[asyncio.Future[Any]] = {task, breaks}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise EngineDeadError(f"The engine was given up: {breaks.result()}.")
            await task
        except (asyncio.CancelledError, EngineDeadError):
            self._end.spawn(self._abort_after(task, ids))
            raise

    async def _submit(self, requests: list[Request]) -> None:
        gateway_id = self._end.gateway_id
        try:
            await self._engine.submit(gateway_id, requests)
        except UnknownGatewayError:
            await self.attach()
            await self._engine.submit(gateway_id, requests)

    async def _abort_after(self, sending: asyncio.Future[None], request_ids: list[str]) -> None:
        await asyncio.wait([sending])
        if sending.cancelled() or may_have_arrived(sending.exception()):
            await self._abort(request_ids)

    async def _abort(self, request_ids: list[str]) -> None:
        for attempt in range(_ABORT_ATTEMPTS):
            if self.is_lost:
                return
            try:
                await self._engine.abort(request_ids)
                return
            except EngineGoneError:
                return
            except ShoalError as error:
                logger.warning("abort failed (attempt %d): %s", attempt + 1, error)
                await asyncio.sleep(0.2 * 4**attempt)

    # Health ---------------------------------------------------------------------------------------------------------

    async def watch(self) -> None:
        """Until the engine is lost for good."""
        while not self.is_lost:
            await asyncio.sleep(self._end.config.heartbeat_s)
            try:
                if not self.is_leaving:
                    await self._look()
            except ShoalError as error:
                self._give_up(f"the engine does not answer: {error}")
            except Exception:
                logger.exception("the engine's heartbeat failed")
                self._give_up("the engine's heartbeat failed")
            if self.is_leaving and (self._is_silent() or not self.live):
                self.is_lost = True
                self._give_up("the engine is gone")

    def on_sign_of_life(self, status: EngineStatus) -> None:
        self._heard_at = time.monotonic()
        self.status = status
        self._sent_since_status = 0
        if self.is_leaving:
            self._find_lost(status)

    def _is_silent(self) -> bool:
        """To be asked once a heartbeat. Two must agree: when this process was held up, what the engine has sent is here
        and not read yet."""
        allowed_s = max(_LEAST_SILENCE_S, _SILENT_HEARTBEATS * self._end.config.heartbeat_s)
        silent = time.monotonic() - self._heard_at > allowed_s
        confirmed = silent and self._seemed_silent
        self._seemed_silent = silent
        return confirmed

    async def _look(self) -> None:
        heartbeat = asyncio.ensure_future(self._engine.heartbeat(self._end.gateway_id))
        try:
            while not heartbeat.done():
                await asyncio.wait([heartbeat], timeout=self._end.config.heartbeat_s)
                if not heartbeat.done() and self._end.receiver is not None and self._is_silent():
                    self._give_up("the engine gives no sign of life")
            status = await heartbeat
        except EngineGoneError:
            logger.info("engine %s takes no calls any more", self.info.instance_id)
            self.is_leaving, self.trouble = True, "the engine is being stopped"
            return
        finally:
            heartbeat.cancel()
        self.on_sign_of_life(status)
        if not status.instance_id:
            # It has dropped us: what ran there for us is gone.
            self._give_up("the engine has dropped this gateway")
            await self.attach()
        elif not status.alive:
            self._give_up("the engine is dead")
        elif self._makes_no_progress(status):
            self._give_up(f"the engine has finished no step for {status.seconds_since_step:.0f} s")
        else:
            self.trouble = None
            self._find_lost(status)

    def _find_lost(self, status: EngineStatus) -> None:
        """Streams whose last delta must have been lost: none waits for ever, whatever went wrong."""
        known = status.own_requests | self._submitting.keys()
        waiting = {live.engine_id: live for live in self.live if live.engine_id not in known}
        self._unheard = {name: self._unheard.get(name, 0) + 1 for name in waiting}
        lost = [live for name, live in waiting.items() if self._unheard[name] >= _LOOKS_UNTIL_LOST]
        if lost:
            logger.error("%d answers were lost between the engine and this gateway", len(lost))
            self._end.lost(lost, "the answer was lost on its way")

    def _makes_no_progress(self, status: EngineStatus) -> bool:
        """An idle engine takes no steps, and one that was idle a moment ago has not taken its first yet: two looks
        must agree."""
        stuck = status.live_requests > 0 and status.seconds_since_step > self._end.config.progress_timeout_s
        confirmed = stuck and self._suspected
        self._suspected = stuck
        return confirmed

    def _give_up(self, reason: str) -> None:
        live = [live for live in self.live if not self.is_submitting(live)]
        if self.trouble is None:
            logger.error("engine %s: %s; it had %d requests", self.info.instance_id, reason, len(live))
        self.trouble = reason
        self._breaks.set_result(reason)
        self._breaks = asyncio.get_running_loop().create_future()
        if live:
            self.abort([request.engine_id for request in live])
            self._end.lost(live, reason)
