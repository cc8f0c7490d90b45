"""ShardGroup: one engine and its ranks. They are born together and die together."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
import uuid
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import zmq

from shoal.configs.errors import EngineDeadError
from shoal.deployments.data_plane import ZmqSink
from shoal.deployments.metrics import Metrics
from shoal.deployments.stages import (
    EngineGoneError,
    EngineInfo,
    EngineStatus,
    RemoteCallable,
    ReplyAddress,
    Route,
    UnknownGatewayError,
    error_to_wire,
    package_version,
)
from shoal.model_shards.engine.engine import Engine
from shoal.model_shards.engine.output import DeltaSink
from shoal.model_shards.engine.request import Request, RequestDelta

logger = logging.getLogger("shoal.shard_group")


@dataclass(frozen=True, slots=True)
class GroupTimes:
    """Seconds."""

    gateway_lease: float
    """A gateway that was not heard of for so long is gone."""
    sign_of_life: float
    """Between two that gateways in other processes are sent."""
    drain: float
    """At shutdown, how long running requests may go on."""


class ShardGroup(RemoteCallable):
    """Hands requests to the engine and says where their tokens go. All methods run on one event loop."""

    def __init__(self, engine: Engine, metrics: Metrics, times: GroupTimes, instance_id: str = "") -> None:
        """Takes a started engine, and owns it from here on. `instance_id`: by which calls are routed to this group and
        no other; made here where none are routed."""
        self.engine = engine
        self.metrics = metrics
        self._times = times
        self._instance_id = instance_id or uuid.uuid4().hex
        self._created = int(time.time())
        self._links: dict[str, _GatewayLink] = {}
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._keys: tuple[bytes, bytes] = zmq.curve_keypair()
        self._reaper: asyncio.Task[None] | None = None
        self._signs: asyncio.Task[None] | None = None

    async def answer(self, method: str, args: tuple[Any, ...], route: Route | None = None) -> tuple[bool, Any]:
        if route is not None and route.to not in ("", self._instance_id):
            return False, error_to_wire(EngineGoneError(f"Engine {route.to} takes no calls any more."))
        return await super().answer(method, args)

    async def describe(self) -> EngineInfo:
        engine = self.engine
        return EngineInfo(
            instance_id=self._instance_id,
            model_name=engine.model_name,
            max_model_len=engine.max_model_len,
            vocab_size=engine.vocab_size,
            fingerprint=_fingerprint(engine),
            created=self._created,
            data_plane_key=self._keys[0],
        )

    async def attach(self, gateway_id: str, reply: ReplyAddress | DeltaSink) -> None:
        """Makes a gateway known. One in another process must accept this group's key before it calls: a connection
        that is refused once is not tried again."""
        self._drop_link(gateway_id)
        if not isinstance(reply, ReplyAddress):
            self._links[gateway_id] = _GatewayLink(reply)
            return
        if self._context is None:
            self._context = zmq.Context()
        self._links[gateway_id] = _GatewayLink(ZmqSink(self._context, reply, self._keys))
        if self._reaper is None:
            self._reaper = asyncio.create_task(self._reap(), name="gateway-leases")
            self._signs = asyncio.create_task(self._give_signs(), name="signs-of-life")

    async def submit(self, gateway_id: str, requests: list[Request]) -> None:
        """Queues requests that belong together: all of them or none. Raises what `Engine.submit` raises."""
        link = self._links.get(gateway_id)
        if link is None:
            raise UnknownGatewayError(f"Gateway {gateway_id} is not attached.")
        link.last_heard = time.monotonic()
        accepted: list[str] = []
        try:
            for request in requests:
                link.expect(request)
                accepted.append(request.request_id)
                self.engine.submit(request, link)
        except Exception:
            await self.abort(accepted)
            for request_id in accepted:
                link.forget(request_id)
            raise

    async def abort(self, request_ids: list[str]) -> None:
        """Ends requests within a step. Idempotent; unknown ids are ignored."""
        for request_id in request_ids:
            self.engine.abort(request_id)

    async def heartbeat(self, gateway_id: str) -> EngineStatus:
        """Renews the gateway's lease and says how the engine is."""
        link = self._links.get(gateway_id)
        if link is not None:
            link.last_heard = time.monotonic()
        return self._status_for(link)

    def _status_for(self, link: _GatewayLink | None) -> EngineStatus:
        engine, stats = self.engine, self.engine.stats()
        self._record_blocks(stats.kv_blocks_free, stats.kv_blocks_cached, stats.kv_blocks)
        return EngineStatus(
            instance_id=self._instance_id if link is not None else "",
            alive=engine.healthy,
            running=stats.num_running,
            waiting=stats.num_waiting,
            live_requests=stats.num_live_requests,
            own_requests=frozenset() if link is None else frozenset(link.live_requests()),
            seconds_since_step=max(0.0, time.monotonic() - engine.last_step_time),
            kv_blocks=stats.kv_blocks,
            kv_blocks_free=stats.kv_blocks_free,
        )

    async def metrics_text(self) -> str:
        stats = self.engine.stats()
        self._record_blocks(stats.kv_blocks_free, stats.kv_blocks_cached, stats.kv_blocks)
        self.metrics.set("shoal_sequences_running", stats.num_running)
        self.metrics.set("shoal_sequences_waiting", stats.num_waiting)
        return self.metrics.render()

    async def check_health(self) -> None:
        """Serve's health check: raising makes Serve restart the whole group."""
        if not self.engine.healthy:
            raise EngineDeadError("The engine is dead or hangs.")

    async def shutdown(self) -> None:
        """Lets running requests end for `drain_s`, aborts the rest with an error, stops the ranks."""
        # Gateways cannot call any more: their leases are not renewed. They are still sent signs of life, or they would
        # take their requests elsewhere.
        if self._reaper is not None:
            self._reaper.cancel()
        await asyncio.to_thread(self.engine.shutdown, self._times.drain)
        if self._signs is not None:
            self._signs.cancel()
        for gateway_id in list(self._links):
            self._drop_link(gateway_id)
        context, self._context = self._context, None
        if context is not None:
            # Waits for the last deltas to be taken.
            await asyncio.to_thread(context.term)

    def _record_blocks(self, free: int, cached: int, total: int) -> None:
        """`free` counts cached blocks too: they can be taken at once."""
        for state, count in (("free", free - cached), ("cached", cached), ("used", total - free)):
            self.metrics.set("shoal_kv_blocks", count, (state,))

    def _drop_link(self, gateway_id: str) -> None:
        link = self._links.pop(gateway_id, None)
        if link is not None:
            for request_id in link.live_requests():
                self.engine.abort(request_id)
            link.close()

    async def _reap(self) -> None:
        """Gateways that died without a word: their requests must not go on."""
        while True:
            await asyncio.sleep(self._times.gateway_lease / 4)
            now = time.monotonic()
            for gateway_id, link in list(self._links.items()):
                unheard_s = now - link.last_heard
                if link.remote is not None and unheard_s > self._times.gateway_lease:
                    logger.warning("gateway %s was not heard of for %g s; its requests end", gateway_id, unheard_s)
                    self._drop_link(gateway_id)

    async def _give_signs(self) -> None:
        while True:
            await asyncio.sleep(self._times.sign_of_life)
            for link in list(self._links.values()):
                if link.remote is not None:
                    with suppress(zmq.Again):  # it takes nothing: its next tokens will find out
                        link.remote.tell(self._status_for(link))


