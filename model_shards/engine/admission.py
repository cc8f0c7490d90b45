"""What is let in: decided on the caller's thread, before any work is spent on a request."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from shoal.configs.errors import (
    ContextLengthError,
    EngineDeadError,
    InvalidRequestError,
    OverloadedError,
    ShoalError,
)
from shoal.model_shards.engine.request import Request

_LONGEST_RETRY_S = 60.0


def output_limit(request: Request, max_model_len: int, num_blocks: int, block_size: int) -> int:
    """Most output tokens a request may get: max_tokens, or what context and KV memory allow.

    Raises ContextLengthError (longer than the model's context) or InvalidRequestError (empty prompt; more KV memory
    than there is) for one that could never run, so that nothing in the queue can block it for ever.
    """
    prompt, wanted = len(request.prompt_token_ids), request.sampling.max_tokens
    if prompt == 0:
        raise InvalidRequestError("The prompt is empty; it needs at least one token.", param="prompt")
    at_least = 1 if wanted is None else wanted
    if prompt + at_least > max_model_len:
        raise ContextLengthError(
            f"This model's context is {max_model_len} tokens, but {prompt + at_least} were asked for "
            f"({prompt} in the prompt, {at_least} to generate). Shorten the prompt or lower max_tokens.",
            param="prompt" if prompt + 1 > max_model_len else "max_tokens",
        )
    # The last token is never computed, so it needs no slot.
    capacity = num_blocks * block_size
    if prompt + at_least - 1 > capacity:
        raise InvalidRequestError(
            f"The request needs KV memory for {prompt + at_least - 1} tokens, but the pool holds {capacity} "
            f"({num_blocks} blocks of {block_size}). Lower max_tokens or shorten the prompt.",
            param="max_tokens",
        )
    return min(max_model_len, capacity + 1) - prompt if wanted is None else wanted


@dataclass(frozen=True, slots=True)
class AdmissionLimits:
    max_waiting_requests: int
    """Sequences that may wait to start; a request with n > 1 counts as n."""
    max_waiting_tokens: int
    """Prompt tokens of the requests that wait to start."""


class AdmissionGate:
    """Counts requests from submission until they start, and knows every live request id. Thread-safe."""

    def __init__(self, limits: AdmissionLimits) -> None:
        self._limits = limits
        self._lock = threading.Condition()
        self._waiting: dict[str, Request] = {}
        self._live: set[str] = set()
        self._waiting_sequences = 0
        self._waiting_tokens = 0
        self._closed: Callable[[], ShoalError] | None = None
        """Makes the error for whoever comes now. A new one each time: one that is raised again and again keeps the
        frames, and so the requests, of all whom it was raised for."""
        self.prompt_tokens_per_s = 0.0
        """Recent speed of prefill, for the Retry-After hint; 0: not known yet."""

    @property
    def waiting_tokens(self) -> int:
        return self._waiting_tokens

    @property
    def num_live(self) -> int:
        return len(self._live)

    def enter(self, request: Request) -> None:
        """Raises OverloadedError (queue full, shutting down), EngineDeadError, or InvalidRequestError for an id that is
        in use."""
        prompt, samples = len(request.prompt_token_ids), request.sampling.n
        with self._lock:
            if self._closed is not None:
                raise self._closed()
            if request.request_id in self._live:
                raise InvalidRequestError(f"Request id {request.request_id!r} is in use.", param="request_id")
            # An empty queue takes any request that the engine can serve, so that no limit can refuse one for ever.
            if self._waiting and (
                self._waiting_sequences + samples > self._limits.max_waiting_requests
                or self._waiting_tokens + prompt > self._limits.max_waiting_tokens
            ):
                raise OverloadedError(
                    f"The server is at its limit: {self._waiting_sequences} requests with {self._waiting_tokens} "
                    "prompt tokens are waiting already. Try again later.",
                    retry_after_s=self._retry_after(),
                )
            self._live.add(request.request_id)
            self._waiting[request.request_id] = request
            self._waiting_sequences += samples
            self._waiting_tokens += prompt

    def started(self, request_id: str) -> bool:
        """The request runs now. False when it was not waiting (it had started before)."""
        with self._lock:
            request = self._waiting.pop(request_id, None)
            if request is None:
                return False
            self._waiting_sequences -= request.sampling.n
            self._waiting_tokens -= len(request.prompt_token_ids)
            return True

    def ended(self, request_id: str) -> None:
        self.started(request_id)
        with self._lock:
            self._live.discard(request_id)
            self._lock.notify_all()

    def wait_until_empty(self, timeout_s: float) -> bool:
        """Blocks until no request is live; False when the time was up before."""
        with self._lock:
            return self._lock.wait_for(lambda: not self._live, timeout_s)

    def close_for_shutdown(self) -> None:
        with self._lock:
            self._closed = self._closed or _shutting_down

    def close_for_death(self, reason: str) -> None:
        with self._lock:
            self._closed = partial(EngineDeadError, reason)

    def _retry_after(self) -> float:
        """About the time that the present queue takes to prefill, between 1 and 60 seconds."""
        if self.prompt_tokens_per_s <= 0:
            return 1.0
        return min(_LONGEST_RETRY_S, max(1.0, self._waiting_tokens / self.prompt_tokens_per_s))


def _shutting_down() -> ShoalError:
    return OverloadedError("The server is shutting down.", retry_after_s=5.0)
