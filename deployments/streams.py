"""From the engines' deltas, one batch a step, to the streams that wait for them.

Everything here runs on the gateway's event loop, except `LoopSink.deliver`.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from shoal.configs.errors import ShoalError
from shoal.model_shards.engine.request import FinishReason, Request, RequestDelta, ResumedOutput

if TYPE_CHECKING:
    from shoal.deployments.engine_link import EngineLink

_COMPACT_AT = 32
"""Deltas of one choice that wait before they are joined: joined at each token, a long answer would be copied as often
as it has tokens."""


class RequestStream:
    """The deltas of one HTTP request (one or more engine requests), merged while nobody reads.

    A reader that lags finds, for each choice, a few large deltas instead of a queue: memory is bounded by the text of
    the answer itself, and a slow client costs fewer chunks, not more. Deltas with logprobs stay apart, because the
    output rails must know which text each logprob belongs to.
    """

    def __init__(self) -> None:
        self._pending: dict[int, list[RequestDelta]] = {}
        self._error: ShoalError | None = None
        self._loop = asyncio.get_running_loop()
        self._patient = False
        self._ready = False
        """There is something that the reader should be woken for."""
        # A future and not an asyncio.Event, which makes one for every wait and asks for the running loop before.
        self._waiter: asyncio.Future[None] | None = None
        # One timer that is moved on lazily, instead of one a token.
        self._timer: asyncio.TimerHandle | None = None
        self._waits_until = 0.0

    def be_patient(self) -> None:
        """From here on the reader is woken when a choice ends, and not for what comes before."""
        self._patient = True

    def push(self, choice: int, delta: RequestDelta) -> None:
        pending = self._pending.get(choice)
        if pending is None:
            self._pending[choice] = [delta]
        else:
            pending.append(delta)
            if len(pending) >= _COMPACT_AT and not delta.logprobs:
                self._pending[choice] = [merge(pending)]
        if not self._patient or delta.finish_reason is not None:
            self._wake()

    def fail(self, error: ShoalError) -> None:
        """The stream ends with this error, after what has already arrived."""
        self._error = error
        self._wake()

    async def next(self, timeout_s: float) -> dict[int, list[RequestDelta]]:
        """What came since the last call, by choice; empty after `timeout_s` without anything to wake for (what did come
        stays then). Raises the error that ended the stream."""
        if not self._ready:
            self._waits_until = self._loop.time() + timeout_s
            if self._timer is None or self._timer.when() > self._waits_until:
                self.close()
                self._timer = self._loop.call_at(self._waits_until, self._on_timer)
            self._waiter = self._loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
            if not self._ready:
                return {}
        self._ready = False
        pending, self._pending = self._pending, {}
        if self._error is not None:
            # What has arrived is given first; the error stays for the next call.
            if not pending:
                raise self._error
            self._ready = True
        return pending

    def close(self) -> None:
        """Takes the timer back."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _wake(self) -> None:
        self._ready = True
        self._end_wait()

    def _end_wait(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _on_timer(self) -> None:
        self._timer = None
        if self._waiter is None:
            return
        if self._loop.time() < self._waits_until:
            self._timer = self._loop.call_at(self._waits_until, self._on_timer)
        else:
            self._end_wait()


def merge(deltas: Sequence[RequestDelta]) -> RequestDelta:
    """Deltas of one sequence that follow each other, at least one, as one."""
    if len(deltas) == 1:
        return deltas[0]
    last = deltas[-1]
    return RequestDelta(
        request_id=last.request_id,
        index=last.index,
        text="".join([delta.text for delta in deltas]),
        token_ids=[token_id for delta in deltas for token_id in delta.token_ids],
        logprobs=[entry for delta in deltas for entry in delta.logprobs],
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
        error=last.error,
        num_output_tokens=last.num_output_tokens,
        num_cached_tokens=max([delta.num_cached_tokens for delta in deltas]),
        prompt_logprobs=next((d.prompt_logprobs for d in deltas if d.prompt_logprobs is not None), None),
    )


@dataclass(slots=True, eq=False)
class LiveRequest:
    """An engine request until its last delta: where its tokens go, where it runs, and what of it has arrived. That is
    all it takes to go on in another engine (`for_engine`)."""

    request: Request
    """As the client asked it; its sequence i is the stream's choice `first_choice + i`."""
    stream: RequestStream
    first_choice: int
    engine: EngineLink | None = None
    """Where it runs, or is being sent to."""
    attempt: int = 0
    """Submissions that came to nothing so far."""
    continuations: int = 0
    """How often an engine lost it."""
    closed: bool = False
    """Nobody reads the stream any more."""
    outputs: list[list[int]] = field(init=False)
    """Token ids that have arrived, by sequence."""
    finished: list[bool] = field(init=False)
    _has_begun: bool = False
    """Sequence 0 has given something, and so what is told once: the prompt's logprobs, and its cached tokens."""

    def __post_init__(self) -> None:
        self.outputs = [[] for _ in range(self.request.sampling.n)]
        self.finished = [False] * self.request.sampling.n

    @property
    def engine_id(self) -> str:
        """Its id in the engine. A new one each time, so that what a lost engine may still send belongs to nobody."""
        return f"{self.request.request_id}.{self.attempt}" if self.attempt else self.request.request_id

    @property
    def is_over(self) -> bool:
        return all(self.finished)

    @property
    def num_open(self) -> int:
        return self.finished.count(False)

    def for_engine(self) -> Request:
        """The request with which an engine goes on after what has arrived."""
        request = self.request
        if not self.attempt:
            return request
        resumed: tuple[ResumedOutput, ...] = ()
        if any(self.outputs) or any(self.finished):
            resumed = tuple(map(ResumedOutput, self.outputs, self.finished))
        sampling = replace(request.sampling, prompt_logprobs=None) if self._has_begun else request.sampling
        return replace(request, request_id=self.engine_id, sampling=sampling, resumed=resumed)

    def take(self, delta: RequestDelta) -> None:
        self.outputs[delta.index] += delta.token_ids
        if delta.finish_reason is not None:
            self.finished[delta.index] = True
        if self.attempt:
            delta.request_id = self.request.request_id
            if self._has_begun:
                delta.num_cached_tokens = 0
        if delta.index == 0:
            self._has_begun = True
        self.stream.push(self.first_choice + delta.index, delta)


class StreamHub:
    """Which stream waits for which engine request. Deltas of requests that it does not know (ended, closed, aborted,
    gone on elsewhere) are dropped."""

    def __init__(self) -> None:
        self._live: dict[str, LiveRequest] = {}
        self.gave_back: Callable[[LiveRequest, str], bool] = lambda _live, _reason: False
        """Asked when an engine ends a request through no fault of its own: whether somebody sees to it that it goes on
        elsewhere. Then its stream hears nothing of it."""

    @property
    def live(self) -> list[LiveRequest]:
        """Engine requests that have not given their last delta."""
        return list(self._live.values())

    def open(self, live: LiveRequest) -> None:
        """Deltas under its present id reach its stream from here on."""
        assert live.engine_id not in self._live, live.engine_id
        self._live[live.engine_id] = live

    def close(self, live: LiveRequest) -> None:
        """Idempotent."""
        self._live.pop(live.engine_id, None)

    def dispatch(self, deltas: list[RequestDelta]) -> None:
        for delta in deltas:
            live = self._live.get(delta.request_id)
            if live is None:
                continue
            ended = delta.finish_reason
            if ended is FinishReason.ABORT and self.gave_back(live, delta.error or "the engine ended it"):
                continue
            live.take(delta)
            if ended is not None and live.is_over:
                del self._live[live.engine_id]


class LoopSink:
    """A DeltaSink for an engine in this process: hands each step's deltas to the event loop, waking it once a step
    (and not at all while it has not yet taken the last). Raises RuntimeError once the loop is closed."""

    def __init__(self, hub: StreamHub, loop: asyncio.AbstractEventLoop) -> None:
        self._hub, self._loop = hub, loop
        self._steps: deque[list[RequestDelta]] = deque()
        self._scheduled = False

    def deliver(self, deltas: list[RequestDelta]) -> None:
        self._steps.append(deltas)
        # The flag is cleared before the deque is emptied, so a step that is appended meanwhile is seen by that pass
        # or schedules the next one; a second wake-up for nothing is harmless.
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon_threadsafe(self._take)

    def _take(self) -> None:
        self._scheduled = False
        while self._steps:
            self._hub.dispatch(self._steps.popleft())
