"""The engine in this process, without Ray or HTTP: what remains is the engine's own speed."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from shoal.configs.errors import ShoalError
from shoal.deployments.bench.prompts import PlannedRequest, Ruler
from shoal.deployments.bench.records import RequestRecord
from shoal.deployments.bench.rulers import LocalRuler
from shoal.deployments.bench.target import Clock, Target

if TYPE_CHECKING:
    from shoal.model_shards.engine.engine import Engine
    from shoal.model_shards.engine.request import RequestDelta


class OfflineTarget(Target):
    """Takes over a started engine and shuts it down at the end."""

    in_process = True

    def __init__(self, engine: Engine) -> None:
        super().__init__()
        self._engine = engine
        self._numbers = itertools.count()

    @property
    def label(self) -> str:
        return f"{self._engine.model_name} in this process"

    def describe(self) -> dict[str, Any]:
        return {"kind": "offline", "model": self._engine.model_name}

    async def ruler(self) -> Ruler:
        return LocalRuler(self._engine.tokenizer)

    async def __aexit__(self, *exc: object) -> None:
        await asyncio.to_thread(self._engine.shutdown)

    async def send(self, request: PlannedRequest, due: float | None = None) -> RequestRecord:
        from shoal.model_shards.engine.request import Request
        from shoal.model_shards.sampling.params import SamplingParams

        token_ids = await asyncio.to_thread(self._engine.tokenizer.encode_chat, request.messages)
        now = self.clock()
        record = RequestRecord(request.max_tokens, now if due is None else due, request.tag, sent=now)
        record.input_tokens = len(token_ids)
        sampling = SamplingParams(max_tokens=request.max_tokens, temperature=0.0, ignore_eos=True)
        name = f"bench-{next(self._numbers)}"
        sink = _RecordSink(record, self.clock, self.on_event, asyncio.get_running_loop())
        try:
            self._engine.submit(Request(name, token_ids, sampling, seed=0), sink)
        except ShoalError as error:
            record.end, record.error = self.clock(), error.message
            return record
        try:
            await sink.finished
        except asyncio.CancelledError:
            self._engine.abort(name)
            raise
        return record


class _RecordSink:
    """Collects one request's deltas on the engine's thread; wakes the waiting coroutine once, at the end."""

    def __init__(
        self,
        record: RequestRecord,
        clock: Clock,
        on_event: Callable[[int], None],
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self._record = record
        self._clock = clock
        self._on_event = on_event
        self._loop = loop
        self.finished: asyncio.Future[None] = loop.create_future()

    def deliver(self, deltas: list[RequestDelta]) -> None:
        now, record = self._clock(), self._record
        for delta in deltas:
            if delta.text or delta.token_ids:
                record.token_times.append(now)
                self._on_event(len(delta.token_ids))
            if delta.finish_reason is None:
                continue
            record.end = now
            record.output_tokens = delta.num_output_tokens
            record.cached_tokens = delta.num_cached_tokens
            record.finish_reason = delta.finish_reason.value
            record.error = delta.error or (None if record.token_times else "the request ended without any token")
            self._loop.call_soon_threadsafe(self._wake)

    def _wake(self) -> None:
        if not self.finished.done():
            self.finished.set_result(None)
