"""One HTTP request's answer while it grows: its engine requests, output rails, token counts, deadline and end."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace

from shoal.configs.app import GatewayConfig
from shoal.deployments.http.errors import GenerationError, RequestTimeoutError
from shoal.deployments.protocol.responses import Usage, make_usage
from shoal.deployments.streams import LiveRequest, RequestStream, StreamHub, merge
from shoal.guardrails.pipeline import GuardedText, RailPipeline
from shoal.guardrails.verdicts import Verdict
from shoal.model_shards.engine.plan import TokenLogprobs
from shoal.model_shards.engine.request import FinishReason, Request, RequestDelta

_FAILURES = frozenset({FinishReason.ERROR, FinishReason.ABORT})


@dataclass(slots=True)
class Outputs:
    """What happens around a generation."""

    rails: RailPipeline
    abort: Callable[[list[LiveRequest]], None]
    """Sends the abort of engine requests on its way; does not wait."""
    blocked: Callable[[Verdict], None]
    """Told once for each choice that an output rail ends."""


class GuardedChoice:
    """The output rails over one choice's deltas. Tokens and logprobs wait with the text they belong to: a logprob
    entry shows its token, and the forbidden word with it."""

    def __init__(self, guarded: GuardedText, *, whole_deltas: bool) -> None:
        """`whole_deltas`: release text only together with its tokens (someone reads them); else by the character."""
        self._guarded = guarded
        self._whole_deltas = whole_deltas
        self._ready = ""
        self._pieces: deque[tuple[int, list[int], list[TokenLogprobs]]] = deque()

    @property
    def verdict(self) -> Verdict:
        return self._guarded.verdict

    def apply(self, delta: RequestDelta) -> RequestDelta:
        """What may go out now. Ends with `content_filter` if a rail blocks."""
        self._ready += self._guarded.feed(delta.text)
        if delta.finish_reason is not None:
            self._ready += self._guarded.finish()
        blocked = not self._guarded.verdict.allowed
        if self._whole_deltas:
            self._pieces.append((len(delta.text), delta.token_ids, delta.logprobs))
            text, token_ids, logprobs = self._take_whole()
        else:
            text, token_ids, logprobs = self._ready, [], []
            self._ready = ""
        out = replace(delta, text=text, token_ids=token_ids, logprobs=logprobs)
        if blocked:
            out.finish_reason, out.stop_reason = FinishReason.CONTENT_FILTER, None
        return out

    def _take_whole(self) -> tuple[str, list[int], list[TokenLogprobs]]:
        size = 0
        token_ids: list[int] = []
        logprobs: list[TokenLogprobs] = []
        while self._pieces and size + self._pieces[0][0] <= len(self._ready):
            length, ids, entries = self._pieces.popleft()
            size += length
            token_ids += ids
            logprobs += entries
        text, self._ready = self._ready[:size], self._ready[size:]
        return text, token_ids, logprobs


@dataclass(slots=True)
class _Counts:
    prompt: int = 0
    cached: dict[str, int] = field(default_factory=dict)
    output: dict[int, int] = field(default_factory=dict)


class Generation:
    """Use as a context manager: leaving it ends whatever is still running, however it is left."""

    def __init__(self, requests: list[Request], hub: StreamHub, config: GatewayConfig, outputs: Outputs) -> None:
        self.requests: list[LiveRequest] = []
        self._hub, self._config, self._outputs = hub, config, outputs
        self._stream = RequestStream()
        self._deadline = time.monotonic() + config.request_timeout_s
        self._counts = _Counts(prompt=sum(len(request.prompt_token_ids) for request in requests))
        self._open: set[int] = set()
        """Choices without a finish reason yet."""
        self._guards: dict[int, GuardedChoice] = {}
        self._closed = False
        first_choice = 0
        for request in requests:
            self.requests.append(LiveRequest(request, self._stream, first_choice))
            whole = request.sampling.logprobs is not None
            for choice in range(first_choice, first_choice + request.sampling.n):
                self._open.add(choice)
                if outputs.rails:
                    self._guards[choice] = GuardedChoice(outputs.rails.open_stream(), whole_deltas=whole)
            first_choice += request.sampling.n

    def __enter__(self) -> Generation:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def usage(self) -> Usage:
        """So far; exact once the generation has ended. A prompt counts once, whatever n is."""
        counts = self._counts
        return make_usage(counts.prompt, sum(counts.output.values()), sum(counts.cached.values()))

    @property
    def is_over(self) -> bool:
        """Every choice has ended: `updates` has nothing more to give."""
        return not self._open

    async def updates(self) -> AsyncIterator[dict[int, RequestDelta]]:
        """What is new, by choice, until every choice has ended; an empty dict after `keep_alive_s` of silence. The last
        delta of a choice has its `finish_reason`. Raises what ended the request otherwise."""
        while self._open:
            left_s = self._deadline - time.monotonic()
            if left_s <= 0:
                message = f"The request ran longer than {self._config.request_timeout_s:g} s and was ended."
                raise RequestTimeoutError(message)
            pending = await self._stream.next(min(left_s, self._config.keep_alive_s))
            updates, failure = self._take(pending)
            if failure is None or any(delta.text for delta in updates.values()):
                # What came before a failure is still the client's.
                yield updates
            if failure is not None:
                raise failure

    def be_patient(self) -> None:
        """From here on `updates` waits for the end of a choice and gives all of it at once; except where output rails
        have to see the text as it grows."""
        if not self._guards:
            self._stream.be_patient()

    def _take(self, pending: dict[int, list[RequestDelta]]) -> tuple[dict[int, RequestDelta], GenerationError | None]:
        """What the client gets of these deltas, one a choice, and the error that ends everything after it."""
        updates: dict[int, RequestDelta] = {}
        failure = None
        for choice, deltas in pending.items():
            shown = []
            for delta in deltas:
                if delta.finish_reason is not None and delta.finish_reason in _FAILURES:
                    failure = GenerationError(delta.error or "The request was ended by the server.")
                    delta = replace(delta, finish_reason=None)
                if choice in self._open:
                    shown.append(self._pass(choice, delta))
            if shown:
                updates[choice] = merge(shown)
        return updates, failure

    def _pass(self, choice: int, delta: RequestDelta) -> RequestDelta:
        """Counts a delta and passes it through the rails."""
        self._counts.output[choice] = delta.num_output_tokens
        if delta.num_cached_tokens:
            self._counts.cached[delta.request_id] = delta.num_cached_tokens
        guard = self._guards.get(choice)
        if guard is not None:
            delta = guard.apply(delta)
            if delta.finish_reason is FinishReason.CONTENT_FILTER:
                self._outputs.blocked(guard.verdict)
        if delta.finish_reason is not None:
            self._open.discard(choice)
        return delta

    def close(self, *, submitted: bool = True) -> None:
        """Idempotent. Nothing arrives after this; engine requests that may still run are aborted (unless none does)."""
        for live in self.requests:
            self._hub.close(live)
        # A choice that a rail has ended is over for the client, not for the engine.
        may_run = bool(self._open) or any(not guard.verdict.allowed for guard in self._guards.values())
        if submitted and may_run and not self._closed:
            self._outputs.abort(self.requests)
        self._closed = True
        self._stream.close()