class _GatewayLink:
    """A gateway's sink, with the ids of its live requests (so that they can be ended when it is gone)."""

    def __init__(self, sink: DeltaSink) -> None:
        self._sink = sink
        self._closed = False
        self.remote = sink if isinstance(sink, ZmqSink) else None
        """Of a gateway in another process, which may die without a word."""
        self.last_heard = time.monotonic()
        # Written by the event loop (a new id) and the engine thread (an id that ended); each operation is one dict
        # operation, and an id is written by one side only at a time.
        self._open_sequences: dict[str, int] = {}

    def expect(self, request: Request) -> None:
        self._open_sequences[request.request_id] = len(request.open_indices)

    def forget(self, request_id: str) -> None:
        self._open_sequences.pop(request_id, None)

    def live_requests(self) -> list[str]:
        return list(self._open_sequences)

    def deliver(self, deltas: list[RequestDelta]) -> None:
        for delta in deltas:
            if delta.finish_reason is not None:
                still_open = self._open_sequences.get(delta.request_id, 1) - 1
                if still_open > 0:
                    self._open_sequences[delta.request_id] = still_open
                else:
                    self._open_sequences.pop(delta.request_id, None)
        if not self._closed:
            self._sink.deliver(deltas)

    def close(self) -> None:
        self._closed = True
        if self.remote is not None:
            self.remote.close()


def _fingerprint(engine: Engine) -> str:
    identity = f"{engine.model_name}|{engine.vocab_size}|{engine.max_model_len}|{package_version()}"
    return "fp_" + hashlib.sha256(identity.encode()).hexdigest()[:10]
