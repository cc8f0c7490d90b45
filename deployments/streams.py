"""From the engine's deltas, one batch a step, to the streams that wait for them.

Everything here runs on the gateway's event loop, except `LoopSink.deliver`.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from shoal.configs.errors import ShoalError
from shoal.model_shards.engine.request import RequestDelta


class RequestStream:
    """The deltas of one HTTP request (one or more engine requests), merged while nobody reads.

    A reader that lags finds, for each choice, one larger delta instead of a queue: memory is bounded by the text of
    the answer itself, and a slow client costs fewer chunks, not more. Deltas with logprobs stay apart, because the
    output rails must know which text each logprob belongs to.
    """

    def __init__(self) -> None:
        self._pending: dict[int, list[RequestDelta]] = {}
        self._error: ShoalError | None = None
        self._wake = asyncio.Event()
        # One timer that is moved on lazily, instead of one a token.
        self._timer: asyncio.TimerHandle | None = None
        self._waits_until: float | None = None

    def push(self, choice: int, delta: RequestDelta) -> None:
        pending = self._pending.setdefault(choice, [])
        if pending and not delta.logprobs:
            pending[-1] = merge(pending[-1], delta)
        else:
            pending.append(delta)
        self._wake.set()

    def fail(self, error: ShoalError) -> None:
        """The stream ends with this error, after what has already arrived."""
        self._error = error
        self._wake.set()

    async def next(self, timeout_s: float) -> dict[int, list[RequestDelta]]:
        """What came since the last call, by choice; empty after `timeout_s` without anything. Raises the error that
        ended the stream."""
        if not self._wake.is_set():
            loop = asyncio.get_running_loop()
            self._waits_until = loop.time() + timeout_s
            if self._timer is None or self._timer.when() > self._waits_until:
                self.close()
                self._timer = loop.call_at(self._waits_until, self._on_timer)
            await self._wake.wait()
            self._waits_until = None
        self._wake.clear()
        pending, self._pending = self._pending, {}
        if self._error is not None:
            # What has arrived is given first; the error stays for the next call.
            if not pending:
                raise self._error
            self._wake.set()
        return pending

    def close(self) -> None:
        """Takes the timer back."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _on_timer(self) -> None:
        self._timer = None
        if self._waits_until is None:
            return
        loop = asyncio.get_running_loop()
        if loop.time() < self._waits_until:
            self._timer = loop.call_at(self._waits_until, self._on_timer)
        else:
            self._wake.set()


def merge(first: RequestDelta, second: RequestDelta) -> RequestDelta:
    """Two deltas of one sequence as one."""
    return RequestDelta(
        request_id=first.request_id,
        index=first.index,
        text=first.text + second.text,
        token_ids=first.token_ids + second.token_ids,
        logprobs=first.logprobs + second.logprobs,
        finish_reason=second.finish_reason,
        stop_reason=second.stop_reason,
        error=second.error,
        num_output_tokens=second.num_output_tokens,
        num_cached_tokens=max(first.num_cached_tokens, second.num_cached_tokens),
        prompt_logprobs=second.prompt_logprobs if first.prompt_logprobs is None else first.prompt_logprobs,
    )


@dataclass(slots=True)
class _Expected:
    """An engine request whose deltas are still to come."""

    stream: RequestStream
    first_choice: int
    open_sequences: int


class StreamHub:
    """Which stream waits for which engine request. Deltas of requests that it does not know (ended, closed, aborted)
    are dropped."""

    def __init__(self) -> None:
        self._expected: dict[str, _Expected] = {}

    @property
    def request_ids(self) -> list[str]:
        """Engine requests that have not given their last delta."""
        return list(self._expected)

    def add(self, request_id: str, stream: RequestStream, first_choice: int, num_sequences: int) -> None:
        """Deltas of `request_id` go to `stream`; its sequence i is the stream's choice `first_choice + i`."""
        assert request_id not in self._expected, request_id
        self._expected[request_id] = _Expected(stream, first_choice, num_sequences)

    def remove(self, request_id: str) -> None:
        self._expected.pop(request_id, None)

    def dispatch(self, deltas: list[RequestDelta]) -> None:
        for delta in deltas:
            expected = self._expected.get(delta.request_id)
            if expected is None:
                continue
            expected.stream.push(expected.first_choice + delta.index, delta)
            if delta.finish_reason is not None:
                expected.open_sequences -= 1
                if expected.open_sequences == 0:
                    del self._expected[delta.request_id]

    def fail(self, request_ids: Iterable[str], error: ShoalError) -> None:
        for request_id in request_ids:
            expected = self._expected.get(request_id)
            if expected is not None:
                expected.stream.fail(error)


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
